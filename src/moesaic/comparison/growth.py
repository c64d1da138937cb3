"""Tables about growing and fine-tuning: gap closure, loss jumps, before and after, retention. Torch-free."""

from collections.abc import Iterable, Sequence

from moesaic.common.errors import MoesaicError
from moesaic.common.intervals import Interval, gap_closure
from moesaic.comparison.groups import Group, columns_of, difference, disagreements
from moesaic.comparison.runs import Column, Run
from moesaic.comparison.tables import Heading, Row, Table


def gap_table(small: Group, upcycled: Group, large: Group) -> Table:
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


def jump_table(groups: Sequence[Group]) -> Table | None:
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
        grown = f"{name}, step {expansion['step']:,}, {expansion['experts_before']} to {expansion['experts']} experts"
        for domain, losses in expansion["losses"].items():
            before, after = (Interval(value=losses[when]["loss"], low=None, high=None) for when in ("before", "after"))
            rows.append(Row(name=f"{grown}, {domain}", cells=(before, after, Interval(**losses["jump"]))))
    return rows


def tuning_table(groups: Sequence[Group]) -> Table | None:
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


def retention_table(groups: Sequence[Group]) -> Table | None:
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
                cells += [one.estimate(key), difference(one.scores(key), whole.scores(key))]
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
    hashes = _hashes(whole)
    for run in one.runs:
        smaller = run.kept is not None and run.experts is not None and run.kept < run.experts
        if not smaller or not (hashes & _ancestors(run, runs)):
            return False
    return True


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


def _headings(columns: Iterable[Column], *, signed: bool = False) -> tuple[Heading, ...]:
    return tuple(Heading(title=column.title, percent=column.percent, signed=signed) for column in columns)
