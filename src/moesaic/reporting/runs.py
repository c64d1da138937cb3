"""Learning curves of a training run, from its metrics.jsonl and recipe.yaml."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from moesaic.checkpoint.pio import explained
from moesaic.common.errors import MoesaicError

METRICS_FILE = "metrics.jsonl"
RECIPE_FILE = "recipe.yaml"

_POINTS = 600  # of a curve: more than a screen can show
_NUMBERS = (
    "loss",
    "balance_loss",
    "router_z_loss",
    "lm_z_loss",
    "load_entropy",
    "largest_share",
    "dead_experts",
    "grad_norm",
    "lr",
)


def read_run(folder: Path, name: str) -> dict[str, Any]:
    """One run for the page: curves of its steps (means over neighbours where there are many) and its validations.

    Raises:
        MoesaicError: metrics.jsonl has no step, or a line that is none; names the line.
    """
    curves = _Curves(folder / METRICS_FILE)
    for number, line in _lines(folder / METRICS_FILE):
        curves.add(number, line)
    if not curves.steps:
        raise MoesaicError(f"{folder / METRICS_FILE}: has no step yet; report on it when the run has made some")
    return {
        "name": name,
        "folder": str(folder),
        "recipe": _recipe(folder / RECIPE_FILE),
        "steps": curves.steps[-1],
        "tokens": curves.tokens[-1],
        "seconds": math.fsum(curves.seconds),
        **curves.thinned(),
        "validation": curves.validation,
    }


def _lines(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The lines with their numbers. A last line without an end is what a killed run left, and is not read."""
    with explained(file), file.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                value = json.loads(line)
            except ValueError as error:
                raise MoesaicError(f"{file}: line {number} is not JSON; it isn't what `moesaic train` wrote") from error
            if not isinstance(value, dict):
                raise MoesaicError(f"{file}: line {number} is not a step or a validation of `moesaic train`")
            yield number, value


class _Curves:
    """Columns of numbers, filled line by line."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.steps: list[int] = []
        self.tokens: list[int] = []
        self.seconds: list[float] = []
        self._columns: dict[str, list[float]] = {}
        self._domains: dict[str, list[float]] = {}
        self.validation: dict[str, Any] = {"steps": [], "tokens": [], "domains": {}}

    def add(self, number: int, line: Mapping[str, Any]) -> None:
        try:
            if line["kind"] == "step":
                self._add_step(line)
            elif line["kind"] == "validation":
                self._add_validation(line)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise MoesaicError(
                f"{self._file}: line {number} is not a step or a validation of `moesaic train` ({error})"
            ) from error

    def _add_step(self, line: Mapping[str, Any]) -> None:
        before = len(self.steps)
        self.steps.append(int(line["step"]))
        self.tokens.append(int(line["tokens"]))
        self.seconds.append(float(line["timing"]["seconds"]))
        values = {name: line[name] for name in _NUMBERS if name in line}
        values["tokens_per_second"] = line["timing"]["tokens_per_second"]
        _append(self._columns, values, before)
        _append(self._domains, line["domain_loss"], before)

    def _add_validation(self, line: Mapping[str, Any]) -> None:
        before = len(self.validation["steps"])
        self.validation["steps"].append(int(line["step"]))
        self.validation["tokens"].append(int(line["tokens"]))
        losses, errors = {}, {}
        for domain, measured in line["validation"].items():
            losses[domain] = float(measured["loss"])
            error = measured["standard_error"]
            errors[domain] = math.nan if error is None else float(error)
        domains = self.validation["domains"]
        for domain in losses:
            domains.setdefault(domain, {"loss": [math.nan] * before, "error": [math.nan] * before})
        for domain, series in domains.items():
            series["loss"].append(losses.get(domain, math.nan))
            series["error"].append(errors.get(domain, math.nan))

    def thinned(self) -> dict[str, Any]:
        """The curves with at most `_POINTS` points, each the mean over as many steps (the last one of fewer)."""
        size = math.ceil(len(self.steps) / _POINTS)
        starts = range(0, len(self.steps), size)

        def last(values: list[int]) -> list[int]:
            return [values[min(start + size, len(values)) - 1] for start in starts]

        def means(columns: Mapping[str, list[float]]) -> dict[str, list[float]]:
            return {name: [_mean(values[start : start + size]) for start in starts] for name, values in columns.items()}

        return {
            "mean_over": size,
            "at": {"steps": last(self.steps), "tokens": last(self.tokens)},
            "curves": means(self._columns),
            "domain_loss": means(self._domains),
        }


def _append(columns: dict[str, list[float]], values: Mapping[str, float], before: int) -> None:
    """Append one row; a column that is new, or not in this row, has NaN there."""
    for name, value in values.items():
        columns.setdefault(name, [math.nan] * before).append(float(value))
    for column in columns.values():
        if len(column) == before:
            column.append(math.nan)


def _mean(values: list[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return math.fsum(known) / len(known) if known else math.nan


def _recipe(file: Path) -> dict[str, str]:
    """The recipe as flat keys and their values in words; empty where there is none."""
    if not file.exists():
        return {}
    with explained(file):
        text = file.read_text(encoding="utf-8")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise MoesaicError(f"{file}: is not YAML; it is not what `moesaic train` wrote") from error
    return dict(_flat(value, "")) if isinstance(value, dict) else {}


def _flat(value: Mapping[Any, Any], prefix: str) -> Iterable[tuple[str, str]]:
    for key, item in value.items():
        name = f"{prefix}{key}"
        if isinstance(item, Mapping) and item:
            yield from _flat(item, f"{name}.")
        elif isinstance(item, list) and item and all(isinstance(entry, Mapping) for entry in item):
            yield name, ", ".join(str(entry.get("domain") or entry.get("path") or "?") for entry in item)
        else:
            yield name, "none" if item is None else str(item)
