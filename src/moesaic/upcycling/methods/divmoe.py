"""DivMoE: every specialist's FFN cut into M shards, at most one shard of a specialist per token."""

from moesaic.upcycling.method import Method, Shard


def copied(expert: int, shards: int) -> Shard:
    """Expert i*M + j is shard j of specialist i (equations 1 to 3)."""
    return Shard(1 + expert // shards, expert % shards)


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
    copies=copied,
)
