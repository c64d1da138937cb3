"""What the watch on routing says of a load, and when."""

import math

import pytest
import torch

from moesaic.routing.losses import Load
from moesaic.training.watch import SELECTIONS, RoutingWatch, findings


def load_of(rows: list[list[int]], top_k: int = 2) -> Load:
    counts_LE = torch.tensor(rows)
    return Load(counts_LE=counts_LE, tokens=counts_LE[0].sum() // top_k)


@pytest.mark.parametrize(
    ("row", "kinds"),
    [
        ([100, 100, 100, 100], []),
        ([200, 200, 0, 0], ["constant"]),
        ([200, 190, 10, 0], ["entropy", "dead"]),
        ([140, 130, 130, 0], ["dead"]),
        ([200, 180, 10, 10], ["entropy"]),
    ],
)
def test_kinds_of_loads(row, kinds):
    found = findings(torch.tensor([[100] * 4, row]), 2)
    assert list(found) == kinds
    assert all("1 of 2 MoE layers (counted from 0: 1)" in text for text in found.values())


@pytest.mark.parametrize(("experts", "top_k"), [(4, 1), (8, 2), (64, 6)])
def test_the_limit_is_where_inspect_calls_a_load_collapsed(experts, top_k):
    """Of n equally busy experts, those with (n - K) / (E - K) below a quarter: naive, in float64."""
    for busy in range(top_k + 1, experts + 1):
        row = [1000] * busy + [1] * (experts - busy)
        total = sum(row)
        effective = math.exp(-sum(count / total * math.log(count / total) for count in row))
        low = (effective - top_k) / (experts - top_k) < 0.25
        assert ("entropy" in findings(torch.tensor([row]), top_k)) == low, busy


def test_small_batches_are_added_up_before_they_are_looked_at():
    watch, even = RoutingWatch(), SELECTIONS // 4
    assert watch.look(load_of([[even * 2, even * 2, 0, 0]])) == []
    assert watch.look(load_of([[0, 0, even * 2, even * 2]])) == []
    assert watch.look(load_of([[even, even, even, even]])) == []
    assert watch.look(load_of([[even, even, even, even]])) == []


def test_a_kind_is_said_once_and_another_later():
    watch = RoutingWatch()
    (said,) = watch.look(load_of([[200, 200, 0, 0]]))
    assert "the router is constant" in said
    assert watch.look(load_of([[200, 200, 0, 0]])) == []
    (said,) = watch.look(load_of([[140, 130, 130, 0]]))
    assert "1 of 4 experts got no token, where an even share is 100" in said


def test_more_experts_after_an_expansion_begin_anew():
    watch = RoutingWatch()
    assert watch.look(load_of([[40, 40, 0, 0]])) == []
    assert watch.look(load_of([[100] * 8])) == []


def test_nothing_is_to_be_chosen_where_every_expert_is_used():
    assert RoutingWatch().look(load_of([[500, 500]])) == []
