"""`output_router_logits`, `aux_loss` and the selection bias of our architecture, beside Qwen3-MoE's and naive loops."""

import inspect

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from moesaic.modeling import modeling_moesaic
from moesaic.modeling.modeling_moesaic import load_balancing_loss, route_topk
from moesaic.routing.config import RuleConfig
from moesaic.routing.install import find_routers, install, routing_context
from moesaic.routing.pools import RoutingContext
from tests.reference import naive_routing
from tests.tiny_models import VOCABULARY, tiny_moe_model

TOP_K = 2
GROUPS = {"routing_rule": "one_per_group", "expert_groups": [0, 0, 1, 1, 2, 2]}
IDS = torch.randint(3, VOCABULARY, (3, 10), generator=torch.Generator().manual_seed(0))
MASK = (torch.arange(10) >= torch.tensor([[0], [3], [6]])).long()


def with_biases(model):
    stream = torch.Generator().manual_seed(7)
    for router, _ in find_routers(model):
        router.e_score_correction_bias.copy_(0.3 * torch.randn(6, generator=stream))  # pyright: ignore
    return model


def test_balanced_routing_has_the_value_k():
    ids_TK = torch.tensor([[0, 1], [2, 3], [4, 5]])
    assert load_balancing_loss([torch.zeros(3, 6)] * 2, [ids_TK] * 2, None).item() == pytest.approx(2.0, abs=1e-6)


@pytest.mark.parametrize("mask", [None, MASK])
def test_plain_top_k_in_one_layer_is_what_qwen3_moe_has(mask):
    logits_TE = torch.randn(30, 6, generator=torch.Generator().manual_seed(1))
    ours = load_balancing_loss([logits_TE], [route_topk(logits_TE, TOP_K, "selected")[1]], mask)
    theirs = load_balancing_loss_func((logits_TE,), 6, TOP_K, mask)
    assert ours.item() == pytest.approx(float(theirs), rel=1e-6)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rule", [{}, GROUPS])
def test_the_loss_is_of_what_was_routed(rule, biased):
    """Rule, groups, bias and padding, against loops in float64; and the gradient is the loops' too."""
    model = tiny_moe_model("llama", dtype=torch.float64, selection_bias=biased, **rule)
    if biased:
        with_biases(model)
    output = model(IDS, attention_mask=MASK, output_router_logits=True)
    logits_LTE = torch.stack(output.router_logits)
    ids = []
    for (router, _), logits_TE in zip(find_routers(model), logits_LTE, strict=True):
        bias = router.e_score_correction_bias.tolist() if biased else None  # pyright: ignore
        if rule:
            ids.append(naive_routing.route_groups(logits_TE, [0, 0, 1, 1, 2, 2], TOP_K, "selected", "max", bias)[0])
        else:
            ids.append(naive_routing.route(logits_TE, TOP_K, "selected", bias=bias)[0])
    expected = TOP_K * naive_routing.balance(logits_LTE, ids, MASK.flatten().bool().tolist())
    assert output.aux_loss.item() == pytest.approx(expected.item(), rel=1e-12)
    weight = model.model.layers[0].mlp.gate.weight
    ours, theirs = (torch.autograd.grad(loss, weight, retain_graph=True)[0] for loss in (output.aux_loss, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("base", ["llama", "qwen3", "gemma3_text", "granite"])
def test_it_is_added_to_the_loss_as_in_qwen3_moe(base, tmp_path):
    model = tiny_moe_model(base, router_aux_loss_coef=0.5)
    plain = model(IDS, labels=IDS)
    assert type(plain) is MoeCausalLMOutputWithPast
    assert (plain.aux_loss, plain.router_logits) == (None, None)
    told = model(IDS, labels=IDS, output_router_logits=True)
    assert len(told.router_logits) == 2
    assert told.loss.item() == pytest.approx((plain.loss + 0.5 * told.aux_loss).item(), rel=1e-6)
    assert told.logits.equal(plain.logits)
    assert model(IDS, output_router_logits=True).loss is None
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, output_router_logits=True, router_aux_loss_coef=2.0)
    found = loaded(IDS, labels=IDS)
    assert found.loss.item() == pytest.approx((plain.loss + 2.0 * told.aux_loss).item(), rel=1e-5)
    assert loaded(IDS, labels=IDS, output_router_logits=False).aux_loss is None
    assert loaded(IDS, labels=IDS, return_dict=False)[1].item() == pytest.approx(told.aux_loss.item(), rel=1e-5)


def test_the_signature_is_the_dense_one_with_the_flag():
    names = list(inspect.signature(tiny_moe_model("llama").forward).parameters)
    assert names[:3] == ["input_ids", "attention_mask", "position_ids"]
    assert {"labels", "output_router_logits", "logits_to_keep"} <= set(names)


def test_tokens_before_a_cache_are_not_counted_again():
    model = tiny_moe_model("llama").eval()
    past = model(IDS[:, :6], attention_mask=MASK[:, :6], use_cache=True)
    step = model(IDS[:, 6:], attention_mask=MASK, output_router_logits=True, cache=past.cache)
    whole = model(IDS, attention_mask=MASK, output_router_logits=True)
    late = [logits.view(3, 10, 6)[:, 6:].flatten(0, 1) for logits in whole.router_logits]
    ids = [route_topk(logits, TOP_K, "selected")[1] for logits in late]
    assert step.aux_loss.item() == pytest.approx(load_balancing_loss(late, ids, MASK[:, 6:]).item(), rel=1e-4)


def test_activation_checkpointing_gives_the_same_gradients():
    model = tiny_moe_model("llama", router_aux_loss_coef=1.0)
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
            model.train()
        model.zero_grad()
        model(IDS, labels=IDS, output_router_logits=True).loss.backward()
        gradients.append(model.model.layers[0].mlp.gate.weight.grad.clone())
    torch.testing.assert_close(*gradients)


# --- the selection bias -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weighting", ["selected", "all", "sigmoid"])
@pytest.mark.parametrize("rule", [{}, GROUPS, GROUPS | {"group_score": "mean"}])
@torch.no_grad()
def test_a_bias_of_the_model_is_a_bias_that_is_installed(rule, weighting):
    own = with_biases(tiny_moe_model("llama", selection_bias=True, routing_weighting=weighting, **rule).eval())
    bias_LE = torch.stack([router.e_score_correction_bias for router, _ in find_routers(own)])  # pyright: ignore
    plain = tiny_moe_model("llama", routing_weighting=weighting, **rule).eval()
    without = plain(IDS).logits
    install(plain, RuleConfig(), selection_bias=bias_LE)
    assert own(IDS).logits.equal(plain(IDS).logits)
    assert not plain(IDS).logits.equal(without)
    install(own, RuleConfig())  # a rule without a bias keeps the model's
    assert own(IDS).logits.equal(plain(IDS).logits)


def test_it_is_there_only_where_it_is_used_and_stays_in_fp32(tmp_path):
    assert not any("correction" in name for name in tiny_moe_model("llama").state_dict())
    model = with_biases(tiny_moe_model("llama", selection_bias=True))
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for (router, _), (again, _) in zip(find_routers(model), find_routers(loaded), strict=True):
        assert again.weight.dtype == torch.bfloat16
        assert again.e_score_correction_bias.equal(router.e_score_correction_bias)  # pyright: ignore


def test_who_trains_without_balancing_is_told(monkeypatch):
    said = []
    monkeypatch.setattr(modeling_moesaic.logger, "warning_once", said.append)
    model = tiny_moe_model("llama")
    model(IDS, labels=IDS)
    model.train()(IDS)
    model(IDS, labels=IDS, output_router_logits=True)
    context = RoutingContext.from_sequences(torch.zeros_like(IDS), seed=0, step=0)
    with routing_context(install(model, RuleConfig()), context):  # as RoutingCallback does, which watches the load
        model(IDS, labels=IDS)
    tiny_moe_model("llama", moe_layers=[]).train()(IDS, labels=IDS)
    assert said == []
    model(IDS, labels=IDS)
    assert ["output_router_logits" in line and "RoutingCallback" in line for line in said] == [True]
