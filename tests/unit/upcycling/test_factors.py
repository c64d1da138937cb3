import pytest

from moesaic.upcycling.choices import factors


@pytest.mark.parametrize(
    ("weighting", "experts", "top_k", "shards", "expected"),
    [
        ("selected", 8, 2, 2, 2),
        ("selected", 9, 6, 3, 3),
        ("selected", 7, 3, 1, 1),
        ("all", 8, 2, 2, 8),
        ("all", 9, 6, 3, 4.5),
    ],
)
def test_exact(weighting, experts, top_k, shards, expected):
    made = factors(scale="exact", weighting=weighting, experts=experts, top_k=top_k, shards=shards, shared=0)
    assert (made.weights, made.gate_up, made.down) == (expected, 1.0, 1.0)
    assert (made.folded.weights, made.folded.down) == (1.0, expected)


@pytest.mark.parametrize("shared", [1, 2, 3])
def test_exact_with_shared_experts_splits_in_halves(shared):
    made = factors(scale="exact", weighting="selected", experts=8, top_k=2, shards=2, shared=shared)
    assert (made.weights, made.down) == (1.0, 1.0)
    assert made.shared_down * shared == pytest.approx(0.5)


@pytest.mark.parametrize("weighting", ["selected", "all"])
def test_paper_is_the_cube_root_of_equation_5(weighting):
    """E_exp=4 times the parameters, granularity G=2, k=2: cube root of 4*4/2."""
    made = factors(scale="paper", weighting=weighting, experts=8, top_k=2, shards=2, shared=1)
    assert made.gate_up == made.down == pytest.approx(2.0)
    assert (made.weights, made.shared_down) == (1.0, 1.0)


def test_none():
    made = factors(scale="none", weighting="all", experts=8, top_k=2, shards=2, shared=2)
    assert (made.weights, made.gate_up, made.down, made.shared_down) == (1.0, 1.0, 1.0, 1.0)
