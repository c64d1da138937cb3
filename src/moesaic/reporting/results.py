"""Results of evaluations for the page's tables and plots."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moesaic.checkpoint.results import read_results
from moesaic.common.errors import MoesaicError

_OF_A_TASK = (
    "title",
    "metric",
    "higher_is_better",
    "score",
    "standard_error",
    "shots",
    "samples",
    "chance",
    "parts",
    "missing_parts",
    "text",
)


def results_payload(path: Path) -> dict[str, Any]:
    """One results file, without what only a repetition needs.

    Raises:
        MoesaicError: not a results file, or a damaged one.
    """
    document = read_results(path)
    checkpoint = document["checkpoint"]
    try:
        return {
            "file": str(path),
            "checkpoint": {key: checkpoint[key] for key in ("name", "revision", "model_type")},
            "model": checkpoint["full_model"],
            "settings": document["settings"],
            "suites": document["suites"],
            "tasks": {name: _task(task, checkpoint) for name, task in document["tasks"].items()},
            "missing": document["missing"],
            "averages": document["averages"],
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise MoesaicError(f"{path}: damaged results file ({error}); evaluate again") from error


def _task(task: Mapping[str, Any], checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    return {key: task.get(key) for key in _OF_A_TASK} | {"kept": _kept_share(task.get("selection"), checkpoint)}


def _kept_share(selection: Mapping[str, Any] | None, checkpoint: Mapping[str, Any]) -> float | None:
    """Share of the full model's routed experts that were used; None of a dense model."""
    experts = checkpoint["experts"]
    if experts is None:
        return None
    share = experts["kept"] / experts["of"]
    if selection is None:
        return share
    kept = selection["kept"]
    mean = sum(kept) / len(kept) if isinstance(kept, list) else kept
    return share * mean / selection["of"]
