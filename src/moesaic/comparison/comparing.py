"""The verb `compare`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moesaic.common.errors import MoesaicError, suggest
from moesaic.comparison.groups import Group, group
from moesaic.comparison.growth import gap_table, jump_table, retention_table, tuning_table
from moesaic.comparison.runs import load_run
from moesaic.comparison.scoring import difference_table, score_table
from moesaic.comparison.tables import Format, Table, render, to_json


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The tables over some runs."""

    tables: tuple[Table, ...]

    def lines(self, form: Format = "table", *, bold: bool = False) -> list[str]:
        """The tables in a format; `bold` marks the best as a terminal does."""
        return render(self.tables, form, bold=bold)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return to_json(self.tables)


def compare(
    runs: Sequence[str],
    *,
    baseline: str | None = None,
    gap: tuple[str, str, str] | None = None,
) -> Comparison:
    """Put results of `moesaic eval` and training runs side by side.

    Args:
        runs: results files, folders of training runs, or both as `NAME=PATH`. Runs of one name are its seeds.
        baseline: name of the run that the others' differences are to.
        gap: names of the small, the upcycled and the large model, for the gap closure of their held-out losses.

    Returns:
        Tables of scores and differences, and, where the runs have it: gap closure, loss jumps at expansions, before and
        after training, retention with fewer experts.

    Raises:
        MoesaicError: a path with nothing to compare, a name that no run has, runs that were not measured alike.
    """
    if not runs:
        raise MoesaicError("compare: give at least one results file or training run")
    groups = group(load_run(reference) for reference in runs)
    tables: list[Table | None] = [score_table(groups)]
    if baseline is not None:
        tables.append(difference_table(groups, _named(groups, baseline, "--baseline")))
    if gap is not None:
        tables.append(gap_table(*(_named(groups, name, "--gap-closure") for name in gap)))
    tables += [jump_table(groups), tuning_table(groups), retention_table(groups)]
    return Comparison(tables=tuple(table for table in tables if table is not None))


def _named(groups: Sequence[Group], name: str, flag: str) -> Group:
    by_name = {one.name: one for one in groups}
    if name not in by_name:
        raise MoesaicError(f"{flag} {name}: no run has that name; {suggest(name, by_name)}")
    return by_name[name]
