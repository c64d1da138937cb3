"""Virtual groups (NVIDIA): the M shards of the base's FFN, repeated E/M times."""

from moesaic.upcycling.method import BASE, Method, Shard


def copied(expert: int, shards: int) -> Shard:
    """Expert e*M + j is shard j of the base."""
    return Shard(BASE, expert % shards)


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
    copies=copied,
)
