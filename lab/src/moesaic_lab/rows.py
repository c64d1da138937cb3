"""Rows of numbers: one JSON object per line with a value, what was measured, the seed and any labels. No torch."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from statistics import fmean, median
from typing import Any

from moesaic.checkpoint.pio import write_file
from moesaic.training.metrics import METRICS_FILE
from moesaic_lab.plan import Plan

Row = Mapping[str, Any]
"""`measure`, `value`, `seed` and labels such as `model`, `domain`, `share`."""
ROWS = "rows"
"""Folder of the rows that tasks write."""
_SPIKE = 5.0
"""A gradient norm this many times the median of its run is a spike."""
_FIRST = 10
"""The first tenth of the steps, with the warmup, has large norms in every run: it is left out of spikes."""


def write_rows(file: Path, rows: Iterable[Row]) -> None:
    """Write rows aside and rename them into place."""
    write_file(file, "".join(json.dumps(row) + "\n" for row in rows))


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line]


def all_rows(plan: Plan, out: Path) -> list[Row]:
    """Every number of an experiment: of its finished training runs, and what its tasks wrote."""
    rows: list[Row] = []
    for step in plan.steps:
        if not (out / "steps" / f"{step.name}.done").exists():
            continue
        for folder, labels in step.runs.items():
            rows += ({**labels, **row} for row in _run_rows(out / folder))
    for file in sorted((out / ROWS).glob("*.jsonl")):
        rows += read_lines(file)
    return rows


def _run_rows(folder: Path) -> Iterator[Row]:
    """What metrics.jsonl of one run says: held-out losses first and last, spikes, use of experts, speed."""
    lines = read_lines(folder / METRICS_FILE)
    validations = [line for line in lines if line["kind"] == "validation"]
    steps = [line for line in lines if line["kind"] == "step"]
    for measure, line in (("first_loss", validations[0]), ("loss", validations[-1])):
        for domain, measured in line["validation"].items():
            yield {"measure": measure, "domain": domain, "value": measured["loss"]}
    norms = [line["grad_norm"] for line in steps[len(steps) // _FIRST :]]
    yield {"measure": "spikes", "value": sum(norm > _SPIKE * median(norms) for norm in norms)}
    yield {"measure": "largest_gradient", "value": max(norms) / median(norms)}
    yield {"measure": "tokens", "value": steps[-1]["tokens"]}
    yield {"measure": "seconds", "value": sum(line["timing"]["seconds"] for line in steps)}
    for name in ("load_entropy", "largest_share", "dead_experts"):
        if name in steps[-1]:
            yield {"measure": name, "value": steps[-1][name]}


def curves(plan: Plan, out: Path) -> Iterator[tuple[Row, list[tuple[int, float]]]]:
    """Labels of every run that has begun, and its held-out losses, mean over the domains, by tokens.

    Tokens are those that the model has seen, in earlier runs too.
    """
    for step in plan.steps:
        for folder, labels in step.runs.items():
            if (out / folder / METRICS_FILE).is_file():
                measured = [line for line in read_lines(out / folder / METRICS_FILE) if line["kind"] == "validation"]
                yield labels, [(labels["tokens_before"] + line["tokens"], _mean(line)) for line in measured]


def _mean(line: Mapping[str, Any]) -> float:
    return fmean(domain["loss"] for domain in line["validation"].values())
