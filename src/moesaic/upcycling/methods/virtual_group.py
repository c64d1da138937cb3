"""Virtual groups (NVIDIA): the M shards of the base's FFN, repeated E/M times."""

from moesaic.families.experts import ExpertWeights, T
from moesaic.upcycling.method import DenseLayer, Method


def experts(layer: DenseLayer[T]) -> list[ExpertWeights[T]]:
    """Expert e*M + j is shard j of the base."""
    return [layer.base.shard(expert % layer.shards, layer.shards) for expert in range(layer.experts)]


VIRTUAL_GROUP = Method(
    name="virtual_group",
    description="the M shards of the base's FFN, repeated E/M times; tied router rows choose whole groups",
    paper="https://arxiv.org/abs/2410.07524",
    needs_specialists=False,
    cuts=True,
    default_shards=2,
    whole_groups=True,
    default_routing="topk",
    # Tied rows under one_per_group would pick shard 0 of every group; the latin square spreads the shards there.
    auto_router={"topk": "tied", "one_per_group": "latin_square"},
    scaled=True,
    reinit=False,
    preserves=True,
    experts=experts,
)
