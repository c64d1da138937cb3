"""How families choose by their own scores, biases and groups, against loops: one token and one expert at a time."""

import itertools
import math

import pytest
import torch

from moesaic.families.family import Decision
from moesaic.routing.config import RuleConfig
from moesaic.routing.pools import RoutingContext
from moesaic.routing.rules import OwnChoice, RouterSettings, build_rule, decide

EXPERTS, GROUPS, CHOSEN, TOP_K, FACTOR = 12, 4, 2, 3, 2.5
TOKENS = 40
RULES = [
    (scoring, weighting, bias_on, rank)
    for scoring, weighting, bias_on, rank in itertools.product(
        ("softmax", "sigmoid"), ("selected", "all"), ("none", "scores", "logits"), ("none", "best", "two best")
    )
]


def scores_of(logits: list[float], scoring: str) -> list[float]:
    """-inf has no score to lose: its softmax and its sigmoid are 0."""
    if scoring == "sigmoid":
        return [1 / (1 + math.exp(-value)) if value > -math.inf else 0.0 for value in logits]
    exponentials = [math.exp(value) for value in logits]
    return [value / sum(exponentials) for value in exponentials]


def naive(logits, bias, allowed, scoring, weighting, bias_on, rank):
    """Experts and weights of one token."""
    masked = [value if free else -math.inf for value, free in zip(logits, allowed, strict=True)]
    plain = scores_of(masked, scoring)
    if bias_on == "logits":
        rating = scores_of([value + more for value, more in zip(masked, bias, strict=True)], scoring)
    else:
        rating = [value + more for value, more in zip(plain, bias, strict=True)]
    free = [expert for expert in range(EXPERTS) if allowed[expert]]
    best_first = sorted(free, key=lambda expert: -rating[expert])
    if rank != "none":
        size = EXPERTS // GROUPS
        least = min(rating[expert] for expert in free) - 1

        def worth(group: int) -> float:
            of_group = range(group * size, group * size + size)
            values = sorted((rating[expert] if allowed[expert] else least for expert in of_group), reverse=True)
            return sum(values[: 1 if rank == "best" else 2])

        groups = sorted(range(GROUPS), key=lambda group: -worth(group))[:CHOSEN]
        best_first.sort(key=lambda expert: expert // size not in groups)  # stable: those inside first
    ids = best_first[:TOP_K]
    total = sum(plain[expert] for expert in ids) if weighting == "selected" else 1.0
    return ids, [FACTOR * plain[expert] / total for expert in ids]


@pytest.mark.parametrize(("scoring", "weighting", "bias_on", "rank"), RULES)
@pytest.mark.parametrize("pool", [None, 4])
def test_every_choice_and_its_weights(scoring, weighting, bias_on, rank, pool):
    decision = Decision(
        scoring=scoring, weighting=weighting, bias_on=bias_on, bias="", group_rank=rank, returns="logits"
    )
    own = OwnChoice(decision=decision, groups=GROUPS, chosen=CHOSEN)
    settings = RouterSettings(
        num_experts=EXPERTS,
        top_k=TOP_K,
        weighting=own.weighting,
        cast_weights=False,
        routed_scaling_factor=FACTOR,
        own=own,
    )
    stream = torch.Generator().manual_seed(0)
    logits_TE = torch.randn(TOKENS, EXPERTS, generator=stream, dtype=torch.float64) * 2
    bias_E = torch.randn(EXPERTS, generator=stream, dtype=torch.float64) * 0.3
    documents_T = torch.arange(TOKENS) // 10
    context = RoutingContext(document_ids_T=documents_T, num_documents=4, document_keys_N=torch.arange(4))
    config = RuleConfig(rule="topk") if pool is None else RuleConfig(rule="document_pool", pool_size=pool)
    found = decide(build_rule(config, settings), logits_TE, bias_E=bias_E, context=context)
    allowed = [[True] * EXPERTS for _ in range(TOKENS)] if found.allowed_TE is None else found.allowed_TE.tolist()
    assert (found.allowed_TE is None) == (pool is None)
    for token, (logits, free) in enumerate(zip(logits_TE.tolist(), allowed, strict=True)):
        ids, weights = naive(logits, bias_E.tolist(), free, scoring, weighting, bias_on, rank)
        assert sorted(found.expert_ids_TK[token].tolist()) == sorted(ids)
        got = dict(zip(found.expert_ids_TK[token].tolist(), found.weights_TK[token].tolist(), strict=True))
        assert all(abs(got[expert] - weight) < 1e-12 for expert, weight in zip(ids, weights, strict=True))
    if found.allowed_TE is not None:
        for document in range(4):
            mine = [scores_of(row, scoring) for row in logits_TE[documents_T == document].tolist()]
            if bias_on == "logits":
                mine = [scores_of(row, scoring) for row in (logits_TE[documents_T == document] + bias_E).tolist()]
            means = [sum(column) / len(column) for column in zip(*mine, strict=True)]
            if bias_on != "logits":
                means = [value + more for value, more in zip(means, bias_E.tolist(), strict=True)]
            best = sorted(range(EXPERTS), key=lambda expert: -means[expert])[:pool]
            assert sorted(found.allowed_TE[documents_T == document][0].nonzero().flatten().tolist()) == sorted(best)
