"""Branch-Train-MiX: one whole FFN per specialist."""

from moesaic.families.experts import ExpertWeights, T
from moesaic.upcycling.method import DenseLayer, Method


def experts(layer: DenseLayer[T]) -> list[ExpertWeights[T]]:
    """Expert i is the whole FFN of specialist i."""
    return list(layer.specialists)


BTX = Method(
    name="btx",
    description="one expert per specialist: its whole FFN",
    paper="https://arxiv.org/abs/2403.07816",
    needs_specialists=True,
    cuts=False,
    default_shards=1,
    whole_groups=True,
    default_routing="topk",
    auto_router={"topk": "random", "one_per_group": "random"},
    scaled=True,
    reinit=False,
    preserves=True,
    weighting_of_one="all",
    experts=experts,
)
