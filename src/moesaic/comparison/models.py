"""Several results files of one model as one run. Torch-free."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from moesaic.comparison.runs import Run


def one_for_each_model(runs: Iterable[Run]) -> list[Run]:
    """Results files of one model joined, where no task is in two of them and the user gave no two names."""
    found: list[Run] = []
    for run in runs:
        same = (place for place, other in enumerate(found) if _may_join(other, run))
        if (place := next(same, None)) is None:
            found.append(run)
        else:
            found[place] = _both(found[place], run)
    return found


def _may_join(one: Run, other: Run) -> bool:
    return (
        one.model is not None
        and one.model == other.model
        and (one.name == other.name or not (one.is_named and other.is_named))
        and one.scores.keys().isdisjoint(other.scores)
    )


def _both(one: Run, other: Run) -> Run:
    """A model with the tasks of two results files."""
    scores = {**one.scores, **other.scores}
    averages: dict[tuple[str, str], dict[str, Any]] = {}
    for average in (*one.averages, *other.averages):
        kept = averages.setdefault((average["suite"], average["name"]), dict(average))
        kept["over"] = list(dict.fromkeys([*kept["over"], *average["over"]]))
        kept["missing"] = [task for task in kept["missing"] if task not in kept["over"]]
        kept["partial"] = list(dict.fromkeys([*kept["partial"], *average["partial"]]))
    missing = {**one.missing, **other.missing}
    first = other if other.is_named and not one.is_named else one
    return replace(
        one,
        name=first.name,
        is_named=first.is_named,
        columns={**one.columns, **other.columns},
        scores=scores,
        averages=list(averages.values()),
        missing={task: reason for task, reason in missing.items() if task not in scores},
    )
