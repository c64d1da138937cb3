"""`moesaic.RoutingCallback` in transformers' Trainer: the same run as `moesaic train`, what it saves and refuses."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Trainer, TrainingArguments
from transformers.distributed.configuration_utils import DistributedConfig

import moesaic
from moesaic.common.errors import MoesaicError
from moesaic.data.collated import documents_of
from moesaic.data.dataset import PackedDataset
from moesaic.data.tokenise import prepare
from moesaic.routing.install import find_installation
from moesaic.trainer import RoutingCallback
from moesaic.training.recipe import load_train_recipe
from moesaic.training.run import train
from moesaic.training.start import draw, load_run_tokenizer, make_config
from tests.distributed.ranks import run_ranks
from tests.tiny_moes import save_tiny_moe
from tests.tiny_training import tiny_recipe

STEPS = 12
SEED = 7
POOLS = {"rule": "document_pool", "pool_size": (2, 5)}
LOSSES = {"balance": 0.1, "router_z": 0.01, "bias_balancing": 0.01}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOESAIC_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> dict[str, Any]:
    return tiny_recipe(
        tmp_path_factory.mktemp("in"),
        routing=POOLS,
        losses={"balance": {"coefficient": 0.1}, "router_z": 0.01, "bias_balancing": 0.01},
        optimizer={"lr": 1e-2},
        budget={"steps": STEPS},
        seed=SEED,
    )


@pytest.fixture(scope="module")
def start(recipe, tmp_path_factory) -> Path:
    """Our own model as it begins, in a folder."""
    folder = tmp_path_factory.mktemp("start")
    draw(make_config(load_train_recipe(recipe).model), 3).save_pretrained(folder)  # pyright: ignore
    return folder


@pytest.fixture(scope="module")
def rows(recipe, start) -> list[dict[str, Tensor]]:
    """The packed sequences that `train` sees, in its order."""
    loaded = load_train_recipe(recipe | {"model": str(start)})
    prepared = prepare(loaded.data, load_run_tokenizer(loaded), quiet=True)
    data = PackedDataset(prepared, seed=SEED, sequences_per_step=loaded.sequences_per_step)
    batches = [data.batch(step, micro_step=part, num_micro_steps=2) for step in range(STEPS) for part in range(2)]
    return [
        {"input_ids": ids, "labels": labels, "position_ids": positions}
        for batch in batches
        for ids, labels, positions in zip(batch.input_ids_BS, batch.labels_BS, batch.position_ids_BS, strict=True)
    ]


class Rows(torch.utils.data.Dataset):
    def __init__(self, rows: list[dict[str, Tensor]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.rows[index]


ARGUMENTS: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "num_train_epochs": 1,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "cosine",
    "weight_decay": 0.1,
    "adam_beta2": 0.95,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
    "dataloader_pin_memory": False,
    "seed": SEED,
    "train_sampling_strategy": "sequential",
}


def arguments(out: Path, **changes: Any) -> TrainingArguments:
    return TrainingArguments(str(out), **ARGUMENTS | changes)


def fit(start: Path, rows: list[dict[str, Tensor]], out: Path, *, resume: bool = False, **changes: Any) -> Any:
    options, distributed = changes.pop("routing", POOLS | LOSSES), changes.pop("distributed", None)
    trainer = Trainer(
        model=moesaic.load(start, device="cpu", dtype="float32", distributed=distributed),
        args=arguments(out, **changes),
        train_dataset=Rows(rows),
    )
    trainer.add_callback(RoutingCallback(**options))
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def weights_of(model: Any) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def distance(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).abs().max()) for name in left)


def bias_of(model: Any) -> Tensor:
    installation = find_installation(model)
    assert installation is not None
    assert installation.selection_bias is not None
    return installation.selection_bias


def logged(trainer: Trainer, key: str) -> list[float]:
    return [line[key] for line in trainer.state.log_history if key in line]


@pytest.fixture(scope="module")
def trained(recipe, start, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("trained") / "out"
    train(recipe | {"model": str(start)}, out)
    return out


@pytest.mark.parametrize("checkpointing", [None, False, True])
def test_is_moesaic_train(trained, start, rows, tmp_path, checkpointing):
    """Losses and weights of 12 steps, with pools, both losses and loss-free balancing; both kinds of checkpointing."""
    how: dict[str, Any] = (
        {} if checkpointing is None else {"activation_checkpointing_kwargs": {"use_reentrant": checkpointing}}
    )
    trainer = fit(start, rows, tmp_path, activation_checkpointing=bool(how), **how)
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    for key in ("loss", "balance_loss", "router_z_loss", "load_entropy"):
        assert logged(trainer, key) == pytest.approx([line[key] for line in steps], abs=1e-5), key
    assert distance(weights_of(trainer.model), load_file(trained / "model.safetensors")) < 1e-5


def test_family_that_routes_itself(recipe, rows, tmp_path):
    """DeepSeek-V3's groups and its own tensor of biases: as `train`, and what is saved has the bias in that tensor."""
    start = save_tiny_moe(tmp_path / "start", "deepseek_v3")
    changes = {"losses": LOSSES | {"balance": {"coefficient": 0.1}}, "routing": {}, "optimizer": {"lr": 2e-3}}
    train(recipe | changes | {"model": str(start)}, tmp_path / "trained")
    trainer = fit(start, rows, tmp_path / "out", routing=LOSSES, learning_rate=2e-3)
    trainer.save_model(str(tmp_path / "saved"))
    tuned, trained = (load_file(tmp_path / name / "model.safetensors") for name in ("saved", "trained"))
    assert distance(tuned, trained) < 1e-5
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert not torch.equal(tuned[name], load_file(start / "model.safetensors")[name])
    assert json.loads((tmp_path / "saved" / "moesaic.json").read_text())["routing"] is None


def test_best_checkpoint_has_its_own_bias(rows, tmp_path):
    """`load_best_model_at_end` of a native model: the bias of the record comes back with the weights."""
    trainer = Trainer(
        model=moesaic.load(save_tiny_moe(tmp_path / "start", "qwen3_moe"), device="cpu", dtype="float32"),
        args=arguments(
            tmp_path / "out",
            save_strategy="steps",
            eval_strategy="steps",
            eval_steps=1,
            save_steps=1,
            load_best_model_at_end=True,
            metric_for_best_model="eval_loss",
            greater_is_better=True,  # so that it is not the last
        ),
        train_dataset=Rows(rows[:12]),
        eval_dataset=Rows(rows[12:14]),
    )
    trainer.add_callback(RoutingCallback(bias_balancing=0.01))
    trainer.train()
    best = Path(str(trainer.state.best_model_checkpoint))
    assert best.name == "checkpoint-1"
    record = json.loads((best / "moesaic.json").read_text())
    assert bias_of(trainer.model).tolist() == record["routing"]["selection_bias"]


def test_native_family_and_shorter_last_step(recipe, rows, tmp_path):
    """A family of others, whose selection bias no checkpoint file holds; resumed, and ending with half a step."""
    start, rows = save_tiny_moe(tmp_path / "start", "qwen3_moe"), rows[:26]
    whole = fit(start, rows, tmp_path / "whole", save_strategy="steps", save_steps=4)
    folder = tmp_path / "whole" / "checkpoint-4"
    record = json.loads((folder / "moesaic.json").read_text())
    assert record["verb"] == "train"
    assert record["steps"] == 4
    assert record["sources"][0]["path"] == str(start)
    assert record["routing"]["rule"]["pool_size"] == [2, 5]
    assert bias_of(moesaic.load(folder)).tolist() == record["routing"]["selection_bias"]

    (tmp_path / "again").mkdir()
    folder.rename(tmp_path / "again" / "checkpoint-4")
    again = fit(start, rows, tmp_path / "again", resume=True, save_strategy="steps", save_steps=4)
    assert again.state.global_step == whole.state.global_step == 7
    assert distance(weights_of(again.model), weights_of(whole.model)) == 0
    biases = [bias_of(trainer.model) for trainer in (whole, again)]
    assert biases[0].any()
    assert torch.equal(*biases)
    last = [json.loads((tmp_path / name / "checkpoint-7" / "moesaic.json").read_text()) for name in ("whole", "again")]
    assert last[0]["routing"] == last[1]["routing"]
    assert last[0]["routing"]["selection_bias"] == biases[0].tolist()


def test_what_is_saved_is_what_was_trained(start, rows, tmp_path):
    """Our own model: the bias is a tensor of it, for transformers alone as well, and comes back on resuming."""
    whole = fit(start, rows[:16], tmp_path / "whole", save_strategy="steps", save_steps=2)
    whole.save_model(str(tmp_path / "saved"))
    ids = rows[0]["input_ids"][None]
    with torch.no_grad():
        expected = whole.model.eval()(ids).logits
        for folder in (tmp_path / "saved", tmp_path / "whole" / "checkpoint-4"):
            assert torch.equal(moesaic.load(folder)(ids).logits, expected)
            assert torch.equal(AutoModelForCausalLM.from_pretrained(folder)(ids).logits, expected)
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert all(saved[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"].any() for layer in (0, 1))
    assert json.loads((tmp_path / "saved" / "moesaic.json").read_text())["routing"]["rule"]["rule"] == "document_pool"

    (tmp_path / "again").mkdir()
    (tmp_path / "whole" / "checkpoint-2").rename(tmp_path / "again" / "checkpoint-2")
    again = fit(start, rows[:16], tmp_path / "again", resume=True)
    assert distance(weights_of(again.model), weights_of(whole.model)) == 0

    copy: Any = deepcopy(whole.model)
    with torch.no_grad():
        copy.lm_head.weight.zero_()
    copy.save_pretrained(tmp_path / "copy")
    assert not load_file(tmp_path / "copy" / "model.safetensors")["lm_head.weight"].any()


def test_bias_of_the_record_is_found_by_a_trainer(recipe, start, rows, tmp_path):
    """A native model that AutoModel loads has its bias in moesaic.json alone."""
    source = save_tiny_moe(tmp_path / "start", "qwen3_moe")
    fit(source, rows[:8], tmp_path / "first", save_strategy="steps", save_steps=2)
    folder = tmp_path / "first" / "checkpoint-2"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    trainer = Trainer(model=model, args=arguments(tmp_path / "next"), train_dataset=Rows(rows[:4]))
    trainer.add_callback(RoutingCallback(bias_balancing=0.01))
    trainer.train()
    first = torch.tensor(json.loads((folder / "moesaic.json").read_text())["routing"]["selection_bias"])
    moved = bias_of(model) - first
    assert moved.abs().max() <= 0.01 + 1e-7
    assert first.abs().max() > 0.015  # two steps, so it did not begin at zero


def test_two_ranks_are_one(start, rows, tmp_path):
    """Two gloo processes, the micro-batches of a step shared out: pools, losses and bias of one, with DDP and FSDP2."""
    routing = POOLS | {"balance": 0.1, "balance_scope": "local", "bias_balancing": 0.01}
    one = weights_of(fit(start, rows[:32], tmp_path / "one", routing=routing).model)
    run_ranks(2, on_two_ranks, start, rows[:32], tmp_path, routing)
    for how in ("ddp", "fsdp"):
        assert distance(one, load_file(tmp_path / how / "saved" / "model.safetensors")) < 1e-5, how


def on_two_ranks(start: Path, rows: list[dict[str, Tensor]], out: Path, routing: dict[str, Any]) -> None:
    dist.init_process_group("gloo")
    changes: dict[str, Any] = {"gradient_accumulation_steps": 1, "ddp_backend": "gloo"}
    for how, distributed in (("ddp", None), ("fsdp", DistributedConfig(fsdp_size=2))):
        trainer = fit(start, rows, out / how, routing=routing, distributed=distributed, **changes)
        trainer.save_model(str(out / how / "saved"))
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")  # TRL's
def test_trl_is_trainer(recipe, start, tmp_path):
    """Padded batches through TRL's own loss and through Trainer: the same losses and weights."""
    from datasets import Dataset
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling, SFTTrainer

    draws = torch.Generator().manual_seed(0)
    lengths = torch.randint(5, 30, (16,), generator=draws).tolist()
    data = Dataset.from_list(
        [{"input_ids": torch.randint(3, 40, (size,), generator=draws).tolist()} for size in lengths]
    )
    plain: dict[str, Any] = {"optim": "sgd"}  # AdamW would make much of a difference in rounding
    args = arguments(tmp_path, remove_unused_columns=False, **plain)
    options: dict[str, Any] = {"bf16": False, "router_aux_loss_coef": 0.0, "max_length": None}
    sft = SFTConfig(output_dir=str(tmp_path), **ARGUMENTS, **options, **plain)
    models = [moesaic.load(start, device="cpu", dtype="float32") for _ in range(2)]
    tokenizer = load_run_tokenizer(load_train_recipe(recipe))
    trainers = [
        SFTTrainer(model=models[0], args=sft, train_dataset=data, processing_class=tokenizer),
        Trainer(models[1], args, train_dataset=data, data_collator=DataCollatorForLanguageModeling(pad_token_id=0)),
    ]
    for trainer in trainers:
        trainer.add_callback(RoutingCallback(**POOLS, balance=0.1, bias_balancing=0.01))
        trainer.train()
    assert distance(*(weights_of(model) for model in models)) < 1e-5
    for key in ("loss", "balance_loss"):
        one, other = (logged(trainer, key) for trainer in trainers)
        assert one == pytest.approx(other, abs=1e-5), key


def test_head_for_classification(start, rows, tmp_path):
    """The losses reach the routers below another head, and what is saved is that model."""
    lines = [{"input_ids": row["input_ids"], "labels": torch.tensor(i % 3)} for i, row in enumerate(rows[:8])]
    routers = []
    for balance in (0.0, 0.1):
        model = AutoModelForSequenceClassification.from_pretrained(start, num_labels=3, pad_token_id=0)
        torch.nn.init.zeros_(model.score.weight)  # so that no gradient but that of the losses comes down in one step
        args = arguments(tmp_path, max_steps=1, optim="sgd", weight_decay=0.0)
        trainer = Trainer(model, args, train_dataset=Rows(lines))
        trainer.add_callback(RoutingCallback(balance=balance))
        trainer.train()
        trainer.save_model(str(tmp_path / "saved"))
        routers.append(load_file(tmp_path / "saved" / "model.safetensors")["model.layers.0.mlp.gate.weight"])
    first = load_file(start / "model.safetensors")["model.layers.0.mlp.gate.weight"]
    assert torch.equal(routers[0], first)
    assert not torch.equal(routers[1], first)
    again: Any = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    ids = rows[0]["input_ids"][None]
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model.eval()(ids).logits)


# --- the documents of a batch -----------------------------------------------------------------------------------------


def test_documents_of_packed_rows():
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [3, 4, 0, 1, 2, 3]])
    found = documents_of({"input_ids": torch.ones(2, 6), "position_ids": positions}, None)
    assert found.tolist() == [[0, 0, 0, 1, 1, 2], [0, 0, 1, 1, 1, 1]]


def test_documents_of_padded_rows():
    mask = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1]])
    positions = torch.tensor([[0, 1, 2, 0], [1, 0, 1, 2]])  # what collators put beside a mask
    for inputs in ({}, {"position_ids": positions}):
        ids = documents_of({"input_ids": torch.ones(2, 4), "attention_mask": mask, **inputs}, None)
        assert (ids >= 0).tolist() == mask.bool().tolist()
        assert all(len(set(row[row >= 0].tolist())) == 1 for row in ids)


def test_padding_without_a_mask_is_a_document_of_padding_without_labels():
    tokens = torch.tensor([[5, 6, 0, 0, 0, 0]])
    labels = torch.tensor([[5, 6, 0, -100, -100, -100]])  # the end of a document may be the padding token
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]])
    inputs = {"input_ids": tokens, "labels": labels, "position_ids": positions}
    assert documents_of(inputs, 0).tolist() == [[0, 0, 0, -1, -1, -1]]
    assert documents_of(inputs, None).tolist() == [[0, 0, 0, 1, 1, 1]]


# --- refusals ---------------------------------------------------------------------------------------------------------


def refused(start: Path, rows: list[dict[str, Tensor]], out: Path, routing: dict[str, Any], **config: Any) -> str:
    model: Any = moesaic.load(start, device="cpu", dtype="float32")
    for key, value in config.items():
        setattr(model.config, key, value)
    trainer = Trainer(model=model, args=arguments(out), train_dataset=Rows(rows))
    with pytest.raises(MoesaicError) as refusal:
        _train(trainer, routing)
    return str(refusal.value)


def _train(trainer: Trainer, routing: dict[str, Any]) -> None:
    trainer.add_callback(RoutingCallback(**routing))
    trainer.train()


def test_refusals(start, rows, tmp_path):
    few = rows[:4]
    masked = [row | {"attention_mask": torch.ones_like(row["input_ids"])} for row in few]
    assert "pool_size" in refused(start, few, tmp_path, {"rule": "document_pool", "pool_size": (2, 9)})
    assert "balance_scope" in refused(start, few, tmp_path, {"balance": 0.1, "balance_scope": "step"})
    assert "rule" in refused(start, few, tmp_path, {"rule": "top_k"})
    assert "attention_mask" in refused(start, masked, tmp_path, {"balance": 0.1})
    assert "router_aux_loss_coef" in refused(start, few, tmp_path, {"balance": 0.1}, output_router_logits=True)


def test_nothing_is_left_after_training(start, rows, tmp_path):
    trainer = fit(start, rows[:4], tmp_path)
    model: Any = trainer.model
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert trainer.evaluate(Rows(rows[4:8]))["eval_loss"] > 0
