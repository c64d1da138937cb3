"""Sparse upcycling: E identical copies of the base's FFN."""

from moesaic.families.experts import ExpertWeights, T
from moesaic.upcycling.method import DenseLayer, Method


def experts(layer: DenseLayer[T]) -> list[ExpertWeights[T]]:
    """Every expert is the whole FFN of the base."""
    return [layer.base] * layer.experts


SPARSE = Method(
    name="sparse",
    description="E identical copies of the base's FFN",
    paper="https://arxiv.org/abs/2212.05055",
    needs_specialists=False,
    cuts=False,
    default_shards=1,
    whole_groups=False,
    default_routing="topk",
    auto_router={"topk": "random", "one_per_group": "random"},
    scaled=True,
    reinit=False,
    preserves=True,
    weighting_of_one="all",
    experts=experts,
)
