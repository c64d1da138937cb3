"""Verbs: a recipe class and a function that takes it make the public function."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from moesaic.common.errors import MoesaicError
from moesaic.common.verbs import field_docs, verb


@dataclass(frozen=True, kw_only=True)
class Cut:
    """What to cut."""

    checkpoint: str
    """Folder, or hub id
    `org/name`."""
    keep: int
    """Experts that stay."""
    order: Literal["up", "down"] = "up"
    """Which ones first."""

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise MoesaicError(f"keep must be at least 1, got {self.keep}")


@dataclass(frozen=True, kw_only=True)
class CutMore(Cut):
    """More of it."""

    names: tuple[str, ...] = ()
    """Short names."""
    silent: int = 0


def _names(value: Any) -> list[str]:
    if not isinstance(value, Mapping):
        raise MoesaicError(f"expected names, got {value!r}")
    return list(value)


@verb(CutMore, positional=("checkpoint",), out="folder", convert={"names": _names})
def cut(
    recipe: CutMore, out: str | Path, *, quiet: bool = True, workers: int | None = None, stream: bool = False
) -> tuple[Any, ...]:
    """Cut a model.

    With a knife.

    Args:
        stream: show it.

    Raises:
        MoesaicError: it does not fit.
    """
    return recipe, out, quiet, workers, stream


@verb(Cut, positional=("checkpoint",))
def look(recipe: Cut) -> Cut:
    """Look at it.

    Raises:
        MoesaicError: there is nothing.
    """
    return recipe


def test_keywords_make_the_recipe():
    recipe = CutMore(checkpoint="a", keep=2, names=("x",))
    assert cut(Path("a"), "out", keep=2, names={"x": 1}, stream=True) == (recipe, "out", True, None, True)
    assert cut(keep=2, out="out", checkpoint="a", names={"x": 1}, quiet=False) == (recipe, "out", False, None, False)
    assert look("a", keep=3) == Cut(checkpoint="a", keep=3)


def test_a_recipe_in_place_of_keywords():
    recipe = CutMore(checkpoint="a", keep=2)
    expected = (recipe, Path("out"), True, 3, False)
    assert cut(recipe, Path("out"), workers=3) == cut.run(recipe, Path("out"), workers=3) == expected
    assert cut.recipe is CutMore
    assert cut.positional == ("checkpoint", "out")


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"kep": 2}, "cut(): kep: unknown key; did you mean 'keep'?"),
        ({"keep": "two"}, "cut(): keep: expected a whole number, got 'two'"),
        ({"keep": None}, "cut(): keep: expected a whole number, got null"),
        ({"keep": 0}, "cut(): keep: must be at least 1, got 0"),
        ({"order": "dwn"}, "cut(): order: 'dwn' is not allowed: one of 'up', 'down'"),
        ({"names": ["x"]}, "cut(): names: expected names, got ['x']"),
        ({"workers": 0}, "--workers: must be a whole number of at least 1, got 0"),
    ],
)
def test_mistakes_name_function_and_key(keywords, message):
    with pytest.raises(MoesaicError) as caught:
        cut("a", "out", **{"keep": 1} | keywords)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("arguments", "keywords"),
    [((), {"keep": 1}), (("a", "out"), {}), (("a", "out", 3), {"keep": 1}), (("a", "b"), {"keep": 1, "out": "c"})],
)
def test_too_few_or_too_many_arguments_are_type_errors(arguments, keywords):
    with pytest.raises(TypeError):
        cut(*arguments, **keywords)


def test_signature():
    signature = inspect.signature(cut)
    assert list(signature.parameters) == [
        "checkpoint", "out", "keep", "order", "names", "silent", "quiet", "workers", "stream",
    ]  # fmt: skip
    placed = [name for name, one in signature.parameters.items() if one.kind is one.POSITIONAL_OR_KEYWORD]
    assert placed == ["checkpoint", "out"]
    defaults = {name: one.default for name, one in signature.parameters.items() if one.default is not one.empty}
    assert defaults == {"order": "up", "names": (), "silent": 0, "quiet": True, "workers": None, "stream": False}
    assert signature.parameters["keep"].annotation is int
    assert cut.__name__ == "cut"


def test_docstring_has_the_fields():
    assert inspect.cleandoc(cut.__doc__ or "") == (
        "Cut a model.\n\nWith a knife.\n\nArgs:\n"
        "    checkpoint: Folder, or hub id `org/name`.\n"
        "    out: Folder to write.\n"
        "    keep: Experts that stay.\n"
        "    order: Which ones first.\n"
        "    names: Short names.\n"
        "    quiet: Print no progress, notices or summary; errors are always printed.\n"
        "    workers: Threads; the result does not depend on it. Default: one per core, at most 8.\n"
        "    stream: show it.\n\nRaises:\n    MoesaicError: it does not fit."
    )
    assert "    order: Which ones first.\n\nRaises:\n" in (look.__doc__ or "")


def test_docs_of_fields():
    assert field_docs(CutMore) == {
        "checkpoint": "Folder, or hub id `org/name`.",
        "keep": "Experts that stay.",
        "order": "Which ones first.",
        "names": "Short names.",
    }
