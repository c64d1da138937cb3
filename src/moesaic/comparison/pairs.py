"""Differences over the same rows: what makes a question or document hard for both models cancels out. Torch-free."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moesaic.common.intervals import Interval, loss_jump


@dataclass(frozen=True, kw_only=True)
class Rows:
    """What a model got for each row of a task or text."""

    digest: str
    """Of the rows' content: two models are paired where it is the same."""
    totals: tuple[float, ...]
    """Score of each question, or loss of each document, summed over its tokens or bytes."""
    weights: tuple[float, ...]
    """1 for a question; tokens or bytes of a document."""


def rows_of_task(entry: Mapping[str, Any]) -> tuple[Rows, ...]:
    """The rows of a task in a results file; empty where it does not have them."""
    rows = entry.get("rows")
    if not rows or any(score is None for score in rows["scores"]):
        return ()
    scores = tuple(map(float, rows["scores"]))
    return (Rows(digest=rows["hash"], totals=scores, weights=(1.0,) * len(scores)),)


def rows_of_text(entry: Mapping[str, Any], domain: str, unit: str) -> tuple[Rows, ...]:
    """The documents of a domain (`all`: of all) in a results file; `unit` is `loss` per token or `bits_per_byte`."""
    rows = entry.get("rows")
    if not rows or any(loss is None for loss in rows["losses"]):
        return ()
    own = [number for number, name in enumerate(rows["domains"]) if domain in ("all", name)]
    scale, weights = (1.0, rows["tokens"]) if unit == "loss" else (1 / math.log(2), rows["bytes"])
    return (
        Rows(
            digest=rows["hash"],
            totals=tuple(scale * rows["losses"][number] for number in own),
            weights=tuple(float(weights[number]) for number in own),
        ),
    )


def paired(ours: Sequence[Rows], theirs: Sequence[Rows]) -> Interval | None:
    """Ours minus theirs, with the interval over the rows' own differences; None where the rows are not the same ones.

    Of several tasks (an average): the mean of their differences, their errors added in squares.
    """
    if not ours or [one.digest for one in ours] != [one.digest for one in theirs]:
        return None
    found = [loss_jump(b.totals, a.totals, a.weights) for a, b in zip(ours, theirs, strict=True)]
    value = sum(one.value for one in found) / len(found)
    reaches = [one.high - one.value for one in found if one.high is not None]
    if len(reaches) < len(found):
        return Interval(value=value, low=None, high=None)
    reach = math.hypot(*reaches) / len(found)
    return Interval(value=value, low=value - reach, high=value + reach)
