"""Numbers of an experiment: rows, their means and intervals over seeds, and tables of them. No torch.

A row is a JSON object with a value, what was measured, the seed, and any labels.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, TypeVar

from moesaic.checkpoint.metrics import METRICS_FILE, Step, Validation, read_metrics
from moesaic.common.errors import MoesaicError
from moesaic.common.files import write_file
from moesaic.common.intervals import Interval, mean_interval
from moesaic.common.recipe import Count, Measured, load_document
from moesaic.data.files import read_records, rows_file
from moesaic_lab.plan import ROWS, Plan

Row = Mapping[str, Any]
"""`measure`, `value`, `seed` and labels such as `model`, `domain`, `share`."""
_SPIKE = 5.0
"""A gradient norm this many times the median of its run is a spike."""
_FIRST = 10
"""The first tenth of the steps, with the warmup, has large norms in every run: it is left out of spikes."""


def write_rows(file: Path, rows: Iterable[Row]) -> None:
    """Write rows aside and rename them into place."""
    write_file(file, "".join(json.dumps(row) + "\n" for row in rows))


def read_lines(file: Path, kind: type = object) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file, each with the keys of the dataclass `kind` and others.

    Raises: `MoesaicError` with file, line and key for another.
    """
    if file.stat().st_size == 0:
        return []
    lines = []
    for where, fields in read_records(rows_file(file), None, lambda _bytes: None):
        if kind is not object:
            load_document(kind, fields, where, others=True, way_out="`moesaic lab` does not write this")
        lines.append(fields)
    return lines


@dataclass(frozen=True, kw_only=True)
class _Row:
    """What every row has beside its labels."""

    measure: str
    value: Measured
    seed: Count


def all_rows(plan: Plan, out: Path) -> list[Row]:
    """Every number of an experiment: of its finished training runs, and what its tasks wrote."""
    rows: list[Row] = []
    for step in plan.steps:
        if (out / "steps" / f"{step.name}.done").exists():
            for folder, labels in step.runs.items():
                rows += ({**labels, **row} for row in _run_rows(out / folder))
    for file in sorted((out / ROWS).glob("*.jsonl")):
        rows += read_lines(file, _Row)
    return rows


def _run_rows(folder: Path) -> Iterator[Row]:
    """What metrics.jsonl of one run says: held-out losses first and last, spikes, use of experts, speed."""
    lines = list(read_metrics(folder / METRICS_FILE))
    validations = [line for line in lines if isinstance(line, Validation)]
    steps = [line for line in lines if isinstance(line, Step)]
    if not validations or not steps:
        raise MoesaicError(f"{folder / METRICS_FILE}: has no step and validation, but the run is marked as done")
    for measure, line in (("first_loss", validations[0]), ("loss", validations[-1])):
        for domain, measured in line.validation.items():
            yield {"measure": measure, "domain": domain, "value": measured.loss}
    norms = [line.grad_norm for line in steps[len(steps) // _FIRST :]]
    yield {"measure": "spikes", "value": sum(norm > _SPIKE * median(norms) for norm in norms)}
    yield {"measure": "largest_gradient", "value": max(norms) / median(norms)}
    yield {"measure": "tokens", "value": steps[-1].tokens}
    yield {"measure": "seconds", "value": sum(line.timing.seconds for line in steps)}
    for name in ("load_entropy", "largest_share", "dead_experts"):
        if (value := getattr(steps[-1], name)) is not None:
            yield {"measure": name, "value": value}


def curves(plan: Plan, out: Path) -> Iterator[tuple[Row, list[tuple[int, float]]]]:
    """Labels of every run that has begun, and its held-out losses, mean over the domains, by tokens.

    Tokens are those that the model has seen, in earlier runs too.
    """
    for step in plan.steps:
        for folder, labels in step.runs.items():
            if (out / folder / METRICS_FILE).is_file():
                measured = [line for line in read_metrics(out / folder / METRICS_FILE) if isinstance(line, Validation)]
                means = [fmean(one.loss for one in line.validation.values()) for line in measured]
                tokens = [labels["tokens_before"] + line.tokens for line in measured]
                yield labels, list(zip(tokens, means, strict=True))


def where(rows: Iterable[Row], **labels: Any) -> list[Row]:
    """The rows with these labels; a label that a row does not have counts as None."""
    return [row for row in rows if all(row.get(name) == value for name, value in labels.items())]


def label_values(rows: Iterable[Row], label: str) -> list[Any]:
    """All values of a label, in the order of their first row."""
    return list(dict.fromkeys(row[label] for row in rows if row.get(label) is not None))


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


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table as text: a title, what it shows, columns and rows of cells."""

    title: str
    note: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def pivot(
    rows: Sequence[Row],
    *,
    title: str,
    note: str,
    down: Sequence[str] = ("model",),
    across: str = "domain",
) -> Table:
    """A row per combination of the labels `down`, a column per value of `across`.

    Args:
        rows: what goes in.
        title: of the table.
        note: what it shows.
        down: labels of the rows, which come in the order of their first row.
        across: label of the columns; after domains, a last one has their mean.
    """
    columns, mean = label_values(rows, across), ("mean",) if across == "domain" else ()
    order = {label: [None, *label_values(rows, label)] for label in down}
    found = dict.fromkeys(tuple(row.get(label) for label in down) for row in rows)
    body = []
    for key in sorted(
        found, key=lambda key: [order[label].index(value) for value, label in zip(key, down, strict=True)]
    ):
        mine = where(rows, **dict(zip(down, key, strict=True)))
        cells = [where(mine, **{across: column}) for column in columns] + ([mine] if mean else [])
        body.append((*("" if value is None else str(value) for value in key), *(show(interval_of(c)) for c in cells)))
    header = (*down, *map(str, columns), *mean)
    return Table(title=title, note=note, header=header, rows=tuple(body))


_Down = TypeVar("_Down")
_Across = TypeVar("_Across")


def grid(
    *,
    title: str,
    note: str,
    corner: str,
    down: Mapping[str, _Down],
    across: Mapping[str, _Across],
    cell: Callable[[_Down, _Across], str],
) -> Table:
    """A row per entry of `down`, a column per entry of `across`: what is shown -> what `cell` gets."""
    body = tuple((shown, *(cell(row, column) for column in across.values())) for shown, row in down.items())
    return Table(title=title, note=note, header=(corner, *across), rows=body)


def by_model(
    rows: Sequence[Row], *, title: str, note: str, columns: Mapping[str, tuple[str, int]], first: str
) -> Table:
    """A row per model that has the measure `first`, a column per measure: header -> measure and digits."""
    body = []
    for model in label_values(where(rows, measure=first), "model"):
        mine = where(rows, model=model)
        cells = (show(interval_of(where(mine, measure=measure)), digits) for measure, digits in columns.values())
        body.append((str(model), *cells))
    return Table(title=title, note=note, header=("model", *columns), rows=tuple(body))
