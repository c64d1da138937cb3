import pytest

from moesaic.upcycling.choices import Choices, choose
from moesaic.upcycling.recipe import Specialist, UpcycleRecipe


def chosen(method, count: int = 0, **more) -> Choices:
    specialists = tuple(Specialist(name=f"s{i}", path=f"s{i}") for i in range(count))
    recipe = UpcycleRecipe(base="base", method=method, specialists=specialists, **more)
    return choose(recipe, hidden=32, intermediate=48)


@pytest.mark.parametrize(
    ("method", "count", "expected"),
    [
        ("scratch", 0, (8, 1, 2, "topk", "random", "base")),
        ("sparse", 0, (8, 1, 2, "topk", "random", "base")),
        ("drop", 0, (8, 1, 2, "topk", "random", "base")),
        ("virtual_group", 0, (8, 2, 2, "topk", "tied", "base")),
        ("btx", 3, (3, 1, 2, "topk", "random", "mean")),
        ("divmoe", 4, (8, 2, 2, "one_per_group", "latin_square", "mean")),
        ("divmoe", 5, (10, 2, 2, "one_per_group", "random", "mean")),
    ],
)
def test_defaults(method, count, expected):
    made = chosen(method, count)
    layer = made.layer
    assert (
        layer.experts, layer.shards, layer.top_k, layer.routing, layer.router_init, made.shared_weights
    ) == expected  # fmt: skip


@pytest.mark.parametrize(
    ("method", "count", "more", "top_k"),
    [
        ("virtual_group", 0, {"shards": 4}, 4),
        ("virtual_group", 0, {"shards": 1}, 2),
        ("divmoe", 3, {"shards": 3}, 3),
        ("divmoe", 2, {"shards": 4}, 2),  # only two groups
        ("sparse", 0, {"experts": 1}, 1),
    ],
)
def test_default_top_k(method, count, more, top_k):
    assert chosen(method, count, **more).layer.top_k == top_k


@pytest.mark.parametrize(
    ("method", "count", "more", "router", "notice"),
    [
        ("divmoe", 4, {"top_k": 3}, "random", "--top-k 3 is not a multiple of --shards 2"),
        ("divmoe", 4, {"shards": 3, "top_k": 3}, "random", "does not divide the number of domains (4)"),
        ("divmoe", 6, {"shards": 3}, "latin_square", None),
        ("divmoe", 4, {"routing": "topk"}, "latin_square", None),
        ("virtual_group", 0, {"routing": "one_per_group"}, "latin_square", None),
        ("virtual_group", 0, {"experts": 6, "routing": "one_per_group"}, "random", "number of domains (3)"),
        ("virtual_group", 0, {"top_k": 3}, "tied", "incomplete group"),
        ("divmoe", 4, {"top_k": 3, "router_init": "latin_square"}, "latin_square", "incomplete group"),
        ("divmoe", 4, {"router_init": "zeros"}, "zeros", "takes shard 0 of each group"),
        ("divmoe", 4, {"router_init": "tied"}, "tied", "takes shard 0 of each group"),
        ("divmoe", 4, {"router_init": "random"}, "random", None),
        ("sparse", 0, {"router_init": "tied"}, "tied", "with whole FFNs (--shards 1) its rows are those of random"),
        ("btx", 4, {"router_init": "latin_square"}, "latin_square", "its rows are those of random"),
    ],
)
def test_router(method, count, more, router, notice):
    made = chosen(method, count, **more)
    assert made.layer.router_init == router
    assert bool(made.notices) == (notice is not None)
    assert notice is None or notice in made.notices[0]


def test_groups():
    assert chosen("divmoe", 3).layer.groups == (0, 0, 1, 1, 2, 2)
    assert chosen("virtual_group", experts=6, shards=3, routing="one_per_group", top_k=2).layer.groups == (
        0,
        0,
        0,
        1,
        1,
        1,
    )
    assert chosen("virtual_group").layer.groups is None
    assert chosen("divmoe", 3, shards=1).layer.groups == (0, 1, 2)


def test_scratch_is_not_scaled():
    made = chosen("scratch", shards=2, scale="paper")
    assert made.scale == "none"
    assert made.layer.factors.down == 1.0
    assert "--scale paper: not applied" in made.notices[0]
    assert not chosen("scratch", shards=2).notices
