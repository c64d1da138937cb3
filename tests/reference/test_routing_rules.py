"""The rules against naive float64 loops, values and gradients."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moesaic.modeling.modeling_moesaic import ROUTING_WEIGHTINGS
from moesaic.routing.config import RuleConfig
from moesaic.routing.pools import RoutingContext, draw_pool_sizes
from moesaic.routing.rules import RouterSettings, RoutingDecision, Rule, build_rule, decide
from tests.reference import naive_routing as naive

EXPERTS = 6


def settings(top_k: int, weighting: str, **groups) -> RouterSettings:
    return RouterSettings(
        num_experts=EXPERTS,
        top_k=top_k,
        weighting=weighting,  # pyright: ignore[reportArgumentType]
        cast_weights=False,
        **groups,
    )


def random_logits(seed: int, tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, EXPERTS, generator=generator, dtype=torch.float64) * 2


def check(decision: RoutingDecision, logits: Tensor, ids: list[list[int]], weights: list[list[Tensor]]) -> None:
    """Same experts in the same order, same weights, same gradient of a random function of the weights."""
    assert decision.expert_ids_TK.tolist() == ids
    expected = torch.stack([torch.stack(row) for row in weights])
    torch.testing.assert_close(decision.weights_TK, expected, rtol=0, atol=1e-12)
    into = torch.randn(expected.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    (fast,) = torch.autograd.grad((decision.weights_TK * into).sum(), logits)
    (slow,) = torch.autograd.grad((expected * into).sum(), logits)
    torch.testing.assert_close(fast, slow, rtol=0, atol=1e-12)
    assert len(ids[0]) == 1 or slow.abs().max() > 1e-3  # the only one of the selected has weight 1 and no gradient


def run(config: RuleConfig, router: RouterSettings, logits: Tensor, **options) -> RoutingDecision:
    rule: Rule = build_rule(config, router)
    return decide(rule, logits, **options)


@pytest.mark.parametrize("weighting", ROUTING_WEIGHTINGS)
@pytest.mark.parametrize("top_k", [1, 2, EXPERTS])
@pytest.mark.parametrize("biased", [False, True])
def test_topk(weighting, top_k, biased):
    logits = random_logits(0, 30).requires_grad_()
    bias = torch.linspace(0.3, -0.3, EXPERTS, dtype=torch.float64) if biased else None
    decision = run(RuleConfig(rule="topk"), settings(top_k, weighting), logits, bias_E=bias)
    ids, weights = naive.route(logits, top_k, weighting, bias=None if bias is None else bias.tolist())
    check(decision, logits, ids, weights)
    if biased and top_k < EXPERTS:
        assert ids != naive.route(logits, top_k, weighting)[0]


@pytest.mark.parametrize("weighting", ROUTING_WEIGHTINGS)
@pytest.mark.parametrize("score", ["max", "mean", "log_mean_exp"])
@pytest.mark.parametrize(("groups", "top_k"), [((0, 0, 1, 1, 2, 2), 2), ((0, 1, 0, 0, 2, 1), 3), ((0,) * 6, 1)])
def test_one_per_group(weighting, score, groups, top_k):
    logits = random_logits(1, 30).requires_grad_()
    router = settings(top_k, weighting, groups=groups, group_score=score)
    check(run(RuleConfig(), router, logits), logits, *naive.route_groups(logits, groups, top_k, weighting, score))


@pytest.mark.parametrize("weighting", ROUTING_WEIGHTINGS)
@pytest.mark.parametrize("score", ["max", "mean", "log_mean_exp"])
def test_one_per_group_with_selection_bias(weighting, score):
    logits = random_logits(2, 30).requires_grad_()
    groups = (0, 1, 0, 0, 2, 1)
    bias = torch.linspace(0.3, -0.3, EXPERTS, dtype=torch.float64)
    decision = run(RuleConfig(), settings(2, weighting, groups=groups, group_score=score), logits, bias_E=bias)
    ids, weights = naive.route_groups(logits, groups, 2, weighting, score, bias.tolist())
    check(decision, logits, ids, weights)
    assert ids != naive.route_groups(logits, groups, 2, weighting, score)[0]


@pytest.mark.parametrize("weighting", ROUTING_WEIGHTINGS)
@pytest.mark.parametrize("score", ["mean", "log_mean_exp"])
def test_groups_of_copies_with_a_selection_bias_are_chosen_as_their_source(weighting, score):
    """E2 of docs/statements.md under loss-free balancing, for uneven copies."""
    logits = random_logits(3, 40)
    bias = torch.linspace(0.3, -0.3, EXPERTS, dtype=torch.float64)
    sources = [*range(EXPERTS), 0, 0, 3, 5, 5, 5]
    source = run(RuleConfig(rule="topk"), settings(2, weighting), logits, bias_E=bias)
    router = replace(settings(2, weighting, groups=tuple(sources), group_score=score), num_experts=len(sources))
    grown = run(RuleConfig(), router, logits[:, sources], bias_E=bias[sources])
    assert torch.equal(torch.tensor(sources)[grown.expert_ids_TK], source.expert_ids_TK)
    torch.testing.assert_close(grown.weights_TK, source.weights_TK, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("weighting", ROUTING_WEIGHTINGS)
@pytest.mark.parametrize(("top_k", "pool"), [(2, 2), (2, 3), (2, (2, 5)), (1, (1, 6)), (3, EXPERTS), (2, None)])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_document_pool(weighting, top_k, pool, biased, seed):
    context = RoutingContext.from_sequences(naive.random_documents(seed), first_document=40, seed=9, step=seed)
    documents = context.document_ids_T.tolist()
    logits = random_logits(seed, len(documents)).requires_grad_()
    bias = torch.linspace(0.2, -0.2, EXPERTS, dtype=torch.float64) if biased else None
    config = RuleConfig(rule="document_pool", pool_size=pool)
    decision = run(config, settings(top_k, weighting), logits, context=context, layer=3, bias_E=bias)

    low, high = config.pool_range(top_k=top_k, num_experts=EXPERTS)
    sizes = draw_pool_sizes(context, low, high, layer=3).tolist()
    assert all(low <= size <= high for size in sizes)
    numbers = None if bias is None else bias.tolist()
    pools = naive.pools(logits, documents, sizes, numbers, weighting)
    allowed = [pools[d] if d >= 0 else set(range(EXPERTS)) for d in documents]
    assert decision.allowed_TE is not None
    assert [set(row.nonzero()[:, 0].tolist()) for row in decision.allowed_TE] == allowed
    check(decision, logits, *naive.route(logits, top_k, weighting, allowed, numbers))


def test_pool_of_every_expert_is_exactly_topk():
    context = RoutingContext.from_sequences(naive.random_documents(4))
    logits = random_logits(4, len(context.document_ids_T)).float()
    plain = run(RuleConfig(rule="topk"), settings(2, "selected"), logits)
    pooled = run(RuleConfig(rule="document_pool", pool_size=EXPERTS), settings(2, "selected"), logits, context=context)
    assert torch.equal(plain.expert_ids_TK, pooled.expert_ids_TK)
    assert torch.equal(plain.weights_TK, pooled.weights_TK)


def test_no_gradient_flows_through_the_choice_of_the_pool():
    """Moving a logit of one token must not reach the weights of another token of the same document."""
    context = RoutingContext.from_sequences(torch.zeros(1, 8, dtype=torch.int64))
    logits = random_logits(6, 8).requires_grad_()
    config = RuleConfig(rule="document_pool", pool_size=3)
    decision = run(config, settings(2, "all"), logits, context=context)
    (gradient,) = torch.autograd.grad(decision.weights_TK[0].square().sum(), logits)
    assert gradient[0].abs().max() > 0
    assert torch.count_nonzero(gradient[1:]) == 0
