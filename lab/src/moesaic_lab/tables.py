"""Tables of results: means over seeds with Student's 95% intervals. No torch."""

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from moesaic.common.intervals import Interval, mean_interval
from moesaic_lab.rows import Row


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table as text: a title, what it shows, columns and rows of cells."""

    title: str
    note: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def seed_values(rows: Iterable[Row]) -> dict[int, float]:
    """One value per seed: the mean over everything else (such as domains)."""
    values: dict[int, list[float]] = {}
    for row in rows:
        values.setdefault(row["seed"], []).append(row["value"])
    return {seed: fmean(found) for seed, found in sorted(values.items())}


def interval_of(rows: Iterable[Row]) -> Interval | None:
    """Mean over seeds and its 95% interval; None without rows."""
    values = list(seed_values(rows).values())
    return mean_interval(values) if values else None


def difference(left: Iterable[Row], right: Iterable[Row]) -> Interval | None:
    """Mean over seeds of left minus right within the seed, and its 95% interval; None where no seed has both."""
    first, second = seed_values(left), seed_values(right)
    values = [first[seed] - second[seed] for seed in first if seed in second]
    return mean_interval(values) if values else None


def show(interval: Interval | None, digits: int = 3) -> str:
    """`3.142 ± 0.012`, or `3.142 (3.100 to 3.154)` where the interval is not symmetrical.

    Without an interval where there is one seed, empty where there is nothing.
    """
    if interval is None:
        return ""
    if interval.low is None or interval.high is None:
        return f"{interval.value:.{digits}f}"
    if not math.isclose(interval.high - interval.value, interval.value - interval.low, rel_tol=1e-6, abs_tol=1e-12):
        return f"{interval.value:.{digits}f} ({interval.low:.{digits}f} to {interval.high:.{digits}f})"
    return f"{interval.value:.{digits}f} ± {(interval.high - interval.low) / 2:.{digits}f}"


def where(rows: Iterable[Row], **labels: Any) -> list[Row]:
    """The rows with these labels; a label that a row does not have counts as None."""
    return [row for row in rows if all(row.get(name) == value for name, value in labels.items())]


def label_values(rows: Iterable[Row], label: str) -> list[Any]:
    """All values of a label, in the order of their first row."""
    return list(dict.fromkeys(row[label] for row in rows if row.get(label) is not None))


def _place(value: Any, order: Sequence[Any]) -> int:
    return order.index(value) if value in order else -1


def pivot(
    rows: Sequence[Row],
    *,
    title: str,
    note: str,
    down: Sequence[str],
    across: str,
    cell: Callable[[Sequence[Row]], str] = lambda rows: show(interval_of(rows)),
    names: Mapping[Hashable, str] | None = None,
    mean: str | None = None,
) -> Table:
    """A row per combination of the labels `down`, a column per value of `across`.

    Args:
        rows: what goes in.
        title: of the table.
        note: what it shows.
        down: labels of the rows.
        across: label of the columns.
        cell: text of the rows of one cell.
        names: how to show label values.
        mean: header of a last column over all columns; None has no such column.
    """
    names = names or {}
    columns = label_values(rows, across)
    order = {label: label_values(rows, label) for label in down}
    found = dict.fromkeys(tuple(row.get(label) for label in down) for row in rows)
    keys = sorted(found, key=lambda key: [_place(value, order[label]) for value, label in zip(key, down, strict=True)])

    def shown(value: Any) -> str:
        return names.get(value, "" if value is None else str(value))

    body = []
    for key in keys:
        mine = where(rows, **dict(zip(down, key, strict=True)))
        cells = [cell(where(mine, **{across: column})) for column in columns]
        body.append((*map(shown, key), *cells, *([cell(mine)] if mean else [])))
    header = (*down, *map(shown, columns), *([mean] if mean else []))
    return Table(title=title, note=note, header=header, rows=tuple(body))
