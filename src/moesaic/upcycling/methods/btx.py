"""Branch-Train-MiX: one whole FFN per specialist."""

from moesaic.upcycling.method import Method, Shard


def copied(expert: int, shards: int) -> Shard:  # noqa: ARG001
    """Expert i is the whole FFN of specialist i."""
    return Shard(1 + expert, 0)


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
    copies=copied,
)
