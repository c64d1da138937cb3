"""Rules on real models: our architecture and the native families."""

import copy
import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextTopKRouter

from moesaic.common.errors import MoesaicError
from moesaic.modeling.cross_entropy import token_losses
from moesaic.routing import pools
from moesaic.routing.config import RuleConfig
from moesaic.routing.install import find_installation, find_routers, install, reinstall, routing_context
from moesaic.routing.losses import balance_loss, measure_load, router_z_loss
from moesaic.routing.own_bias import own_bias
from moesaic.routing.pools import RoutingContext
from tests.reference.naive_routing import random_documents
from tests.tiny_models import VOCABULARY, tiny_model
from tests.tiny_moes import TOP_K, tiny_moe
from tests.unit.routing.routed_models import NATIVE, moesaic_model, native_model, packed

GROUPS = (0, 0, 1, 1, 2, 2, 3, 3)
POOL = RuleConfig(rule="document_pool", pool_size=(2, 5))
MODELS = {
    "moesaic": moesaic_model,
    **{family: lambda family=family: native_model(family) for family in ("olmoe", "qwen2_moe", "qwen3_moe", "mixtral")},
}
TRAINING_RULES = {"topk": RuleConfig(rule="topk"), "document_pool": POOL}
TRAINING_RULES["one_per_group"] = RuleConfig(rule="one_per_group", expert_groups=GROUPS)


@pytest.mark.parametrize("family", NATIVE)
@pytest.mark.parametrize("renormalise", [False, True])
def test_topk_is_what_each_native_router_does_itself(family, renormalise):
    flag = {"norm_topk_prob": renormalise} if family in ("olmoe", "flex_olmo", "qwen2_moe", "qwen3_moe") else {}
    model = native_model(family, **flag)
    hidden = torch.randn(40, 32, generator=torch.Generator().manual_seed(0))
    routers = [router for router, _ in find_routers(model)]
    own = [router(hidden) for router in routers]
    install(model, RuleConfig(rule="topk"))
    for router, (logits, weights, ids) in zip(routers, own, strict=True):
        fast_logits, fast_weights, fast_ids = router(hidden)
        assert torch.equal(fast_ids, ids)
        torch.testing.assert_close(fast_logits, logits)
        torch.testing.assert_close(fast_weights, weights)
        assert fast_weights.dtype == weights.dtype


@pytest.mark.parametrize("renormalise", [False, True])
def test_topk_is_what_the_qwen3_next_router_does_itself(renormalise):
    config = SimpleNamespace(num_experts_per_tok=2, num_experts=8, norm_topk_prob=renormalise, hidden_size=32)
    router = Qwen3NextTopKRouter(config)
    hidden, weight = torch.randn(2, 40, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        router.weight.copy_(weight[:8])
    own = router(hidden)
    install(torch.nn.Sequential(router), RuleConfig(rule="topk"))
    torch.testing.assert_close(router(hidden), own)
    assert "forward" in router.__dict__


@pytest.mark.parametrize("family", NATIVE)
def test_bf16_keeps_the_family_dtype_of_weights_and_computes_fp32_logits(family):
    model = native_model(family, dtype=torch.bfloat16)
    hidden = torch.randn(8, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    router = find_routers(model)[0][0]
    weight_dtype = router(hidden)[1].dtype
    install(model, RuleConfig(rule="topk"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits, weights, _ = router(hidden)
    assert weights.dtype == weight_dtype
    exact = hidden.double() @ router.weight.detach().double().T  # pyright: ignore
    torch.testing.assert_close(logits.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "own",
    [
        {},
        {"routing_weighting": "all"},
        {"routing_rule": "one_per_group", "expert_groups": list(GROUPS), "group_score": "log_mean_exp"},
        {"routing_rule": "one_per_group", "expert_groups": [list(GROUPS), [0, 1, 2, 3] * 2], "num_shared_experts": 1},
    ],
)
def test_our_architecture_keeps_its_own_rule_bit_for_bit(own):
    model = moesaic_model(**own)
    inputs, context = packed(random_documents(0))
    before = model(**inputs).logits
    install(model, RuleConfig())
    with routing_context(model, context) as record:
        assert torch.equal(model(**inputs).logits, before)
    assert len(record.decisions) == 2


def test_a_rule_other_than_the_models_own_can_be_installed():
    plain = moesaic_model()
    grouped = moesaic_model(routing_rule="one_per_group", expert_groups=list(GROUPS))
    inputs, _ = packed(random_documents(0))
    expected = plain(**inputs).logits, grouped(**inputs).logits
    assert not torch.equal(*expected)
    install(grouped, RuleConfig(rule="topk"))
    install(plain, RuleConfig(rule="one_per_group", expert_groups=GROUPS))
    assert torch.equal(grouped(**inputs).logits, expected[0])
    assert torch.equal(plain(**inputs).logits, expected[1])


@pytest.mark.parametrize("name", list(MODELS))
def test_no_token_leaves_its_documents_pool(name):
    """Whole models in training, several seeds and steps; pools are small enough to matter."""
    model = MODELS[name]().train()
    install(model, POOL)
    binding = 0
    for step in range(4):
        inputs, context = packed(random_documents(step, sequences=4, length=24), inputs_seed=step, seed=1, step=step)
        with routing_context(model, context) as record:
            model(**inputs)
        assert len(record.decisions) == len(find_routers(model))
        for decision in record.decisions:
            assert decision.allowed_TE is not None
            assert decision.allowed_TE.gather(1, decision.expert_ids_TK).all()
            for document in range(context.num_documents):
                tokens = context.document_ids_T == document
                assert (decision.allowed_TE[tokens] == decision.allowed_TE[tokens][0]).all()
                used = decision.expert_ids_TK[tokens].unique()
                assert TOP_K <= len(used) <= int(decision.allowed_TE[tokens][0].sum()) <= 5
            binding += int((decision.logits_TE.topk(TOP_K).indices != decision.expert_ids_TK).any(dim=1).sum())
    assert binding > 50  # tokens that plain top-k would have sent elsewhere


def test_evaluation_is_plain_topk_unless_asked():
    model = moesaic_model()
    inputs, context = packed(random_documents(0))
    before = model(**inputs).logits
    install(model, POOL)
    assert torch.equal(model(**inputs).logits, before)
    with routing_context(model, context) as record:
        assert torch.equal(model(**inputs).logits, before)
    assert all(decision.allowed_TE is None for decision in record.decisions)
    with routing_context(model, context, pools=True):
        constrained = model(**inputs).logits
    assert not torch.equal(constrained, before)
    model.train()
    with routing_context(model, context):
        assert torch.equal(model(**inputs).logits, constrained)


def objective(model: PreTrainedModel, inputs: dict[str, Any], context: RoutingContext) -> Tensor:
    """Cross-entropy, balancing and z-loss of one micro-batch, with their gradients, inside one routing context."""
    labels = torch.randint(0, VOCABULARY, (len(context.document_ids_T),), generator=torch.Generator().manual_seed(3))
    labels[~context.token_mask_T] = -100
    with routing_context(model, context) as record:
        logits = model(**inputs).logits
        mask_T = context.token_mask_T
        balance, _ = balance_loss(record.decisions, mask_T, measure_load(record.decisions, mask_T))
        z = router_z_loss(record.decisions, mask_T, batch_tokens=int(mask_T.sum()))
        nll_T, _ = token_losses(logits.flatten(0, 1), labels)
        total = nll_T.mean() + 0.3 * balance + 0.1 * z
        total.backward()
    return total.detach()


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("rule", list(TRAINING_RULES))
def test_activation_checkpointing_uses_the_same_pools_and_records_once(name, rule, monkeypatch):
    calls = []
    chosen = pools.document_pools
    monkeypatch.setattr(pools, "document_pools", lambda *args: calls.append(1) or chosen(*args))
    inputs, context = packed(random_documents(1))
    results = []
    for checkpointing in (False, True):
        model = MODELS[name]().train()
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        install(model, TRAINING_RULES[rule])
        runs = count_router_calls(model)
        results.append((objective(model, inputs, context), [p.grad for p in model.parameters()]))
        layers = len(find_routers(model))
        assert len(runs) == layers * (2 if checkpointing else 1)  # the second pass really happened
        assert len(calls) == (layers if rule == "document_pool" else 0)
        calls.clear()
    (loss, gradients), (second_loss, second_gradients) = results
    assert torch.equal(loss, second_loss)
    for one, two in zip(gradients, second_gradients, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0)


def count_router_calls(model: PreTrainedModel) -> list[int]:
    calls: list[int] = []
    for router, _ in find_routers(model):
        router.register_forward_hook(lambda *_: calls.append(1))
    return calls


def test_the_second_pass_keeps_pools_that_would_come_out_differently(monkeypatch):
    model = moesaic_model().train()
    model.activation_checkpointing_enable({"use_reentrant": False})
    install(model, POOL)
    inputs, context = packed(random_documents(1))
    with routing_context(model, context) as record:
        total = model(**inputs).logits.square().mean()
        before = [decision.allowed_TE for decision in record.decisions]
        monkeypatch.setattr(pools, "document_pools", lambda *_: pytest.fail("pools chosen again"))
        total.backward()
    assert all(a is b.allowed_TE for a, b in zip(before, record.decisions, strict=True))


def test_reentrant_checkpointing_is_refused():
    model = moesaic_model().train()
    model.activation_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    install(model, POOL)
    inputs, context = packed(random_documents(1))
    with routing_context(model, context):
        total = model(**inputs).logits.square().mean()
        with pytest.raises(RuntimeError, match="non-reentrant"):
            total.backward()


@pytest.mark.parametrize("name", ["moesaic", "qwen3_moe", "olmoe"])
@pytest.mark.parametrize("rule", list(TRAINING_RULES))
def test_packed_and_separate_documents_agree(name, rule):
    """Same logits, losses and gradients whether documents share a sequence or not (issue 3, done means 2)."""
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 2, 3, 3, 3, 3], [4, 4, 4, 4, 4, 4, 5, 5, -1, -1, -1, -1]])
    inputs, context = packed(documents)
    real = context.token_mask_T
    labels = torch.randint(0, VOCABULARY, real.shape, generator=torch.Generator().manual_seed(3))
    model = MODELS[name]().train()
    install(model, TRAINING_RULES[rule])

    with routing_context(model, context) as record:
        together = model(**inputs).logits.flatten(0, 1)
        loss = token_losses(together, labels.where(real, -100))[0].sum() / real.sum()
        loss = loss + router_z_loss(record.decisions, real, batch_tokens=int(real.sum()))
        loss.backward()
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()

    for document in range(6):
        tokens = context.document_ids_T == document
        ids = inputs["input_ids"].flatten()[tokens][None]
        alone = RoutingContext.from_sequences(torch.zeros_like(ids), first_document=document)
        with routing_context(model, alone) as record:
            apart = model(input_ids=ids, use_cache=False).logits[0]
            torch.testing.assert_close(apart, together.detach()[tokens], rtol=1e-5, atol=1e-5)
            loss = token_losses(apart, labels[tokens])[0].sum() / real.sum()
            loss = loss + router_z_loss(record.decisions, alone.token_mask_T, batch_tokens=int(real.sum()))
            loss.backward()
    for one, two in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(one, two.grad, rtol=1e-5, atol=1e-5)


def test_a_selection_bias_changes_the_choice_but_not_the_weights():
    model = moesaic_model(routing_weighting="all")
    installation = install(model, RuleConfig(), selection_bias=True)
    assert installation.selection_bias is not None
    inputs, context = packed(random_documents(0))
    with routing_context(model, context) as record:
        model(**inputs)
    plain = record.decisions[0]
    installation.selection_bias[:, 3] += 1.0  # a probability cannot lose against more than one
    with routing_context(model, context) as record:
        model(**inputs)
    biased = record.decisions[0]
    torch.testing.assert_close(biased.logits_TE, plain.logits_TE)
    assert (biased.expert_ids_TK == 3).any(dim=1).all()
    assert not (plain.expert_ids_TK == 3).any(dim=1).all()
    expected = biased.logits_TE.softmax(dim=-1).gather(1, biased.expert_ids_TK)
    torch.testing.assert_close(biased.weights_TK, expected)


@pytest.mark.parametrize("name", list(MODELS))
def test_nothing_enters_the_state_dict_and_uninstall_leaves_no_trace(name):
    model = MODELS[name]()
    keys = list(model.state_dict())
    attributes = [dict(router.__dict__) for router, _ in find_routers(model)]
    installation = install(model, POOL, selection_bias=True)
    assert list(model.state_dict()) == keys
    assert find_installation(model) is installation
    assert install(model, RuleConfig(rule="topk")) is find_installation(model)  # in place of the first
    current = find_installation(model)
    assert current is not None
    current.uninstall()
    assert find_installation(model) is None
    assert [dict(router.__dict__) for router, _ in find_routers(model)] == attributes


def test_a_deep_copy_has_routers_of_its_own():
    model = moesaic_model()
    install(model, POOL)
    twin = copy.deepcopy(model)
    inputs, context = packed(random_documents(0))
    before = model(**inputs).logits
    with torch.no_grad():
        for router, _ in find_routers(model):
            router.weight.zero_()  # pyright: ignore
    with routing_context(twin, context) as record:
        assert torch.equal(twin(**inputs).logits, before)
    assert len(record.decisions) == 2
    assert find_installation(model) is not find_installation(twin)


def test_a_record_survives_json_and_installs_the_same_rule():
    model, other = moesaic_model(), moesaic_model()
    installation = install(model, POOL, selection_bias=torch.rand(2, 8))
    again = reinstall(other, json.loads(json.dumps(installation.to_record())))
    assert again.config == installation.config
    assert installation.selection_bias is not None
    held = torch.stack([own_bias(router) for router in again.routers])  # pyright: ignore
    assert torch.equal(held, installation.selection_bias)  # our own routers take it, so that it is saved with them
    inputs, context = packed(random_documents(0))
    outputs = []
    for each in (model.train(), other.train()):
        with routing_context(each, context):
            outputs.append(each(**inputs).logits)
    assert torch.equal(*outputs)


def test_transformers_still_captures_router_logits():
    model = native_model("qwen3_moe").train()
    install(model, POOL)
    inputs, context = packed(random_documents(0))
    with routing_context(model, context) as record:
        captured = model(**inputs, output_router_logits=True).router_logits
    assert [torch.equal(a, b.logits_TE) for a, b in zip(captured, record.decisions, strict=True)] == [True, True]


def test_misuse_is_an_error():
    model = moesaic_model().train()
    inputs, context = packed(random_documents(0))
    with pytest.raises(RuntimeError, match="call install first"), routing_context(model, context):
        pass
    install(model, POOL)
    with pytest.raises(RuntimeError, match="needs `with routing_context"):
        model(**inputs)
    with routing_context(model, context):
        model(**inputs)
        with pytest.raises(RuntimeError, match="one forward pass"):
            model(**inputs)
        with pytest.raises(RuntimeError, match="already open"), routing_context(model, context):
            pass
    with routing_context(model, context):
        model(**inputs)


@pytest.mark.parametrize(
    ("make", "config", "bias", "message"),
    [
        (lambda: tiny_model("qwen3"), RuleConfig(), None, "Qwen3ForCausalLM has no router that training rules work on"),
        (
            lambda: tiny_moe("deepseek_v3"),
            RuleConfig(rule="one_per_group", expert_groups=GROUPS),
            None,
            "one_per_group needs routers with a softmax of plain logits",
        ),
        (
            lambda: native_model("olmoe"),
            RuleConfig(),
            torch.zeros(2, 9),
            r"selection_bias is \[2, 9\], but the model has",
        ),
        (lambda: native_model("olmoe"), RuleConfig(rule="document_pool", pool_size=1), None, r"within \[2, 8\]"),
        (lambda: native_model("olmoe"), RuleConfig(rule="document_pool", pool_size=(2, 9)), None, r"\[2, 9\] does not"),
        (lambda: native_model("olmoe"), RuleConfig(rule="one_per_group"), None, "give them as routing.expert_groups"),
        (
            lambda: native_model("olmoe"),
            RuleConfig(rule="one_per_group", expert_groups=(0, 1)),
            None,
            "2 entries for 8 experts",
        ),
        (
            lambda: native_model("olmoe"),
            RuleConfig(rule="one_per_group", expert_groups=(0,) * 8),
            None,
            "name more groups",
        ),
        (
            lambda: moesaic_model(routing_rule="one_per_group", expert_groups=list(GROUPS)),
            POOL,
            None,
            "set routing_rule to topk",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused_in_one_line(make, config, bias, message):
    model = make()
    with pytest.raises(MoesaicError, match=message) as error:
        install(model, config, selection_bias=bias)
    assert "\n" not in str(error.value)
    assert find_installation(model) is None


def test_rule_settings_that_have_no_effect_are_refused():
    with pytest.raises(MoesaicError, match="pool_size is only for rule: document_pool"):
        RuleConfig(rule="topk", pool_size=3)
    with pytest.raises(MoesaicError, match="only for rule: one_per_group"):
        RuleConfig(rule="document_pool", expert_groups=GROUPS)


def test_the_settings_of_a_rule_need_no_torch():
    code = "import sys, moesaic.routing.config; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
