"""Sparse upcycling: E identical copies of the base's FFN."""

from moesaic.upcycling.method import BASE, Method, Shard


def copied(expert: int, shards: int) -> Shard:  # noqa: ARG001
    """Every expert is the whole FFN of the base."""
    return Shard(BASE, 0)


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
    copies=copied,
)
