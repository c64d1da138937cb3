"""results.json: what was measured, on what, with which settings. Torch-free.

Finished tasks are kept by a second call with the same settings; one with others is refused, so no file mixes them.
"""

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from moesaic.checkpoint.headers import load_json
from moesaic.checkpoint.pio import write_file
from moesaic.checkpoint.record import fingerprint, read_provenance, versions
from moesaic.checkpoint.source import Checkpoint, open_checkpoint
from moesaic.common.errors import MoesaicError
from moesaic.evaluation.suites import Average, Suite
from moesaic.families.moe import detect_moe
from moesaic.selection.source import sample_hash

FORMAT = "moesaic-results/1"

_MUST_AGREE = ("settings", "versions")


def new_document(opened: Checkpoint, settings: Mapping[str, Any]) -> dict[str, Any]:
    """A results file without results; reads all of the checkpoint for its hash."""
    record = read_provenance(opened.path) or {}
    sample, lineage = sample_hash(opened), record.get("lineage")
    full_model = lineage[-1]["model"]["sample_hash"] if lineage else sample  # of which this is a subset, or itself
    return {
        "format": FORMAT,
        "checkpoint": {
            "name": opened.name,
            "revision": opened.revision,
            "model_type": opened.config.get("model_type"),
            "weights_hash": fingerprint(opened),
            "sample_hash": sample,
            "verb": record.get("verb"),
            "made_from": _made_from(record),
            "full_model": full_model,
            "experts": _experts(opened, record),
        },
        "settings": dict(settings),
        "versions": versions() | {"lm_eval": version("lm_eval")},
        "suites": {},
        "tasks": {},
        "missing": {},
        "averages": [],
    }


def _made_from(record: Mapping[str, Any]) -> list[str]:
    """Hashes of the checkpoints that one was made from, of the weights or of a sample of them, as far as known."""
    found = [one["model"]["sample_hash"] for one in record.get("lineage") or []]
    for source in record.get("sources") or []:
        if source.get("weights_hash"):
            found.append(source["weights_hash"])
        elif Path(str(source.get("path"))).is_dir():
            with contextlib.suppress(MoesaicError):
                found.append(sample_hash(open_checkpoint(source["path"])))
    return found


def _experts(opened: Checkpoint, record: Mapping[str, Any]) -> dict[str, int] | None:
    """Routed experts per layer, and of how many where the checkpoint is an extracted subset; None of a dense model."""
    try:
        number = detect_moe(opened).num_experts
    except MoesaicError:
        return None
    lineage = record.get("lineage") or []
    return {"kept": number, "of": lineage[-1]["model"]["num_experts"] if lineage else number}


@dataclass(frozen=True, kw_only=True)
class AverageScore:
    """An unweighted mean over tasks."""

    name: str
    score: float | None
    """None where no task of it has a score."""
    standard_error: float | None
    """Of independent tasks: root of the sum of squared errors, over their number; None where one is unknown."""
    over: tuple[str, ...]
    missing: tuple[str, ...]
    """Tasks that belong to it and have no score; it is then not the paper's average."""
    partial: tuple[str, ...]
    """Tasks in it of which only some parts had data."""

    @property
    def complete(self) -> bool:
        """Whether it is over all of its tasks, whole."""
        return not self.missing and not self.partial

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "name": self.name,
            "score": self.score,
            "standard_error": self.standard_error,
            "over": list(self.over),
            "missing": list(self.missing),
            "partial": list(self.partial),
            "complete": self.complete,
        }


def average(rule: Average, suite: Suite, tasks: Mapping[str, Mapping[str, Any]]) -> AverageScore:
    """The mean of a suite's tasks that have a score; says which have none."""
    names = [task.task for task in suite.tasks if task.task not in rule.without]
    over = [name for name in names if name in tasks and tasks[name]["score"] is not None]
    return AverageScore(
        name=rule.name,
        score=sum(tasks[name]["score"] for name in over) / len(over) if over else None,
        standard_error=mean_error([tasks[name]["standard_error"] for name in over]),
        over=tuple(over),
        missing=tuple(name for name in names if name not in over),
        partial=tuple(name for name in over if tasks[name].get("missing_parts")),
    )


def mean_error(errors: Sequence[float | None]) -> float | None:
    """Standard error of the mean of independent scores; None where one of theirs is unknown."""
    known = [error for error in errors if error is not None]
    if not errors or len(known) < len(errors):
        return None
    return math.sqrt(math.fsum(error * error for error in known)) / len(known)


def read_results(path: Path) -> dict[str, Any]:
    """Read a results file; one that is none is a MoesaicError."""
    document = load_json(path)
    if document.get("format") != FORMAT:
        raise MoesaicError(f"{path}: not a results file (format is {document.get('format')!r}, expected {FORMAT!r})")
    for key in ("checkpoint", "settings", "versions", "tasks", "missing", "averages"):
        if not isinstance(document.get(key), list if key == "averages" else dict):
            raise MoesaicError(f"{path}: damaged results file: {key!r} is not there; evaluate again")
    return document


def write_results(path: Path, document: Mapping[str, Any]) -> None:
    """Write a results file in one step: a reader sees the old one or the new one."""
    write_file(path, json.dumps(document, indent=1, allow_nan=False) + "\n")


def refuse_other_settings(path: Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Refuse to add to a results file of another model, other settings or other versions."""
    theirs, ours = old["checkpoint"], new["checkpoint"]
    if theirs["weights_hash"] != ours["weights_hash"]:
        raise MoesaicError(
            f"{path}: has results of {theirs['name']} with other weights (hash {theirs['weights_hash'][:12]}) than "
            f"{ours['name']} has (hash {ours['weights_hash'][:12]}); use another --out, or --overwrite to begin anew"
        )
    for group in _MUST_AGREE:
        for key in sorted({*old[group], *new[group]}):
            before, now = old[group].get(key), new[group].get(key)
            if before != now:
                raise MoesaicError(
                    f"{path}: was measured with {key} {before}, this call has {now}; use another --out, or --overwrite "
                    "to begin anew"
                )


def finite_only(value: Any) -> Any:
    """Plain values with None for every number that JSON does not have: NaN and the infinities."""
    if isinstance(value, dict):
        return {key: finite_only(one) for key, one in value.items()}
    if isinstance(value, list):
        return [finite_only(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def finished(path: Path, old: Mapping[str, Any], name: str, identity: Mapping[str, Any], metric: str) -> bool:
    """Whether a results file has a task already; one of other data, other shots or another metric is refused."""
    if name not in old["tasks"]:
        return False
    entry = old["tasks"][name]
    before, now = {**entry["identity"], "metric": entry["metric"]}, {**identity, "metric": metric}
    for key in sorted({*before, *now}):
        if before.get(key) != now.get(key):
            raise MoesaicError(
                f"{path}: {name} was measured with {key} {_short(before.get(key))}, this call has "
                f"{_short(now.get(key))}; use another --out, or --overwrite to begin anew"
            )
    return True


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
