"""What each family can be used for, verb by verb: `moesaic families` and docs/families.md. Torch-free.

`tested.json` holds what tests/integration/test_every_moe.py found on a tiny random model of every causal MoE family of
transformers, and that test fails where it is no longer so. A family that is not in it (of a newer transformers) is read
off its class when it is asked for by name, and nothing of it is proved.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from moesaic.common.errors import MoesaicError, suggest
from moesaic.families.family import MoEFamily, base_of, native_type, our_base
from moesaic.families.moe_table import EMO, MOE_FAMILIES, OURS

VERBS = ("read", "inspect", "select", "extract", "merge-back", "restrict", "expand", "verify", "train", "rules")
"""What the test of all families runs. `rules`: the training rules of docs/routing.md."""

COLUMNS = (*VERBS, "write fused", "write per-expert", "GGUF", "vLLM")
"""What `moesaic families` says of each family."""

TESTED, DERIVED, NO = "tested", "derived", "no"
"""How every cell begins."""

_UNSEEN: Mapping[str, str] = {
    "write fused": "no: without a written row a checkpoint keeps the layout that it has",
    "write per-expert": "no: without a written row a checkpoint keeps the layout that it has",
    "GGUF": "no: nobody has compared llama.cpp with it",
    "vLLM": "no: nobody has run it here",
}
"""Cells of families without a written row that looking at transformers cannot fill."""


@dataclass(frozen=True, kw_only=True)
class Support:
    """One family, and what can be done with it."""

    model_type: str
    about: str
    notes: str
    cells: Mapping[str, str]
    """Column -> tested, derived or no, and what is to be said beside it."""

    def to_json(self) -> dict[str, object]:
        """Plain values, for `moesaic families --json`."""
        return {"model_type": self.model_type, "about": self.about, "cells": dict(self.cells), "notes": self.notes}


@cache
def tested() -> Mapping[str, Any]:
    """Model type -> `about`, `notes` and `cells` (of `VERBS`) of every causal MoE family of transformers."""
    return json.loads(Path(__file__).with_name("tested.json").read_text(encoding="utf-8"))


def support() -> tuple[Support, ...]:
    """The families with a written row, ours, and all the others of transformers by name."""
    others = sorted(name for name in tested() if name not in MOE_FAMILIES)
    return (
        *(_written(row) for row in MOE_FAMILIES.values()),
        _written(OURS),
        _written(EMO),
        *(_seen(name) for name in others),
    )


def find(family: str) -> Support:
    """One family by name; one that the test of all families does not know is read off its class.

    Raises:
        MoesaicError: no such family, or why it cannot be used.
    """
    name = OURS.model_type if our_base(family) else native_type(family) if base_of(family) != "*" else family
    rows = support()
    for row in rows:
        if row.model_type == name:
            return row
    from moesaic.families.derive import causal_types, derive

    try:
        if name not in causal_types():
            raise LookupError(name)
        row = derive(name)
    except LookupError as error:
        raise MoesaicError(
            f"{family}: not a family known here; {suggest(family, [row.model_type for row in rows])}"
        ) from error
    words = f"{DERIVED}: read off transformers' class, and nobody has tried it"
    cells = dict.fromkeys(VERBS, words) | {"rules": words if row.routers else "no: its router is no plain softmax"}
    return Support(model_type=name, about=row.about, notes=row.notes, cells={**cells, **_UNSEEN})


def _written(row: MoEFamily) -> Support:
    """A family with a written row, whose limits are what cannot be seen."""
    found = tested().get(row.model_type, {"cells": {}})["cells"]
    cells = {column: row.limits.get(column, found.get(column, TESTED)) for column in COLUMNS}
    worded = {
        column: cell if cell == TESTED or cell.startswith(f"{NO}: ") else f"{TESTED}: {cell}"
        for column, cell in cells.items()
    }
    return Support(model_type=row.model_type, about=row.about, notes=row.notes, cells=worded)


def _seen(name: str) -> Support:
    facts = tested()[name]
    return Support(model_type=name, about=facts["about"], notes=facts["notes"], cells={**facts["cells"], **_UNSEEN})


def markdown(rows: Iterable[Support]) -> str:
    """The table of docs/families.md, with what else there is to say below it."""
    reasons: dict[str, int] = {}

    def mark(cell: str) -> str:
        word, _, more = cell.partition(": ")
        return f"{word} ({reasons.setdefault(more, len(reasons) + 1)})" if more else word

    lines = [f"| model_type | what | {' | '.join(COLUMNS)} |", "|" + "---|" * (len(COLUMNS) + 2)]
    lines += [
        f"| `{row.model_type}` | {row.about} | {' | '.join(mark(row.cells[column]) for column in COLUMNS)} |"
        for row in rows
    ]
    return "\n".join([*lines, "", *(f"({number}) {reason}  " for reason, number in reasons.items())])
