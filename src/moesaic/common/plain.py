"""Parsed YAML and JSON: what could be parsed, but neither walked nor written again, is refused once for all."""

import re
from collections.abc import Mapping
from typing import Any

from moesaic.common.errors import MoesaicError

MOST_LEVELS = 64
"""Of containers in containers: what people and programs write has a dozen, and code that walks them recurses."""
MOST_CONTAINERS = 10_000_000
"""Of a document with its aliases written out: a few lines of YAML can stand for more than any memory holds."""

_HALF = re.compile("[\ud800-\udfff]")


def refuse_unwritable(value: Any, name: str, *, halves: bool = False) -> None:
    """Refuse a document that is nested too deeply or grows by its aliases, and half a character (a lone surrogate).

    `name` is what messages call the document; `halves` lets such characters pass.
    """
    level: dict[int, tuple[Any, int]] = {0: ([value], 1)}  # containers by identity, and how often each is there
    total, depth = 0, 0
    while level:
        total += sum(times for _, times in level.values())
        if depth > MOST_LEVELS or total > MOST_CONTAINERS:
            what = f"nested more than {MOST_LEVELS} levels deep" if depth > MOST_LEVELS else "too large"
            raise MoesaicError(f"{name}: is {what}; it is no document of this kind")
        below: dict[int, tuple[Any, int]] = {}
        for container, times in level.values():
            for item in _items(container):
                if isinstance(item, str):
                    if not (halves or item.isascii()):
                        _refuse_halves(item, name)
                elif isinstance(item, (Mapping, list, tuple, set)):
                    below[id(item)] = (item, times + below.get(id(item), (item, 0))[1])
        level, depth = below, depth + 1


def _items(container: Any) -> list[Any]:
    return [*container.keys(), *container.values()] if isinstance(container, Mapping) else list(container)


def _refuse_halves(text: str, name: str) -> None:
    if half := _HALF.search(text):
        around = ascii(text[max(0, half.start() - 20) : half.start() + 20])
        raise MoesaicError(f"{name}: has half a character (a lone surrogate) in {around}, which no file can hold")
