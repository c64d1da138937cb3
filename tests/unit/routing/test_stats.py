"""Statistics against loops; merging; the collapse metrics."""

import math

import pytest
import torch

from moesaic.routing.config import RuleConfig
from moesaic.routing.pools import RoutingContext
from moesaic.routing.rules import RouterSettings, RoutingDecision, Weighting, build_rule, decide
from moesaic.routing.stats import (
    RoutingStats,
    busiest_share,
    dead_experts,
    load_entropy,
    measure_stats,
    summarise_load,
    within_group_coselection,
)
from tests.reference import naive_routing as naive

LAYERS, EXPERTS, TOP_K = 2, 6, 2
GROUPS = (0, 0, 1, 1, 2, 2)


def make(rule: RuleConfig, seed: int = 0, weighting: Weighting = "all") -> tuple[RoutingContext, list[RoutingDecision]]:
    context = RoutingContext.from_sequences(naive.random_documents(seed))
    generator = torch.Generator().manual_seed(seed)
    router = RouterSettings(num_experts=EXPERTS, top_k=TOP_K, weighting=weighting, cast_weights=False)
    built = build_rule(rule, router)
    tokens = len(context.document_ids_T)
    logits = torch.randn(LAYERS, tokens, EXPERTS, generator=generator) * 2
    return context, [decide(built, logits[layer], context=context, layer=layer) for layer in range(LAYERS)]


def check_fields(one: RoutingStats, two: RoutingStats, exact: tuple[str, ...] = ("tokens", "counts_LE", "pairs_LEE")):
    for name in ("tokens", "counts_LE", "probability_LE", "weight_LE", "entropy_L", "pairs_LEE"):
        a, b = getattr(one, name), getattr(two, name)
        assert a.dtype == (torch.int64 if name in exact else torch.float64)
        torch.testing.assert_close(a, b, rtol=0, atol=0 if name in exact else 1e-12)


@pytest.mark.parametrize("weighting", ["all", "sigmoid"])
def test_statistics_against_a_loop(weighting):
    context, decisions = make(RuleConfig(rule="document_pool", pool_size=(2, 4)), weighting=weighting)
    stats = measure_stats(decisions, context.token_mask_T, pairs=True)
    counts, pairs = torch.zeros(LAYERS, EXPERTS).long(), torch.zeros(LAYERS, EXPERTS, EXPERTS).long()
    probability, weight = torch.zeros(LAYERS, EXPERTS).double(), torch.zeros(LAYERS, EXPERTS).double()
    entropy, tokens = torch.zeros(LAYERS).double(), 0
    for layer, decision in enumerate(decisions):
        assert decision.allowed_TE is not None
        for t, real in enumerate(context.token_mask_T.tolist()):
            if not real:
                continue
            tokens += layer == 0
            chosen = decision.expert_ids_TK[t].tolist()
            for k, e in enumerate(chosen):
                counts[layer, e] += 1
                weight[layer, e] += decision.weights_TK[t, k].double()
                for other in chosen:
                    pairs[layer, e, other] += 1
            usable = decision.allowed_TE[t].nonzero()[:, 0].tolist()
            of_usable = naive.probabilities(list(decision.logits_TE[t, usable].double()), weighting)
            for e, p in zip(usable, of_usable, strict=True):
                probability[layer, e] += p
                entropy[layer] -= p * math.log(p)
    expected = RoutingStats(
        tokens=torch.tensor(tokens),
        counts_LE=counts,
        probability_LE=probability,
        weight_LE=weight,
        entropy_L=entropy,
        pairs_LEE=pairs,
    )
    check_fields(stats, expected)
    assert (~context.token_mask_T).sum() > 0


def test_statistics_of_parts_add_up():
    rule = RuleConfig(rule="topk")
    context, decisions = make(rule)
    whole = measure_stats(decisions, context.token_mask_T, pairs=True)
    parts = []
    for cut in (slice(0, 5), slice(5, 6), slice(6, None)):
        some = [
            RoutingDecision(
                logits_TE=d.logits_TE[cut], expert_ids_TK=d.expert_ids_TK[cut], weights_TK=d.weights_TK[cut]
            )
            for d in decisions
        ]
        parts.append(measure_stats(some, context.token_mask_T[cut], pairs=True))
    check_fields(parts[0] + parts[1] + parts[2], whole)


def test_statistics_ignore_padding():
    _, decisions = make(RuleConfig(rule="topk"))
    nothing = measure_stats(decisions, torch.zeros(len(decisions[0].logits_TE), dtype=torch.bool))
    assert int(nothing.tokens) == 0
    assert nothing.counts_LE.sum() == 0
    assert nothing.probability_LE.sum() == nothing.weight_LE.sum() == nothing.entropy_L.sum() == 0


def test_collapse_metrics():
    counts = torch.tensor([[10, 10, 10, 10], [40, 0, 0, 0], [24, 8, 8, 0]])
    for row, entropy in zip(counts.tolist(), load_entropy(counts).tolist(), strict=True):
        assert entropy == pytest.approx(naive.load_entropy(row), abs=1e-12)
    assert load_entropy(counts).tolist()[:2] == [pytest.approx(1.0), pytest.approx(0.0)]
    assert busiest_share(counts).tolist() == pytest.approx([0.25, 1.0, 0.6])
    assert busiest_share(counts, 2).tolist() == pytest.approx([0.5, 1.0, 0.8])
    assert dead_experts(counts).tolist() == [0, 3, 1]
    assert summarise_load(counts)["dead_experts"] == [0, 3, 1]
    assert busiest_share(torch.tensor([[3]]), 2).tolist() == [1.0]


def test_no_tokens_give_no_nan():
    metrics = summarise_load(torch.zeros(1, 4, dtype=torch.int64))
    assert metrics == {
        "load_entropy": [0.0],
        "largest_share": [0.0],
        "two_busiest_share": [0.0],
        "dead_experts": [4],
    }


def test_within_group_coselection():
    context, decisions = make(RuleConfig(rule="topk"))
    stats = measure_stats(decisions, context.token_mask_T, pairs=True)
    for layer, decision in enumerate(decisions):
        chosen = decision.expert_ids_TK[context.token_mask_T].tolist()
        inside = [GROUPS[a] == GROUPS[b] for a, b in chosen]
        expected = sum(inside) / len(inside)
        assert 0 < expected < 1
        assert float(within_group_coselection(stats, GROUPS)[layer]) == pytest.approx(expected)
    context, decisions = make(RuleConfig(rule="one_per_group", expert_groups=GROUPS))
    stats = measure_stats(decisions, context.token_mask_T, pairs=True)
    assert within_group_coselection(stats, GROUPS).tolist() == [0.0] * LAYERS
