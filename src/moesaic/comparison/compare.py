"""The verb `compare`, and its tables: scores, differences, gap closure, loss jumps, before and after, retention.

Torch-free.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moesaic.checkpoint.results import mean_error
from moesaic.common.errors import MoesaicError, suggest
from moesaic.common.intervals import Interval, gap_closure
from moesaic.common.shown import Shown
from moesaic.common.verbs import verb
from moesaic.comparison.models import one_for_each_model
from moesaic.comparison.recipe import CompareRecipe
from moesaic.comparison.runs import (
    Column,
    Group,
    Run,
    Score,
    columns_of,
    difference,
    disagreements,
    estimate,
    group,
    load_run,
)
from moesaic.comparison.tables import Format, Heading, Row, Table, cells, render, render_html, to_json

_INTERVALS = (
    "±: 95% interval; of one run over its questions or documents (normal), of several over the seeds (Student's t)"
)


@dataclass(frozen=True, kw_only=True, repr=False)
class Comparison(Shown):
    """The tables over some runs."""

    tables: tuple[Table, ...]

    def lines(self, form: Format = "table", *, bold: bool = False, room: int | None = None) -> list[str]:
        """The tables in a format; `bold` marks the best as a terminal does, and text is folded to lines of `room`."""
        return render(self.tables, form, bold=bold, room=room)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return to_json(self.tables)

    def brief(self) -> str:
        """What there is."""
        return ", ".join(f"{one.title} ({len(one.rows)} x {len(one.headings)})" for one in self.tables)

    def rows(self) -> list[dict[str, Any]]:
        """A row per cell, as in the CSV."""
        return cells(self.tables)

    def _repr_html_(self) -> str:
        return render_html(self.tables)


@verb(CompareRecipe, positional=("runs",))
def compare(recipe: CompareRecipe) -> Comparison:
    """Put results of `moesaic eval` and training runs side by side.

    Returns:
        Tables of scores and differences, and, where the runs have it: gap closure, loss jumps at expansions, before and
        after training, retention with fewer experts.

    Raises:
        MoesaicError: a path with nothing to compare, a name that no run has, runs that were not measured alike.
    """
    if not recipe.runs:
        raise MoesaicError("compare: give at least one results file or training run")
    groups = group(one_for_each_model(load_run(reference) for reference in recipe.runs))
    baseline = None if recipe.baseline is None else _named(groups, recipe.baseline, "--baseline")
    tables: list[Table | None] = [*_score_tables(groups, baseline)]
    if recipe.gap is not None:
        tables.append(_gap_table(*(_named(groups, name, "--gap-closure") for name in recipe.gap)))
    tables += [_jump_table(groups), _tuning_table(groups), _retention_table(groups)]
    return Comparison(tables=tuple(table for table in tables if table is not None))


def _named(groups: Sequence[Group], name: str, flag: str) -> Group:
    by_name = {one.name: one for one in groups}
    if name not in by_name:
        raise MoesaicError(f"{flag} {name}: no run has that name; {suggest(name, by_name)}")
    return by_name[name]


@dataclass(frozen=True, kw_only=True)
class _Average:
    """An average over the tasks that all runs that have it share."""

    column: Column
    over: tuple[str, ...]
    note: str


def _score_tables(groups: Sequence[Group], baseline: Group | None) -> list[Table]:
    """Every run in every column and average, the best marked; then, with a baseline, every other run minus that."""
    columns = columns_of(groups)
    averages = _averages(groups, columns)
    every = (*columns.values(), *(one.column for one in averages))
    scores = {
        one.name: [*map(one.scores, columns), *(_average_scores(one, average.over) for average in averages)]
        for one in groups
    }
    tables = [
        Table(
            title="Scores",
            headings=_headings(every, mark=True),
            rows=tuple(Row(name=_label(one), cells=tuple(map(estimate, scores[one.name]))) for one in groups),
            notes=(
                _INTERVALS,
                *(one.note for one in averages),
                *_missing(groups),
                *_empty(groups, columns),
                *disagreements(groups, columns),
            ),
        )
    ]
    if baseline is not None:
        theirs, others = scores[baseline.name], [one for one in groups if one is not baseline]
        tables.append(
            Table(
                title=f"Difference to {baseline.name}",
                headings=_headings(every, signed=True),
                rows=tuple(
                    Row(name=_label(one), cells=tuple(map(difference, scores[one.name], theirs))) for one in others
                ),
                notes=(_differences(groups),),
            )
        )
    return tables


def _average_scores(one: Group, over: Sequence[str]) -> list[Score]:
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
                rows=tuple(part for score in scores for part in score.rows) if all(s.rows for s in scores) else (),
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


def _headings(columns: Iterable[Column], *, signed: bool = False, mark: bool = False) -> tuple[Heading, ...]:
    """A heading for each column; `mark`: with its best value marked."""
    return tuple(
        Heading(
            title=column.title,
            percent=column.percent,
            signed=signed,
            best=("high" if column.higher_is_better else "low") if mark else None,
        )
        for column in columns
    )


def _label(one: Group) -> str:
    return one.name if len(one.runs) == 1 else f"{one.name} ({len(one.runs)} seeds)"


def _missing(groups: Sequence[Group]) -> list[str]:
    return [f"{run.name}: {task} is missing: {reason}" for run in _runs(groups) for task, reason in run.missing.items()]


def _empty(groups: Sequence[Group], columns: Mapping[str, Column]) -> list[str]:
    """Why cells are empty: for each run, the columns that it has no number in and that nothing was said of."""
    notes = []
    for one in groups:
        lacking = [
            column.title
            for key, column in columns.items()
            if not one.scores(key)
            and not any(key.rpartition(":")[2] in run.missing or key in run.missing for run in one.runs)
        ]
        if lacking:
            some = "" if len(one.runs) == 1 else " in all of its seeds"
            notes.append(f"{one.name}: not measured{some}: {', '.join(lacking)}")
    return notes


def _differences(groups: Sequence[Group]) -> str:
    """How the intervals of differences were made."""
    if any(len(one.runs) > 1 for one in groups):
        return "with as many seeds as the baseline: over pairs of seeds in the order given"
    rows = [bool(score.rows) for one in groups for run in one.runs for score in run.scores.values()]
    if all(rows):
        return "paired: over the differences of the same questions or documents"
    unpaired = "the two errors added in squares, which is rather too wide"
    if not any(rows):
        return f"not paired, because the results do not have the rows: {unpaired}"
    return f"paired where the results have the same rows; else {unpaired}"


def _gap_table(small: Group, upcycled: Group, large: Group) -> Table:
    """`(L_E - L_up) / (L_E - L_mE)` of three runs, for every held-out loss that they share and measured alike.

    Raises:
        MoesaicError: they share none, measured none alike, or have different numbers of seeds.
    """
    trio = (small, upcycled, large)
    if len({len(one.runs) for one in trio}) > 1:
        counts = ", ".join(f"{one.name} has {len(one.runs)}" for one in trio)
        raise MoesaicError(f"--gap-closure: the three need the same seeds, in the same order; {counts}")
    shared = {
        key: column
        for key, column in columns_of(trio).items()
        if key.startswith("loss:") and all(one.scores(key) for one in trio)
    }
    if not shared:
        raise MoesaicError(
            f"--gap-closure: {small.name}, {upcycled.name} and {large.name} have no held-out loss in common"
        )
    odd = disagreements(trio, shared)
    alike = {key: column for key, column in shared.items() if not disagreements(trio, {key: column})}
    if not alike:
        raise MoesaicError(f"--gap-closure: {odd[0]}; measure all three on the same documents")
    rows = []
    for key, column in alike.items():
        found = gap_closure(*([score.value for score in one.scores(key)] for one in trio))
        closure = found.closure or ("one seed" if len(small.runs) == 1 else "gap includes 0")
        rows.append(Row(name=column.title, cells=(found.gap, found.gain, closure)))
    budgets = sorted({run.tokens for one in trio for run in one.runs if run.tokens})
    notes = [
        "closure only where the 95% interval of the gap excludes 0; its interval is Fieller's, over pairs of seeds",
        *(f"{one}: left out" for one in odd),
    ]
    if len(budgets) > 1:
        notes.append(f"the runs saw different numbers of tokens ({', '.join(f'{one:,}' for one in budgets)})")
    return Table(
        title=f"Gap closure of {upcycled.name} between {small.name} and {large.name}",
        headings=(
            Heading(title="gap L_E - L_mE", signed=True),
            Heading(title="gain L_E - L_up", signed=True),
            Heading(title="closure %", percent=True),
        ),
        rows=tuple(rows),
        notes=tuple(notes),
    )


def _jump_table(groups: Sequence[Group]) -> Table | None:
    """Held-out loss just before and right after every expansion; None where no run has one."""
    rows = []
    for one in groups:
        for number, run in enumerate(one.runs, start=1):
            name = run.name if len(one.runs) == 1 else f"{run.name} seed {number}"
            rows += _jumps(name, run)
    if not rows:
        return None
    titles = ("before", "after", "jump")
    return Table(
        title="Loss jump at an expansion",
        headings=tuple(Heading(title=title, signed=title == "jump") for title in titles),
        rows=tuple(rows),
        notes=("interval of the jump: over the differences of the same documents",),
    )


def _jumps(name: str, run: Run) -> list[Row]:
    rows = []
    for expansion in run.expansions:
        grown = f"{name}, step {expansion.step:,}, {expansion.experts_before} to {expansion.experts} experts"
        for domain, losses in expansion.losses.items():
            before, after = (Interval(value=one.loss, low=None, high=None) for one in (losses.before, losses.after))
            rows.append(Row(name=f"{grown}, {domain}", cells=(before, after, losses.jump)))
    return rows


def _tuning_table(groups: Sequence[Group]) -> Table | None:
    """Each run that was trained from another one, minus that one; None where there is no such pair."""
    columns, rows = columns_of(groups), []
    for after in groups:
        for before in groups:
            if after is not before and _trained_from(after, before):
                cells = tuple(difference(after.scores(key), before.scores(key)) for key in columns)
                rows.append(Row(name=f"{before.name} -> {after.name}", cells=cells))
    if not rows:
        return None
    return Table(
        title="After training, minus before",
        headings=_headings(columns.values(), signed=True),
        rows=tuple(rows),
        notes=("pairs by the hash of the weights that the training began with",),
    )


def _trained_from(after: Group, before: Group) -> bool:
    hashes = _hashes(before)
    return all(run.verb == "train" and hashes & {*run.made_from} for run in after.runs)


def _retention_table(groups: Sequence[Group]) -> Table | None:
    """Scores of subsets of the experts against their full model; None where there are no two sizes of one model.

    A subset belongs to a full model by its weights (`eval --selection`) or by its parent's (`extract`, `train`).
    """
    runs = {digest: run for one in groups for run in one.runs for digest in run.hashes}
    full = [one for one in groups if all(run.kept is not None and run.kept == run.experts for run in one.runs)]
    columns, rows = columns_of(groups), []
    for whole in full:
        subsets = [one for one in groups if one is not whole and _is_subset(one, whole, runs)]
        for one in sorted(subsets, key=lambda one: -(one.runs[0].kept or 0)):
            kept, experts = one.runs[0].kept or 0, one.runs[0].experts or 1
            name = f"{one.name}: {kept} of {experts} ({100 * kept / experts:.3g}%) of {whole.name}"
            cells = []
            for key in columns:
                cells += [estimate(one.scores(key)), difference(one.scores(key), whole.scores(key))]
            rows.append(Row(name=name, cells=tuple(cells)))
    if not rows:
        return None
    headings = []
    for column in columns.values():
        headings += [_headings([column])[0], Heading(title="lost", percent=column.percent, signed=True)]
    return Table(
        title="Retention with fewer experts",
        headings=tuple(headings),
        rows=tuple(rows),
        notes=("lost: the subset's score minus the full model's",),
    )


def _hashes(one: Group) -> set[str]:
    return {digest for run in one.runs for digest in run.hashes}


def _is_subset(one: Group, whole: Group, runs: dict[str, Run]) -> bool:
    return all(
        run.kept is not None
        and run.experts is not None
        and run.kept < run.experts
        and not _hashes(whole).isdisjoint(_ancestors(run, runs))
        for run in one.runs
    )


def _ancestors(run: Run, runs: dict[str, Run]) -> set[str]:
    """Hashes of the weights of a run and of what it was made from, as far as the given runs tell."""
    found: set[str] = set()
    ahead = [*run.hashes, *run.made_from]
    while ahead:
        digest = ahead.pop()
        if digest not in found:
            found.add(digest)
            ahead += [*runs[digest].hashes, *runs[digest].made_from] if digest in runs else []
    return found
