"""The routing rules against naive float64 loops over tokens, groups and experts: choices, weights and gradients."""

import math

import pytest
import torch
from torch import Tensor

from moesaic.modeling.modeling_moesaic import (
    GROUP_SCORES,
    ROUTING_WEIGHTINGS,
    group_members,
    route_one_per_group,
    route_topk,
)

TOKENS = 40
UNEVEN = [0, 2, 1, 1, 0, 2, 2, 1, 3, 2]  # groups of 2, 3, 4 and 1 experts, interleaved


def random_logits(experts: int, *, tied: bool, seed: int = 0) -> Tensor:
    logits = torch.randn(TOKENS, experts, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (logits * 2).round() if tied else logits  # few distinct values: many ties


def softmax(scores: list[Tensor]) -> list[Tensor]:
    total = sum((score.exp() for score in scores), torch.zeros((), dtype=torch.float64))
    return [score.exp() / total for score in scores]


def over_their_sum(scores: list[Tensor]) -> list[Tensor]:
    sigmoids = [1 / (1 + (-score).exp()) for score in scores]
    total = sum(sigmoids, torch.zeros((), dtype=torch.float64))
    return [sigmoid / total for sigmoid in sigmoids]


NORMALISED = {"selected": softmax, "sigmoid": over_their_sum}


def best_first(scores: list[Tensor], count: int) -> list[int]:
    return sorted(range(len(scores)), key=lambda i: (-scores[i].item(), i))[:count]


def naive_topk(logits: list[Tensor], top_k: int, weighting: str) -> tuple[list[Tensor], list[int]]:
    ids = best_first(logits, top_k)
    if weighting in NORMALISED:
        return NORMALISED[weighting]([logits[i] for i in ids]), ids
    return [softmax(logits)[i] for i in ids], ids


def naive_score(values: list[Tensor], how: str) -> Tensor:
    if how == "max":
        return values[best_first(values, 1)[0]]
    if how == "mean":
        return sum(values, torch.zeros((), dtype=torch.float64)) / len(values)
    total = sum((value.exp() for value in values), torch.zeros((), dtype=torch.float64))
    return total.log() - math.log(len(values))


def naive_one_per_group(
    logits: list[Tensor], groups: list[int], top_k: int, weighting: str, group_score: str
) -> tuple[list[Tensor], list[int]]:
    members = [[e for e, g in enumerate(groups) if g == group] for group in sorted(set(groups))]
    representatives = [ids[best_first([logits[e] for e in ids], 1)[0]] for ids in members]
    scores = [naive_score([logits[e] for e in ids], group_score) for ids in members]
    chosen = best_first(scores, top_k)
    if weighting in NORMALISED:
        weights = NORMALISED[weighting]([scores[g] for g in chosen])
    elif group_score == "max":
        weights = [softmax(logits)[representatives[g]] for g in chosen]
    else:
        weights = [softmax(scores)[g] for g in chosen]
    return weights, [representatives[g] for g in chosen]


def check(fast: tuple[Tensor, Tensor], logits_TE: Tensor, naive) -> None:
    weights_TK, ids_TK = fast
    reference = [naive(list(row)) for row in logits_TE]
    assert ids_TK.tolist() == [ids for _, ids in reference]
    expected_TK = torch.stack([torch.stack(weights) for weights, _ in reference])
    torch.testing.assert_close(weights_TK, expected_TK, rtol=1e-13, atol=1e-15)
    upstream_TK = torch.randn(weights_TK.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (found,) = torch.autograd.grad(weights_TK, logits_TE, upstream_TK)
    (expected,) = torch.autograd.grad(expected_TK, logits_TE, upstream_TK)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("weighting", ROUTING_WEIGHTINGS)
@pytest.mark.parametrize("top_k", [1, 3, 10])
def test_topk(top_k: int, weighting: str, tied: bool) -> None:
    logits_TE = random_logits(10, tied=tied).requires_grad_()
    check(route_topk(logits_TE, top_k, weighting), logits_TE, lambda row: naive_topk(row, top_k, weighting))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("group_score", GROUP_SCORES)
@pytest.mark.parametrize("weighting", ROUTING_WEIGHTINGS)
@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize("groups", [UNEVEN, [0, 0, 1, 1, 2, 2, 3, 3], [5, 3, 1, 0]])
def test_one_per_group(groups: list[int], top_k: int, weighting: str, group_score: str, tied: bool) -> None:
    logits_TE = random_logits(len(groups), tied=tied).requires_grad_()
    members_GM = torch.tensor(group_members(groups))
    check(
        route_one_per_group(logits_TE, members_GM, top_k, weighting, group_score),
        logits_TE,
        lambda row: naive_one_per_group(row, groups, top_k, weighting, group_score),
    )


def test_members_are_padded() -> None:
    assert group_members(UNEVEN) == [[0, 4, -1, -1], [2, 3, 7, -1], [1, 5, 6, 9], [8, -1, -1, -1]]


def test_selected_equals_softmax_over_all_renormalised() -> None:
    logits_TE = random_logits(10, tied=False)
    every_TK, ids_TK = route_topk(logits_TE, 4, "all")
    selected_TK, same_TK = route_topk(logits_TE, 4, "selected")
    assert ids_TK.equal(same_TK)
    torch.testing.assert_close(selected_TK, every_TK / every_TK.sum(-1, keepdim=True))


@pytest.mark.parametrize("weighting", ROUTING_WEIGHTINGS)
def test_large_logits_stay_finite(weighting: str) -> None:
    logits_TE = random_logits(10, tied=False).float() * 1e4
    weights_TK, _ = route_one_per_group(logits_TE, torch.tensor(group_members(UNEVEN)), 2, weighting, "log_mean_exp")
    assert weights_TK.isfinite().all()
