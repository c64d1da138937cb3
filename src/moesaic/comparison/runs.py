"""What `compare` puts side by side: results files and training runs, and runs of one name as the seeds of one thing.

Torch-free.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

from moesaic.checkpoint.metrics import METRICS_FILE, Expansion, HeldOut, Validation, read_metrics
from moesaic.checkpoint.record import PROVENANCE_FILE, read_provenance
from moesaic.checkpoint.results import read_results
from moesaic.common.errors import MoesaicError
from moesaic.common.intervals import LEVEL, Interval, mean_interval
from moesaic.common.numbers import is_measured
from moesaic.common.progress import warn
from moesaic.comparison.pairs import Rows, paired, rows_of_task, rows_of_text

RESULTS_FILE = "results.json"

_MEAN = "loss:"
"""Key of the mean of the held-out losses, which no domain has: names of domains are not empty."""
_SEED = re.compile(r"[-_.](seed[-_]?|s)\d+$")
_NORMAL = NormalDist().inv_cdf(0.5 + LEVEL / 2)


@dataclass(frozen=True, kw_only=True)
class Score:
    """One number of one run."""

    value: float
    error: float | None
    """Standard error over questions or documents; None where it is unknown."""
    samples: int
    condition: str
    """What two runs must share for this column to be compared: shots, limit, data."""
    rows: tuple[Rows, ...] = ()
    """The rows that it is the mean of; of an average, of each task. Empty where they are unknown."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """A kind of number."""

    key: str
    title: str
    percent: bool
    """Whether it is a share, shown in percent; else it is shown as it is."""
    higher_is_better: bool


@dataclass(frozen=True, kw_only=True)
class Run:
    """One results file or training run."""

    name: str
    path: Path
    columns: Mapping[str, Column]
    scores: Mapping[str, Score]
    """Column key -> score."""
    averages: Sequence[Mapping[str, Any]] = ()
    """As in the results file."""
    hashes: frozenset[str] = frozenset()
    """Of its weights: all of them, and a sample."""
    made_from: tuple[str, ...] = ()
    """Hashes of what it was made from, of either kind."""
    verb: str | None = None
    kept: int | None = None
    """Routed experts per layer that are used, where that is one number."""
    experts: int | None = None
    """Routed experts per layer of the full model."""
    expansions: Sequence[Expansion] = ()
    tokens: int | None = None
    """Training tokens."""
    missing: Mapping[str, str] = field(default_factory=dict)
    """Task -> why it has no score."""
    model: str | None = None
    """Of a results file: what tells models apart, the weights and the selection; None of a training run."""
    is_named: bool = False
    """Whether the user gave the name."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """All runs of a name, in the order given."""

    name: str
    runs: tuple[Run, ...]

    def scores(self, key: str) -> list[Score]:
        """The scores of its runs in a column; empty where one of them has none."""
        found = [run.scores[key] for run in self.runs if key in run.scores]
        return found if len(found) == len(self.runs) else []


def group(runs: Iterable[Run]) -> list[Group]:
    """Groups in the order of their first run."""
    by_name: dict[str, list[Run]] = {}
    for run in runs:
        by_name.setdefault(run.name, []).append(run)
    return [Group(name=name, runs=tuple(found)) for name, found in by_name.items()]


def columns_of(groups: Sequence[Group]) -> dict[str, Column]:
    """Every column that any run has, in the order of the first run that has it."""
    found: dict[str, Column] = {}
    for one in groups:
        for run in one.runs:
            found.update({key: column for key, column in run.columns.items() if key not in found})
    return found


def estimate(scores: Sequence[Score]) -> Interval | None:
    """Over several seeds: their mean with Student's interval. Of one: the normal interval over its questions."""
    if not scores:
        return None
    if len(scores) > 1:
        return mean_interval([score.value for score in scores])
    return around(scores[0].value, scores[0].error)


def around(value: float, error: float | None) -> Interval:
    """The normal interval of an estimate with a standard error; none where that is unknown."""
    if error is None:
        return Interval(value=value, low=None, high=None)
    return Interval(value=value, low=value - _NORMAL * error, high=value + _NORMAL * error)


def difference(ours: Sequence[Score], theirs: Sequence[Score]) -> Interval | None:
    """Ours minus theirs.

    As many seeds of both, and more than one: pairs in their order, Student's t. One of both: over the differences of
    the same questions or documents (`paired`); where those are not known, the errors added in squares, as if the
    questions were different ones, which is too wide rather than too narrow. Else no interval. None where one has no
    score, or they were not measured alike.
    """
    if not ours or not theirs or len({one.condition for one in (*ours, *theirs)}) > 1:
        return None
    values = [one.value for one in ours], [one.value for one in theirs]
    if len(ours) == len(theirs) > 1:
        return mean_interval([mine - other for mine, other in zip(*values, strict=True)])
    if len(ours) == len(theirs) == 1 and (found := paired(ours[0].rows, theirs[0].rows)) is not None:
        return found
    gap = sum(values[0]) / len(ours) - sum(values[1]) / len(theirs)
    errors = [ours[0].error, theirs[0].error]
    if len(ours) == len(theirs) == 1 and None not in errors:
        return around(gap, math.hypot(*(error for error in errors if error is not None)))
    return Interval(value=gap, low=None, high=None)


def disagreements(groups: Sequence[Group], columns: Mapping[str, Column]) -> list[str]:
    """Columns whose runs were not measured in the same way, each with the first two that differ."""
    found = []
    for key, column in columns.items():
        conditions: dict[str, str] = {}
        for one in groups:
            for run in one.runs:
                if key in run.scores:
                    conditions.setdefault(run.scores[key].condition, run.name)
        if len(conditions) > 1:
            first, second = list(conditions.values())[:2]
            found.append(f"{column.title}: {first} and {second} were not measured alike (shots, limit, rows or data)")
    return found


def load_run(reference: str) -> Run:
    """Read `NAME=PATH` or PATH: a results file, or a folder with results.json, metrics.jsonl or both.

    The name is by default that of the folder, or of the file, without a seed at its end (`emo-seed1`, `emo-s1`).

    Raises:
        MoesaicError: there is nothing to compare at the path, or it is damaged.
    """
    name, equals, text = reference.partition("=")
    named = bool(equals) and not Path(reference).exists()
    path = Path(text if named else reference).expanduser()
    name = (named and name) or _default_name(path)
    if path.is_file():
        return replace(_from_results(path, name), is_named=named)
    if not path.is_dir():
        raise MoesaicError(f"{path}: no such results file or folder of a training run")
    results, metrics = path / RESULTS_FILE, path / METRICS_FILE
    if not results.exists() and not metrics.exists():
        raise MoesaicError(
            f"{path}: has neither {RESULTS_FILE} (of `moesaic eval`) nor {METRICS_FILE} (of `moesaic train`)"
        )
    if not metrics.exists():
        return _from_results(results, name)
    trained = _from_metrics(path, name)
    return _joined(_from_results(results, name), trained) if results.exists() else trained


def _default_name(path: Path) -> str:
    stem = path.name.removesuffix(".json").removesuffix(".results")
    if stem == "results":
        stem = path.absolute().parent.name
    return _SEED.sub("", stem) or stem


def _from_results(path: Path, name: str) -> Run:
    document = read_results(path)
    columns: dict[str, Column] = {}
    scores: dict[str, Score] = {}
    for task, entry in document["tasks"].items():
        condition = _condition(document["settings"], entry)
        if not is_measured(entry["score"]):
            warn(f"{path}: has no score of {task} ({entry.get('not_finite') or 'it is null'})")
        for column, score in _scores(task, entry, condition):
            columns[column.key], scores[column.key] = column, score
    checkpoint = document["checkpoint"]
    kept, experts = _kept(document)
    return Run(
        name=name,
        path=path,
        columns=columns,
        scores=scores,
        averages=document["averages"],
        hashes=frozenset({checkpoint["weights_hash"], checkpoint["sample_hash"]}),
        made_from=tuple(checkpoint["made_from"]),
        verb=checkpoint["verb"],
        kept=kept,
        experts=experts,
        missing=document["missing"] | _without_score(document["tasks"]),
        model=_model(document),
    )


def _model(document: Mapping[str, Any]) -> str:
    """What tells models apart: the weights, and the selections of experts that are used."""
    selections = {str((entry.get("selection") or {}).get("hash")) for entry in document["tasks"].values()}
    return " ".join([document["checkpoint"]["weights_hash"], *sorted(selections)])


def _without_score(tasks: Mapping[str, Any]) -> dict[str, str]:
    reason = "its numbers are not finite, so there is no score"
    return {task: entry.get("not_finite") or reason for task, entry in tasks.items() if not is_measured(entry["score"])}


def _condition(settings: Mapping[str, Any], entry: Mapping[str, Any]) -> str:
    """What must agree for two scores to be of the same thing. The selection is what is compared, so it's left out."""
    identity = {key: value for key, value in entry["identity"].items() if key != "selection"}
    parts = {"limit": settings["limit"], "seed": settings["seed"], "metric": entry["metric"], **identity}
    return json.dumps(parts | {"rows": entry["samples"]}, sort_keys=True)


def _scores(task: str, entry: Mapping[str, Any], condition: str) -> Iterator[tuple[Column, Score]]:
    if not is_measured(entry["score"]) and "text" not in entry:
        return
    if "text" not in entry:
        column = Column(key=task, title=entry["title"], percent=True, higher_is_better=entry["higher_is_better"])
        yield (
            column,
            Score(
                value=entry["score"],
                error=entry["standard_error"],
                samples=entry["samples"],
                condition=condition,
                rows=rows_of_task(entry),
            ),
        )
        return
    for domain, found in {"all": entry["text"]["all"], **entry["text"]["domains"]}.items():
        for key, error, title in (
            ("bits_per_byte", "bits_per_byte_error", "bpb"),
            ("loss", "standard_error", "text loss"),
        ):
            if not is_measured(found[key]):
                continue
            yield (
                Column(key=f"{key}:{domain}", title=f"{title} {domain}", percent=False, higher_is_better=False),
                Score(
                    value=found[key],
                    error=found[error],
                    samples=found["documents"],
                    condition=condition,
                    rows=rows_of_text(entry, domain, key),
                ),
            )


def _kept(document: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Experts that are used and that there are, of an extracted checkpoint or under selections of one size."""
    experts = document["checkpoint"]["experts"]
    selections = [entry["selection"] for entry in document["tasks"].values() if entry.get("selection")]
    sizes = {json.dumps(one["kept"]) for one in selections}
    if experts is None:
        return None, None
    if selections:
        kept = selections[0]["kept"]
        return (kept if len(sizes) == 1 and isinstance(kept, int) else None), experts["of"]
    return experts["kept"], experts["of"]


def _from_metrics(folder: Path, name: str) -> Run:
    columns: dict[str, Column] = {}
    scores: dict[str, Score] = {}
    lines, unknown = list(read_metrics(folder / METRICS_FILE)), list[str]()
    for line in lines:
        if isinstance(line, Validation):
            columns, scores = _losses(line.validation)
            unknown = [domain for domain, one in line.validation.items() if not is_measured(one.loss)]
    if unknown:
        warn(f"{folder}: the last held-out loss of {', '.join(unknown)} is not finite, so there is no mean of them")
    record = (read_provenance(folder) or {}) if (folder / PROVENANCE_FILE).exists() else {}
    return Run(
        name=name,
        path=folder,
        columns=columns,
        scores=scores,
        hashes=frozenset(filter(None, [record.get("weights_hash")])),
        made_from=tuple(one["weights_hash"] for one in record.get("sources") or [] if one.get("weights_hash")),
        verb=record.get("verb"),
        expansions=tuple(line for line in lines if isinstance(line, Expansion)),
        tokens=max((line.tokens for line in lines), default=0),
    )


def _losses(validation: Mapping[str, HeldOut]) -> tuple[dict[str, Column], dict[str, Score]]:
    """Held-out loss by domain, and its mean over the domains."""
    measured = {domain: found for domain, found in validation.items() if is_measured(found.loss)}
    scores = {
        f"loss:{domain}": Score(
            value=found.loss,
            error=found.standard_error,
            samples=found.documents,
            condition=f"{found.documents} documents, {found.tokens} tokens of {domain}",
        )
        for domain, found in measured.items()
    }
    titles = {f"loss:{domain}": f"loss {domain}" for domain in validation}
    if len(scores) > 1 and len(measured) == len(validation):
        errors = [score.error for score in scores.values()]
        known = [error for error in errors if error is not None]
        titles[_MEAN] = "mean loss"
        scores[_MEAN] = Score(
            value=sum(score.value for score in scores.values()) / len(scores),
            error=sum(error**2 for error in known) ** 0.5 / len(errors) if len(known) == len(errors) else None,
            samples=sum(score.samples for score in scores.values()),
            condition="; ".join(score.condition for score in scores.values()),
        )
    columns = {
        key: Column(key=key, title=title, percent=False, higher_is_better=False) for key, title in titles.items()
    }
    return columns, scores


def _joined(results: Run, trained: Run) -> Run:
    """A training run and the evaluation of what it made."""
    return replace(
        results,
        path=trained.path,
        columns={**trained.columns, **results.columns},
        scores={**trained.scores, **results.scores},
        expansions=trained.expansions,
        tokens=trained.tokens,
    )
