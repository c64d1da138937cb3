"""E1 (a) and E2 (b) of docs/statements.md in float64, against a source layer written as loops over tokens."""

import pytest
import torch

from moesaic.common.seeds import generator
from moesaic.expansion.allocation import sources_of
from moesaic.expansion.operators import ROUTER_OPERATORS, duplicate_noise, duplicates_of, grown_rows, zero_sum_noise
from moesaic.modeling.modeling_moesaic import group_members, route_one_per_group, route_topk

EXPERTS, TOP_K, HIDDEN, WIDTH, TOKENS = 6, 2, 8, 5, 400
UNEVEN = [3, 0, 1, 0, 2, 1]
SCORES = {"selected": torch.exp, "all": torch.exp, "sigmoid": lambda logits: 1 / (1 + torch.exp(-logits))}
WEIGHTINGS = list(SCORES)


@pytest.fixture
def layer():
    draw = torch.Generator().manual_seed(1)
    shapes = ((TOKENS, HIDDEN), (EXPERTS, HIDDEN), (EXPERTS, WIDTH, HIDDEN), (EXPERTS, WIDTH, HIDDEN))
    x, router, gate, up = (torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes)
    return x, router, gate, up, torch.randn(EXPERTS, HIDDEN, WIDTH, generator=draw, dtype=torch.float64)


def expert(layer, number, x):
    _, _, gate, up, down = layer
    return down[number] @ (torch.nn.functional.silu(gate[number] @ x) * (up[number] @ x))


def source_output(layer, weighting):
    """The layer before: a score of every logit, the best K of each token, one token and expert at a time."""
    rows = []
    for x in layer[0]:
        logits = layer[1] @ x
        best = sorted(range(EXPERTS), key=lambda e: (-float(logits[e]), e))[:TOP_K]
        score = SCORES[weighting](logits)
        total = sum(float(score[e]) for e in (range(EXPERTS) if weighting == "all" else best))
        rows.append(torch.stack([score[e] / total * expert(layer, e, x) for e in best]).sum(0))
    return torch.stack(rows)


def grown_output(layer, sources, weights, ids):
    """The same experts under their new numbers, from the weights and ids that the fast rule gave."""
    return torch.stack(
        [
            torch.stack([w * expert(layer, sources[int(n)], x) for w, n in zip(*pair, strict=True)]).sum(0)
            for x, *pair in zip(layer[0], weights, ids, strict=True)
        ]
    )


def rows_of(layer, sources):
    return grown_rows(layer[1], sources, ROUTER_OPERATORS["copy"], generator(0, "test"))


def distance(output, reference):
    return ((output - reference).norm() / reference.norm()).item()


@pytest.mark.parametrize("times", [2, 3])
@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_a_uniform_copies_with_as_many_times_the_active_experts(layer, weighting, times):
    sources = sources_of([times - 1] * EXPERTS)
    weights, ids = route_topk(layer[0] @ rows_of(layer, sources).T, times * TOP_K, weighting)
    assert distance(grown_output(layer, sources, weights, ids), source_output(layer, weighting)) < 1e-14


def grouped_output(layer, sources, rows, weighting, score):
    members = torch.tensor(group_members(sources))
    weights, ids = route_one_per_group(layer[0] @ rows.T, members, TOP_K, weighting, score)
    return grown_output(layer, sources, weights, ids), ids


EXACT = [("selected", "max"), ("sigmoid", "max"), *[(w, s) for w in WEIGHTINGS for s in ("mean", "log_mean_exp")]]


@pytest.mark.parametrize(("weighting", "score"), EXACT)
def test_b_one_per_copy_group_at_the_same_top_k_for_uneven_copies(layer, weighting, score):
    sources = sources_of(UNEVEN)
    output, _ = grouped_output(layer, sources, rows_of(layer, sources), weighting, score)
    assert distance(output, source_output(layer, weighting)) < 1e-14


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_b_with_noise_mean_stays_exact_and_log_mean_exp_deviates_in_second_order(layer, weighting):
    sources = sources_of(UNEVEN)
    reference = source_output(layer, weighting)
    noise = zero_sum_noise(sources, (HIDDEN,), 1.0, generator(0, "noise")).double()
    noise -= torch.stack([noise[[s == group for s in sources]].mean(0) for group in range(EXPERTS)])[sources]  # fp32

    def deviation(score, delta):
        return distance(
            grouped_output(layer, sources, rows_of(layer, sources) + delta * noise, weighting, score)[0], reference
        )

    assert deviation("mean", 1e-3) < 1e-14
    assert deviation("log_mean_exp", 1e-3) < 1e-4
    assert deviation("log_mean_exp", 1e-3) / deviation("log_mean_exp", 1e-4) == pytest.approx(100, rel=0.05)
    if weighting != "all":
        assert deviation("max", 1e-3) / deviation("max", 1e-4) == pytest.approx(10, rel=0.05)


def test_b_with_noise_every_copy_is_used(layer):
    sources = sources_of(UNEVEN)
    rows = rows_of(layer, sources) + zero_sum_noise(sources, (HIDDEN,), 1e-3, generator(0, "noise"))
    _, ids = grouped_output(layer, sources, rows, "selected", "log_mean_exp")
    assert ids.flatten().bincount(minlength=len(sources)).min() > 0


def test_plain_copies_at_the_same_top_k_are_used_together(layer):
    """No promise, but what docs/statements.md says of plain routing: copies of the best expert fill both places."""
    sources = sources_of([1] * EXPERTS)
    weights, ids = route_topk(layer[0] @ rows_of(layer, sources).T, TOP_K, "selected")
    assert all(sources[first] == sources[second] for first, second in ids.tolist())
    assert distance(grown_output(layer, sources, weights, ids), source_output(layer, "selected")) > 0.2


def test_noise_of_copy_groups_adds_up_to_zero_and_has_the_asked_standard_deviation():
    sources = sources_of([3, 0, 1, 2])
    noise = zero_sum_noise(sources, (50_000,), 0.5, generator(3, "noise"))
    for group in range(4):
        of_group = noise[[source == group for source in sources]]
        assert of_group.sum(0).abs().max() < 1e-5
        expected = 0.0 if group == 1 else 0.5
        assert of_group.std(dim=1).tolist() == pytest.approx([expected] * len(of_group), rel=0.03)


def test_plain_noise_is_on_duplicates_only():
    sources = [0, 1, 0, 2, 3, 2]
    noise = duplicate_noise(sources, (50_000,), 0.5, generator(3, "noise"))
    assert duplicates_of(sources) == [False, False, True, False, False, True]
    assert noise.std(dim=1).tolist() == pytest.approx([0, 0, 0.5, 0, 0, 0.5], rel=0.03)
