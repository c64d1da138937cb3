"""DivMoE: every specialist's FFN cut into M shards, at most one shard of a specialist per token."""

from moesaic.families.experts import ExpertWeights, T
from moesaic.upcycling.method import DenseLayer, Method


def experts(layer: DenseLayer[T]) -> list[ExpertWeights[T]]:
    """Expert i*M + j is shard j of specialist i (equations 1 to 3)."""
    shards = layer.shards
    return [specialist.shard(j, shards) for specialist in layer.specialists for j in range(shards)]


DIVMOE = Method(
    name="divmoe",
    description="every specialist's FFN cut into M shards; a token uses at most one shard per specialist",
    paper="https://arxiv.org/abs/2610.11317",
    needs_specialists=True,
    cuts=True,
    default_shards=2,
    whole_groups=True,
    default_routing="one_per_group",
    auto_router={"topk": "latin_square", "one_per_group": "latin_square"},
    scaled=True,
    reinit=False,
    preserves=True,
    experts=experts,
)
