import pytest

from moesaic.common.statement import Statement
from moesaic.upcycling.choices import choose
from moesaic.upcycling.recipe import Specialist, UpcycleRecipe
from moesaic.upcycling.result import statement


def promise(method, count: int = 0, identical: bool | None = None, **more) -> Statement:
    specialists = tuple(Specialist(name=f"s{i}", path=f"s{i}") for i in range(count))
    recipe = UpcycleRecipe(base="base", method=method, specialists=specialists, **more)
    spec = choose(recipe, hidden=32, intermediate=48).layer
    return statement(spec, identical=count == 0 if identical is None else identical)


@pytest.mark.parametrize(
    ("method", "count", "identical", "more", "code"),
    [
        ("sparse", 0, None, {}, "N1"),
        ("sparse", 0, None, {"scale": "none"}, "N1"),  # a factor of 1 either way
        ("sparse", 0, None, {"weighting": "all"}, "N2"),
        ("sparse", 0, None, {"scale": "paper"}, "none"),
        ("virtual_group", 0, None, {}, "N1"),
        ("virtual_group", 0, None, {"top_k": 4}, "N1"),
        ("virtual_group", 0, None, {"top_k": 3}, "none"),
        ("virtual_group", 0, None, {"scale": "none"}, "none"),
        ("virtual_group", 0, None, {"router_init": "random"}, "none"),
        ("virtual_group", 0, None, {"router_init": "zeros"}, "none"),
        ("virtual_group", 0, None, {"weighting": "all"}, "N2"),
        ("virtual_group", 0, None, {"routing": "one_per_group"}, "D2"),
        ("virtual_group", 0, None, {"routing": "one_per_group", "router_init": "tied"}, "none"),
        ("virtual_group", 0, None, {"shards": 1}, "N1"),
        ("drop", 0, None, {}, "none"),
        ("scratch", 0, None, {}, "none"),
        ("btx", 3, False, {}, "D1"),
        ("btx", 3, True, {}, "N1"),
        ("btx", 3, False, {"weighting": "all"}, "none"),
        ("divmoe", 4, False, {}, "D3"),
        ("divmoe", 4, False, {"top_k": 4}, "D3"),
        ("divmoe", 4, False, {"routing": "topk"}, "D3"),
        ("divmoe", 4, False, {"router_init": "random"}, "D1"),
        ("divmoe", 4, False, {"top_k": 3}, "D1"),
        ("divmoe", 4, False, {"scale": "paper"}, "D1"),
        ("divmoe", 5, False, {}, "D1"),
        ("divmoe", 4, True, {}, "D2"),
        ("divmoe", 4, True, {"weighting": "all"}, "N2"),
        ("divmoe", 4, True, {"router_init": "random"}, "none"),
        ("divmoe", 5, True, {}, "none"),
        ("sparse", 0, None, {"shared_experts": 1}, "S1"),
        ("virtual_group", 0, None, {"shared_experts": 3}, "S1"),
        ("divmoe", 4, True, {"shared_experts": 1}, "S1"),
        ("divmoe", 4, False, {"shared_experts": 1}, "D3"),
        ("virtual_group", 0, None, {"shared_experts": 1, "scale": "none"}, "none"),
        ("drop", 0, None, {"shared_experts": 1}, "none"),
    ],
)
def test_codes(method, count, identical, more, code):
    made = promise(method, count, identical, **more)
    assert made.code == code
    assert made.text
    assert "\n" not in made.text
    assert made.preserves == (code in ("N1", "D2", "S1"))


def test_the_reason_is_given():
    assert "K=3 is not a multiple of M=2" in promise("virtual_group", top_k=3).text
    assert "the scale is not the exact one" in promise("virtual_group", scale="none").text
    assert "random router rows" in promise("divmoe", 4, router_init="random").text
    assert promise("drop").text == "nothing is preserved: --method drop makes experts that are not parts of the FFN"


def test_unscaled_shared_experts_are_said():
    text = promise("virtual_group", shared_experts=2, scale="none").text
    assert text.startswith("y = 2 * FFN(x) + routed(x)")
    # The exact factor M/2 is 1 here as well: that the routed part is only half an FFN must not be taken for N1.
    assert "the scale is not the exact one" in text
    assert "y = FFN(x)" in promise("sparse", shared_experts=2, scale="none").text  # one whole FFN more: that is true


def test_several_virtual_groups_are_said():
    assert "a mean over 2 such sums" in promise("divmoe", 4, False, top_k=4).text
