"""docs/train.md lists every key of a training recipe, from the docstrings of the recipe's fields.

`python -m tests.unit.training.test_page` writes the table anew.
"""

import dataclasses
import re
import typing
from collections.abc import Iterator
from pathlib import Path

from moesaic.common.recipe import init_fields
from moesaic.common.verbs import field_default, field_docs, is_required
from moesaic.training.recipe import TrainRecipe

PAGE = Path(__file__).parents[3] / "docs" / "train.md"
_TABLE = re.compile(r"(<!-- keys of the recipe -->\n).*?(<!-- end -->)", re.DOTALL)


def rows(recipe: type, prefix: str, seen: set[type]) -> Iterator[str]:
    """A row per key; the keys of a part come after it, where it is met first."""
    hints = typing.get_type_hints(recipe)
    for field in init_fields(recipe):
        default = "needed" if is_required(field) else _shown(field_default(field))
        text = field_docs(recipe)[field.name].replace("|", r"\|")
        yield f"| `{prefix}{field.name}` | {default} | {text} |"
        for part in _parts(hints[field.name]):
            if part not in seen:
                seen.add(part)
                yield from rows(part, f"{prefix}{field.name}.", seen)


def _parts(hint: object) -> Iterator[type]:
    """The recipe classes within a type."""
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        yield hint
    for argument in typing.get_args(hint):
        yield from _parts(argument)


def _shown(value: object) -> str:
    if dataclasses.is_dataclass(value) or value in (None, (), ""):
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{list(value) if isinstance(value, tuple) else value}`"


def rewritten(text: str) -> str:
    """The page with the table as the code has it."""
    table = "\n".join(["| key | default | meaning |", "|---|---|---|", *rows(TrainRecipe, "", set())])
    return _TABLE.sub(lambda found: f"{found[1]}{table}\n{found[2]}", text)


def test_the_page_has_every_key():
    text = PAGE.read_text(encoding="utf-8")
    assert "| `losses.balance.scope` | `global` |" in text
    assert rewritten(text) == text, "run: python -m tests.unit.training.test_page"


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
