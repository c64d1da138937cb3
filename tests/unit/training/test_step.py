"""One step: how a batch is cut does not matter, packed documents are separate documents, bf16 masters are fp32."""

import copy
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from moesaic.common.errors import MoesaicError
from moesaic.common.recipe import load_recipe
from moesaic.data.packing import PackedBatch
from moesaic.modeling.cross_entropy import ratio_with_error
from moesaic.routing.install import install
from moesaic.training.optimizer import MasterWeights, build_optimizer, decays
from moesaic.training.parallel import World
from moesaic.training.recipe import ScratchModel, TrainRecipe, scratch_config
from moesaic.training.start import Trainable
from moesaic.training.step import StepResult, run_step
from tests.tiny_training import DENSE, MOE, VOCABULARY

ONE = World(rank=0, local_rank=0, size=1, replicas=1, device=torch.device("cpu"))
RULES = {
    "topk": {"rule": "topk"},
    "own": {},
    "one_per_group": {"rule": "one_per_group", "expert_groups": [0, 0, 1, 1, 2, 2, 3, 3]},
    "document_pool": {"rule": "document_pool", "pool_size": [2, 5]},
}


def make_recipe(**changes: Any) -> TrainRecipe:
    values = {
        "model": {"family": "llama", "config": DENSE, "moe": MOE},
        "tokenizer": "none",
        "data": {"sequence_length": 16, "sources": [{"path": "none", "domain": "a"}]},
        "optimizer": {"lr": 1e-2, "clip": None},
        "batch": {"tokens": 64},
        "budget": {"steps": 1},
        "precision": "fp32",
    }
    return load_recipe(TrainRecipe, values | changes)


def make_trainable(recipe: TrainRecipe, *, seed: int = 0) -> Trainable:
    assert isinstance(recipe.model, ScratchModel)
    values = scratch_config(recipe.model)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    bias = recipe.losses.bias_balancing is not None or None
    installation = install(model, recipe.routing, selection_bias=bias)
    masters = MasterWeights(model, copies=torch.bfloat16 if recipe.precision == "bf16" else None)
    return Trainable(
        recipe=recipe,
        world=ONE,
        model=model,
        config=config,
        installation=installation,
        masters=masters,
        optimizer=build_optimizer(masters.trainable, recipe.optimizer),
    )


def pack(lengths: list[list[int]], width: int, *, seed: int = 3) -> PackedBatch:
    """Sequences of documents of these lengths, padded to `width`; every other document is of domain 1."""
    draw = torch.Generator().manual_seed(seed)
    rows = {name: torch.full((len(lengths), width), fill) for name, fill in
            (("ids", 0), ("labels", -100), ("positions", 0), ("documents", -1), ("domains", -1))}  # fmt: skip
    document = 0
    for row, documents in enumerate(lengths):
        column = 0
        for length in documents:
            here = slice(column, column + length)
            rows["ids"][row, here] = torch.randint(3, VOCABULARY, (length,), generator=draw)
            rows["labels"][row, here] = rows["ids"][row, here]
            rows["labels"][row, column] = -100
            rows["positions"][row, here] = torch.arange(length)
            rows["documents"][row, here] = document
            rows["domains"][row, here] = document % 2
            document, column = document + 1, column + length
        rows["positions"][row, column:] = torch.arange(width - column)
    return PackedBatch(
        input_ids_BS=rows["ids"],
        labels_BS=rows["labels"],
        position_ids_BS=rows["positions"],
        document_ids_BS=rows["documents"],
        domain_ids_BS=rows["domains"],
        first_document=0,
        num_documents=document,
    )


def rows_of(batch: PackedBatch, first: int, last: int) -> PackedBatch:
    documents = batch.document_ids_BS[first:last]
    real = documents[documents >= 0]
    names = ("input_ids_BS", "labels_BS", "position_ids_BS", "document_ids_BS", "domain_ids_BS")
    return PackedBatch(
        **{name: getattr(batch, name)[first:last] for name in names},
        first_document=int(real.min()),
        num_documents=len(real.unique()),
    )


def separate(batch: PackedBatch, width: int) -> list[PackedBatch]:
    """Every document alone in a padded sequence of its own, under its own number."""
    parts = []
    for document in range(batch.num_documents):
        row, columns = torch.where(batch.document_ids_BS == document)
        length = len(columns)
        names = {"input_ids_BS": 0, "labels_BS": -100, "position_ids_BS": 0, "document_ids_BS": -1, "domain_ids_BS": -1}
        tensors = {}
        for name, fill in names.items():
            tensors[name] = torch.full((1, width), fill)
            tensors[name][0, :length] = getattr(batch, name)[row, columns]
        tensors["position_ids_BS"][0, length:] = torch.arange(width - length)
        parts.append(PackedBatch(**tensors, first_document=document, num_documents=1))
    return parts


def gradients(trainable: Trainable, batches: list[PackedBatch]) -> tuple[StepResult, dict[str, torch.Tensor]]:
    """The gradients that a step moves by."""
    kept: dict[str, torch.Tensor] = {}

    def keep(*_):
        kept.update(
            (name, master.grad.clone())
            for name, master in trainable.masters.trainable.items()
            if master.grad is not None
        )

    trainable.optimizer.register_step_pre_hook(keep)
    return run_step(trainable, batches, step=5, rate=1e-2, num_domains=2), kept


def counts(result: StepResult) -> torch.Tensor:
    assert result.load is not None
    return result.load.counts_LE


def selection_bias(trainable: Trainable) -> torch.Tensor:
    assert trainable.installation is not None
    assert trainable.installation.selection_bias is not None
    return trainable.installation.selection_bias


def assert_same_step(
    one: Trainable, batches: list[PackedBatch], other: Trainable, others: list[PackedBatch], atol: float
):
    result, expected = gradients(one, batches)
    result2, found = gradients(other, others)
    for name in ("loss", "balance_loss", "router_z_loss", "lm_z_loss", "gradient_norm"):
        assert (getattr(result, name) or 0.0) == pytest.approx(getattr(result2, name) or 0.0, abs=atol, rel=atol), name
    assert result.domain_losses == pytest.approx(result2.domain_losses, abs=atol)
    assert result.tokens == result2.tokens
    assert torch.equal(counts(result), counts(result2))
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=atol, rtol=atol, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("rule", RULES)
def test_packed_documents_are_separate_documents(rule):
    recipe = make_recipe(routing=RULES[rule], losses={"router_z": 0.01, "lm_z": 0.001})
    batch = pack([[5, 7, 4], [16], [3, 9]], width=16)
    assert_same_step(make_trainable(recipe), [batch], make_trainable(recipe), separate(batch, width=20), atol=1e-5)


@pytest.mark.parametrize("rule", RULES)
def test_packed_logits_are_those_of_separate_documents(rule):
    """In evaluation mode, where every rule but the pool holds as well."""
    trainable = make_trainable(make_recipe(routing=RULES[rule]))
    model = trainable.model.eval()
    batch = pack([[5, 7, 4]], width=16)
    with torch.no_grad():
        packed = model(input_ids=batch.input_ids_BS, position_ids=batch.position_ids_BS, use_cache=False).logits
        for start, end in ((0, 5), (5, 12), (12, 16)):
            alone = model(input_ids=batch.input_ids_BS[:, start:end]).logits
            torch.testing.assert_close(packed[:, start:end], alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rule", RULES)
def test_the_cut_into_micro_steps_does_not_matter(rule):
    recipe = make_recipe(routing=RULES[rule], losses={"router_z": 0.01, "lm_z": 0.001})
    batch = pack([[5, 7, 4], [16], [3, 9], [2, 2]], width=16)
    cuts = [rows_of(batch, row, row + 1) for row in range(4)]
    assert_same_step(make_trainable(recipe), [batch], make_trainable(recipe), cuts, atol=1e-6)


def test_activation_checkpointing_changes_nothing():
    recipe = make_recipe(routing=RULES["document_pool"], losses={"router_z": 0.01, "balance": {"coefficient": 0.1}})
    plain, checkpointed = make_trainable(recipe), make_trainable(recipe)
    checkpointed.model.model.activation_checkpointing_enable({"use_reentrant": False})
    batch = pack([[5, 7, 4], [16]], width=16)
    assert_same_step(plain, [batch], checkpointed, [batch], atol=0.0)


def test_padding_changes_nothing():
    losses = {"router_z": 0.01, "balance": {"coefficient": 0.1}}
    recipe = make_recipe(routing=RULES["document_pool"], losses=losses)
    documents = [[5, 7, 4], [16], [3, 9]]
    narrow, wide = pack(documents, width=16), pack(documents, width=24)
    assert_same_step(make_trainable(recipe), [narrow], make_trainable(recipe), [wide], atol=1e-6)


@pytest.mark.parametrize("rule", ["document_pool", "one_per_group"])
def test_the_balancing_loss_of_scope_step_does_not_depend_on_the_cut(rule):
    """Row 10 of docs/peers.md; micro-batches of different length, and one of padding alone."""
    recipe = make_recipe(routing=RULES[rule], losses={"balance": {"coefficient": 1.0, "scope": "step"}})
    batch = pack([[5, 7, 4], [6], [3, 9], [2, 2]], width=16)
    cuts = [*(rows_of(batch, row, row + 1) for row in range(4)), pack([[]], width=16)]
    assert_same_step(make_trainable(recipe), [batch], make_trainable(recipe), cuts, atol=1e-6)


def test_other_scopes_do_depend_on_the_cut():
    batch = pack([[5, 7, 4], [6], [3, 9], [2, 2]], width=16)
    cuts = [rows_of(batch, row, row + 1) for row in range(4)]
    for scope in ("local", "global", "batch"):
        recipe = make_recipe(losses={"balance": {"coefficient": 1.0, "scope": scope}})
        whole, cut = (gradients(make_trainable(recipe), batches)[0] for batches in ([batch], cuts))
        assert abs((whole.balance_loss or 0) - (cut.balance_loss or 0)) > 1e-3


@pytest.mark.parametrize("scope", ["local", "global", "batch", "step"])
def test_micro_steps_of_padding_alone_change_nothing(scope):
    """The end of `data.epochs`: the balancing loss is a mean over the micro-steps that have tokens."""
    recipe = make_recipe(losses={"router_z": 0.01, "balance": {"coefficient": 0.1, "scope": scope}})
    batch = pack([[5, 7, 4], [3, 9]], width=16)
    cuts = [rows_of(batch, 0, 1), rows_of(batch, 1, 2)]
    padding = [pack([[]], width=16)] * 2
    assert_same_step(make_trainable(recipe), cuts, make_trainable(recipe), [*cuts, *padding], atol=0.0)


def test_the_loss_is_the_mean_over_all_predicted_tokens():
    """Against transformers' own loss on the same packed batch."""
    trainable = make_trainable(make_recipe())
    batch = pack([[5, 7, 4], [3, 9]], width=16)
    with torch.no_grad():
        expected = trainable.model(
            input_ids=batch.input_ids_BS, position_ids=batch.position_ids_BS, labels=batch.labels_BS, use_cache=False
        ).loss
    result = run_step(trainable, [batch], step=0, rate=0.0, num_domains=2)
    assert result.loss == pytest.approx(float(expected), abs=1e-6)
    assert result.tokens == 28


def test_clipping_scales_to_the_limit():
    recipe = make_recipe(optimizer={"lr": 1e-2, "clip": 0.01})
    result, scaled = gradients(make_trainable(recipe), [pack([[16]], width=16)])
    assert result.gradient_norm > 0.1
    norm = torch.stack([gradient.double().square().sum() for gradient in scaled.values()]).sum().sqrt()
    assert float(norm) == pytest.approx(0.01, rel=1e-5)


def test_a_step_that_is_not_finite_moves_nothing():
    trainable = make_trainable(make_recipe(losses={"bias_balancing": 0.1}))
    before = copy.deepcopy(dict(trainable.masters.parameters))
    with torch.no_grad():
        next(iter(trainable.masters.parameters.values()))[5] = torch.inf
        before["model.embed_tokens.weight"][5] = torch.inf
    batch = pack([[16]], width=16)
    batch.input_ids_BS[0, 3] = 5
    assert not run_step(trainable, [batch], step=0, rate=1.0, num_domains=2).is_finite
    for name, parameter in trainable.masters.parameters.items():
        assert torch.equal(parameter, before[name]), name
    assert not selection_bias(trainable).any()


def test_loss_free_balancing_moves_the_bias_against_the_load():
    trainable = make_trainable(make_recipe(losses={"bias_balancing": 0.1}))
    result = run_step(trainable, [pack([[16], [16]], width=16)], step=0, rate=0.0, num_domains=2)
    load = counts(result).double()
    expected = 0.1 * (load.mean(dim=1, keepdim=True) - load).sign()
    torch.testing.assert_close(selection_bias(trainable).double(), expected, atol=1e-7, rtol=0)


def test_bf16_is_bf16_compute_with_fp32_masters_and_fp32_accumulation():
    """Two micro-steps: the gradient is the fp32 sum of the two bf16 gradients, the update fp32 AdamW."""
    trainable = make_trainable(make_recipe(precision="bf16"))
    masters = {name: master.detach().clone() for name, master in trainable.masters.parameters.items()}
    reference = copy.deepcopy(trainable.model)
    batch = pack([[16], [5, 11]], width=16)
    parts = [rows_of(batch, 0, 1), rows_of(batch, 1, 2)]
    _, found = gradients(trainable, parts)
    sums = {name: torch.zeros_like(master) for name, master in masters.items()}
    for part in parts:
        reference.zero_grad()
        logits = reference(input_ids=part.input_ids_BS, position_ids=part.position_ids_BS, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), part.labels_BS[:, 1:].flatten(), reduction="sum"
        )
        (loss / (batch.labels_BS[:, 1:] != -100).sum()).backward()
        for name, parameter in reference.named_parameters():
            assert parameter.dtype == torch.bfloat16
            assert parameter.grad is not None
            sums[name] += parameter.grad.float()
    for name, expected in sums.items():
        assert found[name].dtype == torch.float32
        torch.testing.assert_close(found[name], expected, atol=2e-3, rtol=2e-2)
    copies = dict(trainable.model.named_parameters())
    for name, master in trainable.masters.parameters.items():
        assert master.dtype == torch.float32
        assert torch.equal(copies[name], master.bfloat16())
        assert not torch.equal(master, masters[name]) or not found[name].any()


def test_adamw_against_a_reference_and_decay_of_matrices_only():
    recipe = make_recipe(optimizer={"lr": 1e-2, "clip": None, "weight_decay": 0.5, "eps": 1e-6})
    trainable = make_trainable(recipe)
    before = {name: master.detach().double().clone() for name, master in trainable.masters.parameters.items()}
    first = {name: torch.zeros_like(tensor) for name, tensor in before.items()}
    second = {name: torch.zeros_like(tensor) for name, tensor in before.items()}
    for step in range(1, 4):
        _, found = gradients(trainable, [pack([[16]], width=16, seed=step)])
        trainable.optimizer._optimizer_step_pre_hooks.clear()
        for name, gradient in found.items():
            first[name] = 0.9 * first[name] + 0.1 * gradient.double()
            second[name] = 0.95 * second[name] + 0.05 * gradient.double().square()
            root = (second[name] / (1 - 0.95**step)).sqrt() + 1e-6
            decay = 0.5 if before[name].ndim >= 2 else 0.0
            before[name] = before[name] * (1 - 1e-2 * decay) - 1e-2 * first[name] / (1 - 0.9**step) / root
    for name, master in trainable.masters.parameters.items():
        torch.testing.assert_close(master.double(), before[name], atol=1e-6, rtol=1e-5)


def test_what_decays():
    matrix, vector = torch.zeros(3, 3), torch.zeros(3)
    assert decays("model.layers.0.mlp.gate.weight", matrix)
    assert decays("model.embed_tokens.weight", matrix)
    assert not decays("model.norm.weight", vector)
    assert not decays("model.layers.0.mlp.experts.down_proj_bias", matrix)


def test_no_decay_says_which_parameters_decay():
    """EMO's own: everything but the embeddings (row 9 of docs/peers.md); one step without gradients shows it."""
    recipe = make_recipe(optimizer={"lr": 0.5, "weight_decay": 0.1, "no_decay": ["*embed_tokens*"]})
    trainable = make_trainable(recipe)
    before = {name: parameter.detach().clone() for name, parameter in trainable.masters.parameters.items()}
    for parameter in trainable.masters.parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    trainable.optimizer.step()
    for name, parameter in trainable.masters.parameters.items():
        factor = 1.0 if name == "model.embed_tokens.weight" else 1 - 0.5 * 0.1
        torch.testing.assert_close(parameter.detach(), factor * before[name], msg=name)
    with pytest.raises(MoesaicError, match=r"optimizer.no_decay: '\*embeddings\*' matches no parameter; one is called"):
        make_trainable(make_recipe(optimizer={"lr": 0.5, "no_decay": ["*embeddings*"]}))


def test_standard_error_of_a_ratio_against_the_spread_of_many_draws():
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(5, 50, (2000, 40), generator=draw).double()
    losses = tokens * (2 + 0.3 * torch.randn(2000, 40, generator=draw).double())
    ratios = [ratio_with_error(losses[index], tokens[index]) for index in range(2000)]
    spread = torch.tensor([ratio.loss for ratio in ratios]).std()
    errors = torch.tensor([ratio.standard_error for ratio in ratios])
    assert float(errors.square().mean().sqrt()) == pytest.approx(float(spread), rel=0.05)
    assert ratio_with_error(losses[0, :1], tokens[0, :1]).standard_error is None
    empty = ratio_with_error(torch.tensor([4.0, 0.0]).double(), torch.tensor([2.0, 0.0]).double())
    assert (empty.loss, empty.documents, empty.tokens) == (2.0, 1, 2)
