"""What can be parsed and not written again; documents to the letter."""

from dataclasses import dataclass

import pytest

from moesaic.common.errors import MoesaicError
from moesaic.common.plain import MOST_LEVELS, refuse_unwritable
from moesaic.common.recipe import Count, Measured, Size, load_document
from moesaic.common.yaml_text import parse_yaml


def _nested(levels: int):
    value: list = []
    for _ in range(levels):
        value = [value]
    return value


def test_depth_is_bounded():
    refuse_unwritable(_nested(MOST_LEVELS - 1), "x")
    with pytest.raises(MoesaicError, match="x: is nested more than 64 levels deep"):
        refuse_unwritable(_nested(5000), "x")


@pytest.mark.parametrize("value", ["\ud800", {"\ud800": 1}, {"a": ["b\udfff"]}])
def test_half_a_character_is_refused_unless_it_is_allowed(value):
    with pytest.raises(MoesaicError, match=r"half a character \(a lone surrogate\) in '.*\\ud"):
        refuse_unwritable([value], "x")
    refuse_unwritable([value], "x", halves=True)


_LAUGHS = "a0: &a0 [1]\n" + "".join(f"a{i + 1}: &a{i + 1} [{', '.join([f'*a{i}'] * 9)}]\n" for i in range(12))
"""A few lines whose aliases stand for 9 ** 12 lists."""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: &a [*a]", "recursive"),
        (_LAUGHS, "x.yaml: is too large"),
        ("a: !!int abc", "not valid YAML: "),
        ("a: !!float abc", "not valid YAML: "),
        ("a: !!bool abc", "not valid YAML: "),
        ("a: !!timestamp 2026-99-99", "not valid YAML: "),
        ("a: " + "7" * 5000, "not valid YAML: "),
        ('a: "\\ud800"', "half a character"),
    ],
)
def test_yaml_that_cannot_be_used_is_one_line(text, message):
    with pytest.raises(MoesaicError, match=message) as caught:
        parse_yaml(text, "x.yaml")
    assert str(caught.value).startswith("x.yaml")
    assert "\n" not in str(caught.value)


@dataclass(frozen=True, kw_only=True)
class _Inner:
    name: str
    share: float


@dataclass(frozen=True, kw_only=True)
class _Document:
    count: Count
    size: Size
    loss: Measured = 0.0
    inner: tuple[_Inner, ...] = ()


GOOD = {"count": 0, "size": 1}


def test_a_document_is_read_to_the_letter():
    given = GOOD | {"loss": float("nan"), "inner": [{"name": "a", "share": 1}]}
    found = load_document(_Document, given, "d.json")
    assert found.inner == (_Inner(name="a", share=1.0),)
    assert found.loss != found.loss
    assert load_document(_Document, GOOD | {"more": 1}, "d.json", others=True).size == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"count": -1}, "d.json: count: must be at least 0, got -1; do it again"),
        ({"size": 0}, "d.json: size: must be at least 1, got 0; do it again"),
        ({"count": 1.0}, "d.json: count: expected a whole number, got 1.0; do it again"),
        ({"count": "1"}, "d.json: count: expected a whole number, got '1'; do it again"),
        ({"count": True}, "d.json: count: expected a whole number, got true; do it again"),
        ({"count": 2**65}, "d.json: count: has more than 64 bits, got 36893488147419103232; do it again"),
        ({"loss": 10**400}, "d.json: loss: expected a number, got 1000000000"),
        ({"loss": "nan"}, "d.json: loss: expected a number, got 'nan'; do it again"),
        ({"more": 1}, "d.json: more: unknown key; known: count, size, loss, inner; do it again"),
        ({"inner": [{"name": 3, "share": 1}]}, "d.json: inner.0.name: expected text, got 3; do it again"),
        ({"inner": [{"name": "a", "share": float("nan")}]}, "d.json: inner.0.share: expected a finite number, got nan"),
        ({"inner": {"a": 1}}, "d.json: inner: expected a list"),
    ],
)
def test_mistakes_name_file_key_and_value(change, message):
    with pytest.raises(MoesaicError) as caught:
        load_document(_Document, GOOD | change, "d.json", way_out="do it again")
    assert str(caught.value).startswith(message)
