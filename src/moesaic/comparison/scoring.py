"""Tables of scores: all runs side by side, and their differences to a baseline. Torch-free."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from moesaic.comparison.groups import Group, columns_of, difference, disagreements, estimate
from moesaic.comparison.runs import Column, Run, Score
from moesaic.comparison.tables import Heading, Row, Table
from moesaic.evaluation.results import mean_error

_INTERVALS = (
    "±: 95% interval; of one run over its questions or documents (normal), of several over the seeds (Student's t)"
)


@dataclass(frozen=True, kw_only=True)
class _Average:
    """An average over the tasks that all runs that have it share."""

    column: Column
    over: tuple[str, ...]
    note: str


def score_table(groups: Sequence[Group]) -> Table:
    """Every run, every column, and the averages; the best of a column is marked."""
    columns = columns_of(groups)
    averages = _averages(groups, columns)
    return Table(
        title="Scores",
        headings=tuple(_heading(column) for column in (*columns.values(), *(one.column for one in averages))),
        rows=tuple(Row(name=_label(one), cells=tuple(map(estimate, _all(one, columns, averages)))) for one in groups),
        notes=(_INTERVALS, *(one.note for one in averages), *_missing(groups), *disagreements(groups, columns)),
    )


def difference_table(groups: Sequence[Group], baseline: Group) -> Table:
    """Every other run minus the baseline; without rows where there is no other run."""
    columns = columns_of(groups)
    averages = _averages(groups, columns)
    theirs = _all(baseline, columns, averages)
    every = (*columns.values(), *(one.column for one in averages))
    return Table(
        title=f"Difference to {baseline.name}",
        headings=tuple(_heading(column, signed=True) for column in every),
        rows=tuple(
            Row(name=_label(one), cells=tuple(map(difference, _all(one, columns, averages), theirs)))
            for one in groups
            if one is not baseline
        ),
        notes=("with as many seeds as the baseline: over pairs of seeds in the order given",),
    )


def _all(one: Group, columns: Iterable[str], averages: Iterable[_Average]) -> list[list[Score]]:
    """The scores of a group in every column, then in every average."""
    return [*(one.scores(key) for key in columns), *(average_scores(one, average.over) for average in averages)]


def average_scores(one: Group, over: Sequence[str]) -> list[Score]:
    """Of each run, the mean over tasks; empty where one of them is missing."""
    found = []
    for run in one.runs:
        scores = [run.scores[key] for key in over if key in run.scores]
        if not scores or len(scores) < len(over):
            return []
        found.append(
            Score(
                value=sum(score.value for score in scores) / len(scores),
                error=mean_error([score.error for score in scores]),
                samples=sum(score.samples for score in scores),
                condition="".join(score.condition for score in scores),
            )
        )
    return found


def _averages(groups: Sequence[Group], columns: Mapping[str, Column]) -> list[_Average]:
    """One for each name of an average in the runs, over the tasks that all runs with it have."""
    names = dict.fromkeys((one["suite"], one["name"]) for run in _runs(groups) for one in run.averages)
    found = []
    for suite, name in names:
        every = [one for run in _runs(groups) for one in run.averages if (one["suite"], one["name"]) == (suite, name)]
        tasks = list(dict.fromkeys(task for one in every for task in (*one["over"], *one["missing"])))
        over = [task for task in tasks if all(task in one["over"] for one in every)]
        if len(over) < 2:
            continue
        partial = sorted({task for one in every for task in one["partial"] if task in over})
        without = [task for task in tasks if task not in over]
        title = name if not without and not partial else f"{name} ({len(over)} of {len(tasks)})"
        note = f"{title}, suite {suite}: over {', '.join(over)}"
        note += f"; without {', '.join(without)}" if without else ""
        note += f"; parts missing in {', '.join(partial)}" if partial else ""
        column = Column(key=f"{suite}:{name}", title=title, percent=True, higher_is_better=True)
        if all(task in columns and columns[task].percent for task in over):
            found.append(_Average(column=column, over=tuple(over), note=note))
    return found


def _runs(groups: Sequence[Group]) -> list[Run]:
    return [run for one in groups for run in one.runs]


def _heading(column: Column, *, signed: bool = False) -> Heading:
    best = "high" if column.higher_is_better else "low"
    return Heading(title=column.title, percent=column.percent, signed=signed, best=None if signed else best)


def _label(one: Group) -> str:
    return one.name if len(one.runs) == 1 else f"{one.name} ({len(one.runs)} seeds)"


def _missing(groups: Sequence[Group]) -> list[str]:
    return [f"{run.name}: {task} is missing: {reason}" for run in _runs(groups) for task, reason in run.missing.items()]
