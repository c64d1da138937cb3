"""Runs of one name are seeds of one thing: their mean, with Student's interval. Torch-free."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from moesaic.common.intervals import LEVEL, Interval, mean_interval
from moesaic.comparison.runs import Column, Run, Score

_NORMAL = NormalDist().inv_cdf(0.5 + LEVEL / 2)


@dataclass(frozen=True, kw_only=True)
class Group:
    """All runs of a name, in the order given."""

    name: str
    runs: tuple[Run, ...]

    def scores(self, key: str) -> list[Score]:
        """The scores of its runs in a column; empty where one of them has none."""
        found = [run.scores[key] for run in self.runs if key in run.scores]
        return found if len(found) == len(self.runs) else []

    def estimate(self, key: str) -> Interval | None:
        """Mean and interval in a column; None where a run has no score there."""
        return estimate(self.scores(key))


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

    As many seeds of both, and more than one: pairs in their order, Student's t. One of both: the errors over questions
    added in squares, as if the questions were different ones, which is too wide rather than too narrow. Else no
    interval. None where one has no score, or they were not measured alike.
    """
    if not ours or not theirs or len({one.condition for one in (*ours, *theirs)}) > 1:
        return None
    values = [one.value for one in ours], [one.value for one in theirs]
    if len(ours) == len(theirs) > 1:
        return mean_interval([mine - other for mine, other in zip(*values, strict=True)])
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
