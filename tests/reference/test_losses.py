"""Losses against naive float64 loops, values and gradients, with padding and pools."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moesaic.modeling.cross_entropy import token_losses
from moesaic.routing.config import RuleConfig
from moesaic.routing.losses import Load, balance_loss, balanced_bias, measure_load, router_z_loss
from moesaic.routing.pools import RoutingContext
from moesaic.routing.rules import RouterSettings, RoutingDecision, Weighting, build_rule, decide
from tests.reference import naive_routing as naive

LAYERS, EXPERTS = 3, 6
RULES = {
    "topk": RuleConfig(rule="topk"),
    "one_per_group": RuleConfig(rule="one_per_group", expert_groups=(0, 1, 0, 2, 2, 1)),
    "document_pool": RuleConfig(rule="document_pool", pool_size=(2, 5)),
}


def make(
    rule: str, seed: int, top_k: int = 2, weighting: Weighting = "selected"
) -> tuple[Tensor, RoutingContext, list[RoutingDecision]]:
    context = RoutingContext.from_sequences(naive.random_documents(seed), seed=seed)
    generator = torch.Generator().manual_seed(seed)
    shape = (LAYERS, len(context.document_ids_T), EXPERTS)
    logits = (torch.randn(shape, generator=generator, dtype=torch.float64) * 2).requires_grad_()
    router = RouterSettings(num_experts=EXPERTS, top_k=top_k, weighting=weighting, cast_weights=False)
    built = build_rule(RULES[rule], router)
    return logits, context, [decide(built, logits[i], context=context, layer=i) for i in range(LAYERS)]


def as_lists(decisions: list[RoutingDecision], context: RoutingContext):
    real = context.token_mask_T.tolist()
    ids = [decision.expert_ids_TK.tolist() for decision in decisions]
    allowed = None
    if decisions[0].allowed_TE is not None:
        allowed = [
            [set(row.nonzero()[:, 0].tolist()) for row in d.allowed_TE] for d in decisions if d.allowed_TE is not None
        ]
    return ids, real, allowed


def same(fast: Tensor, slow: Tensor, inputs: Tensor) -> None:
    torch.testing.assert_close(fast, slow, rtol=0, atol=1e-12)
    (fast_gradient,) = torch.autograd.grad(fast, inputs, retain_graph=True)
    (slow_gradient,) = torch.autograd.grad(slow, inputs, retain_graph=True)
    torch.testing.assert_close(fast_gradient, slow_gradient, rtol=0, atol=1e-12)
    assert slow_gradient.abs().max() > 1e-4


@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("top_k", [1, 2])
def test_balance_loss(rule, seed, top_k):
    logits, context, decisions = make(rule, seed, top_k)
    local = measure_load(decisions, context.token_mask_T)
    loss, load = balance_loss(decisions, context.token_mask_T, local)
    ids, real, allowed = as_lists(decisions, context)
    same(loss, naive.balance(logits, ids, real, allowed), logits)
    assert int(load.tokens) == sum(real)
    assert load.counts_LE.sum(dim=-1).tolist() == [sum(real) * top_k] * LAYERS


@pytest.mark.parametrize("rule", list(RULES))
def test_balance_loss_of_sigmoid_weights(rule):
    """P is the mean of the sigmoids over their sum (row 11 of docs/peers.md), as in the pools."""
    logits, context, decisions = make(rule, 0, weighting="sigmoid")
    loss, _ = balance_loss(decisions, context.token_mask_T, measure_load(decisions, context.token_mask_T))
    ids, real, allowed = as_lists(decisions, context)
    same(loss, naive.balance(logits, ids, real, allowed, "sigmoid"), logits)


@pytest.mark.parametrize("rule", list(RULES))
def test_step_scope_is_the_loss_of_one_micro_step(rule):
    """Row 10 of docs/peers.md: micro-steps of several lengths add up to the whole, gradients as well (cosine 1)."""
    logits, context, decisions = make(rule, 0)
    mask_T = context.token_mask_T
    whole = measure_load(decisions, mask_T)
    expected, _ = balance_loss(decisions, mask_T, whole, scope="step")
    total = logits.new_zeros(())
    for part in (slice(0, 4), slice(4, 25), slice(25, None)):
        cut = [
            replace(
                d,
                logits_TE=d.logits_TE[part],
                expert_ids_TK=d.expert_ids_TK[part],
                weights_TK=d.weights_TK[part],
                allowed_TE=None if d.allowed_TE is None else d.allowed_TE[part],
            )
            for d in decisions
        ]
        loss, _ = balance_loss(cut, mask_T[part], measure_load(cut, mask_T[part]), scope="step", carried=whole)
        total = total + loss
    same(total, expected, logits)
    ids, real, allowed = as_lists(decisions, context)
    same(total, naive.balance(logits, ids, real, allowed), logits)


@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize("seed", [0, 1])
def test_router_z_loss(rule, seed):
    logits, context, decisions = make(rule, seed)
    _, real, allowed = as_lists(decisions, context)
    loss = router_z_loss(decisions, context.token_mask_T, batch_tokens=sum(real))
    same(loss, naive.router_z(logits, real, allowed), logits)


def test_batch_scope_uses_the_load_of_the_micro_steps_so_far():
    """Two micro-steps: the second one's f counts both, its P only its own tokens."""
    _, first_context, first = make("topk", 0)
    logits, context, decisions = make("topk", 1)
    earlier = measure_load(first, first_context.token_mask_T)
    _, carried = balance_loss(first, first_context.token_mask_T, earlier, scope="batch")
    local = measure_load(decisions, context.token_mask_T)
    loss, load = balance_loss(decisions, context.token_mask_T, local, scope="batch", carried=carried)

    tokens = int(context.token_mask_T.sum() + first_context.token_mask_T.sum())
    assert int(load.tokens) == tokens
    expected = torch.zeros((), dtype=torch.float64)
    for layer in range(LAYERS):
        for e in range(EXPERTS):
            count = sum(
                row.count(e)
                for c, d in ((first_context, first), (context, decisions))
                for row, real in zip(d[layer].expert_ids_TK.tolist(), c.token_mask_T.tolist(), strict=True)
                if real
            )
            real = [t for t, ok in enumerate(context.token_mask_T.tolist()) if ok]
            p = sum((naive.softmax(list(logits[layer, t]))[e] for t in real), torch.zeros(()).double()) / len(real)
            expected = expected + EXPERTS * count / (tokens * 2) * p / LAYERS
    same(loss, expected, logits)


def test_balanced_routing_scores_one_at_every_size():
    for experts, top_k in ((4, 1), (8, 2), (6, 6)):
        logits = torch.zeros(experts, experts, dtype=torch.float64)
        ids = (torch.arange(experts)[:, None] + torch.arange(top_k)) % experts
        decision = RoutingDecision(logits_TE=logits, expert_ids_TK=ids, weights_TK=torch.ones_like(ids) / top_k)
        mask = torch.ones(experts, dtype=torch.bool)
        loss, _ = balance_loss([decision], mask, measure_load([decision], mask))
        assert float(loss) == pytest.approx(1.0, abs=1e-12)


def test_skewed_router_scores_the_number_of_experts_over_k():
    """All tokens on the same experts: f = 1/K there and P = 1/K, so E/K; a second softmax would give far less."""
    logits = torch.full((10, 8), -60.0, dtype=torch.float64)
    logits[:, [2, 5]] = 60.0
    router = RouterSettings(num_experts=8, top_k=2, weighting="all", cast_weights=False)
    decision = decide(build_rule(RuleConfig(rule="topk"), router), logits)
    mask = torch.ones(10, dtype=torch.bool)
    loss, load = balance_loss([decision], mask, measure_load([decision], mask))
    assert float(loss) == pytest.approx(4.0, abs=1e-12)
    assert load.counts_LE.tolist() == [[0, 0, 10, 0, 0, 10, 0, 0]]


@pytest.mark.parametrize("rule", list(RULES))
def test_padding_changes_nothing(rule):
    """The same documents with and without padding between and after them: equal losses and counts."""
    padded_ids = torch.tensor([[0, 0, 0, 1, -1, -1], [0, 1, 1, -1, -1, -1], [0, 0, 0, 0, 0, 0]])
    real_T = padded_ids.flatten() >= 0
    bare_ids = torch.tensor([[0, 0, 0, 1, 2, 3, 3, 4, 4, 4, 4, 4, 4]])
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(18, EXPERTS, generator=generator, dtype=torch.float64)
    router = RouterSettings(num_experts=EXPERTS, top_k=2, weighting="selected", cast_weights=False)
    built = build_rule(RULES[rule], router)
    results = []
    for ids, values in ((padded_ids, logits), (bare_ids, logits[real_T])):
        context = RoutingContext.from_sequences(ids, seed=3)
        decisions = [decide(built, values, context=context)]
        local = measure_load(decisions, context.token_mask_T)
        loss, _ = balance_loss(decisions, context.token_mask_T, local)
        z = router_z_loss(decisions, context.token_mask_T, batch_tokens=int(local.tokens))
        results.append((loss, z, local.counts_LE.tolist(), int(local.tokens)))
    assert results[0][2:] == results[1][2:]
    torch.testing.assert_close(results[0][:2], results[1][:2], rtol=0, atol=1e-14)


def test_a_micro_batch_of_padding_only_has_no_loss_and_no_nan():
    context = RoutingContext.from_sequences(torch.full((2, 3), -1))
    logits = torch.randn(6, EXPERTS).requires_grad_()
    router = RouterSettings(num_experts=EXPERTS, top_k=2, weighting="selected", cast_weights=False)
    decisions = [decide(build_rule(RULES["document_pool"], router), logits, context=context)]
    loss, _ = balance_loss(decisions, context.token_mask_T, measure_load(decisions, context.token_mask_T))
    z = router_z_loss(decisions, context.token_mask_T, batch_tokens=10)
    assert float(loss.detach()) == 0.0
    assert float(z.detach()) == 0.0
    (loss + z).backward()
    assert logits.grad is not None
    assert torch.count_nonzero(logits.grad) == 0


@pytest.mark.parametrize("chunk", [1, 40, 1 << 22])
def test_cross_entropy_and_lm_z(chunk, monkeypatch):
    monkeypatch.setattr("moesaic.modeling.cross_entropy._CHUNK_ELEMENTS", chunk)
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(15, 11, generator=generator, dtype=torch.float64) * 3).requires_grad_()
    labels = torch.randint(0, 11, (15,), generator=generator)
    labels[[0, 4, 5, 14]] = -100
    nll_T, partition_T = token_losses(logits, labels)
    assert nll_T[labels == -100].tolist() == [0.0] * 4
    loss, squared, number = naive.cross_entropy(logits, labels.tolist())
    assert number == int((labels != -100).sum())
    same(nll_T.sum() / number + 0.3 * partition_T.square().sum() / number, (loss + 0.3 * squared) / number, logits)


def test_cross_entropy_of_bf16_logits_is_computed_in_fp32():
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(9, 50, generator=generator) * 4).to(torch.bfloat16)
    labels = torch.randint(0, 50, (9,), generator=generator)
    leaf, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    nll_T, _ = token_losses(leaf, labels)
    expected = torch.nn.functional.cross_entropy(exact, labels, reduction="sum")
    assert nll_T.dtype == torch.float32
    torch.testing.assert_close(nll_T.sum().double(), expected, rtol=1e-6, atol=0)
    nll_T.sum().backward()
    expected.backward()
    assert leaf.grad is not None
    assert exact.grad is not None
    torch.testing.assert_close(leaf.grad, exact.grad.to(torch.bfloat16), rtol=2**-7, atol=0)


def test_losses_do_not_depend_on_how_a_batch_is_cut():
    """Cross-entropy and z-loss of the parts, and their gradients, add up to those of the whole."""
    logits, context, decisions = make("topk", 5)
    labels = torch.randint(0, EXPERTS, (len(context.document_ids_T),), generator=torch.Generator().manual_seed(1))
    labels[::5] = -100
    mask_T, number, kept = context.token_mask_T, int(context.token_mask_T.sum()), int((labels != -100).sum())

    def total(parts: list[slice]) -> Tensor:
        value = logits.new_zeros(())
        for part in parts:
            cut = [
                RoutingDecision(
                    logits_TE=d.logits_TE[part], expert_ids_TK=d.expert_ids_TK[part], weights_TK=d.weights_TK[part]
                )
                for d in decisions
            ]
            value = value + router_z_loss(cut, mask_T[part], batch_tokens=number)
            value = value + token_losses(logits[0, part], labels[part])[0].sum() / kept
        return value

    length = len(labels)
    whole = total([slice(0, length)])
    same(total([slice(0, 5), slice(5, 29), slice(29, length)]), whole, logits)


def test_bias_balancing_moves_towards_the_mean_load():
    load = Load(counts_LE=torch.tensor([[6, 2, 4, 4], [0, 0, 8, 8]]), tokens=torch.tensor(8))
    bias = torch.tensor([[0.0, 0.0, 0.5, 0.0], [0.0] * 4])
    expected = []
    for row, counts in zip(bias.tolist(), load.counts_LE.tolist(), strict=True):
        mean = sum(counts) / len(counts)
        expected.append([b + 0.01 * ((mean > c) - (mean < c)) for b, c in zip(row, counts, strict=True)])
    torch.testing.assert_close(balanced_bias(bias, load, rate=0.01), torch.tensor(expected), rtol=0, atol=1e-9)
    assert bias[0, 0] == 0.0  # the input is unchanged


def test_bias_balancing_balances_a_skewed_router():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(512, 8, generator=generator) + torch.linspace(2, -2, 8)
    router = RouterSettings(num_experts=8, top_k=2, weighting="all", cast_weights=False)
    rule = build_rule(RuleConfig(rule="topk"), router)
    mask = torch.ones(512, dtype=torch.bool)
    bias = torch.zeros(1, 8)
    shares = []
    for _ in range(300):
        load = measure_load([decide(rule, logits, bias_E=bias[0])], mask)
        shares.append(float(load.counts_LE.max() / load.counts_LE.sum()))
        bias = balanced_bias(bias, load, rate=2e-3)
    assert shares[0] > 0.35
    assert shares[-1] < 0.15
