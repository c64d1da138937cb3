import pytest
import torch

from moesaic.common.seeds import generator
from moesaic.upcycling.layers import ROUTER_INITS, RouterSpec


def rows(kind, experts=12, shards=3, std=0.02, hidden=400, seed=0) -> torch.Tensor:
    spec = RouterSpec(experts=experts, hidden=hidden, shards=shards, std=std)
    return ROUTER_INITS[kind](spec, generator(seed, "router"))


@pytest.mark.parametrize("kind", list(ROUTER_INITS))
def test_shape_dtype_and_seed(kind):
    kind_rows = rows(kind, experts=18)
    assert kind_rows.shape == (18, 400)
    assert kind_rows.dtype == torch.float32
    assert torch.equal(kind_rows, rows(kind, experts=18))
    assert kind == "zeros" or not torch.equal(kind_rows, rows(kind, experts=18, seed=1))


@pytest.mark.parametrize(("kind", "different"), [("random", 18), ("tied", 6), ("latin_square", 6), ("zeros", 1)])
def test_number_of_different_rows(kind, different):
    assert len({tuple(row.tolist()) for row in rows(kind, experts=18)}) == different


@pytest.mark.parametrize("kind", ["random", "tied", "latin_square"])
def test_standard_deviation(kind):
    assert rows(kind, experts=18, std=0.3).std() == pytest.approx(0.3, rel=0.05)
    assert torch.equal(rows(kind, experts=18, std=0.0), torch.zeros(18, 400))


def test_tied_repeats_in_a_row():
    tied = rows("tied", experts=6, shards=3)
    assert torch.equal(tied[0], tied[1])
    assert torch.equal(tied[0], tied[2])
    assert not torch.equal(tied[2], tied[3])
