"""What the inputs of a report are: inspections, training runs, or results of evaluations."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moesaic.analysis.format import is_inspection
from moesaic.common.errors import MoesaicError
from moesaic.reporting.runs import METRICS_FILE

Kind = Literal["inspection", "run", "results"]


@dataclass(frozen=True, kw_only=True)
class Source:
    """One input."""

    kind: Kind
    path: Path
    name: str
    """Short name on the page; different for all inputs of a kind."""


def find_sources(paths: Sequence[str | Path]) -> list[Source]:
    """Say what each input is and give it a name.

    Raises:
        MoesaicError: an input that is missing, that is none of the three, or that is given twice.
    """
    if not paths:
        raise MoesaicError(
            "report: give at least one folder of `moesaic inspect` or `moesaic train`, or results of `moesaic eval`"
        )
    kinds: dict[Path, Kind] = {path: _kind(path) for path in map(Path, paths)}
    if len(kinds) < len(paths):
        twice = next(path for path in map(Path, paths) if list(map(Path, paths)).count(path) > 1)
        raise MoesaicError(f"{twice}: is given twice; give it once")
    names = short_names([path.resolve() for path in kinds])
    return [Source(kind=kind, path=path, name=name) for (path, kind), name in zip(kinds.items(), names, strict=True)]


def short_names(paths: Sequence[Path]) -> list[str]:
    """As many last parts of each path as tell all of them apart."""
    for depth in range(1, 1 + max((len(path.parts) for path in paths), default=0)):
        names = ["/".join(path.parts[-depth:]) or str(path) for path in paths]
        if len(set(names)) == len(names):
            break
    else:
        names = [str(path) for path in paths]
    return names


def _kind(path: Path) -> Kind:
    if not path.exists():
        raise MoesaicError(f"{path}: no such file or folder")
    if path.is_dir():
        if is_inspection(path):
            return "inspection"
        if (path / METRICS_FILE).is_file():
            return "run"
        raise MoesaicError(
            f"{path}: neither a folder of `moesaic inspect` (inspection.json) nor of `moesaic train` ({METRICS_FILE})"
        )
    if path.suffix == ".json":
        return "results"
    raise MoesaicError(
        f"{path}: is a file; report takes folders of `moesaic inspect` and `moesaic train`, and results.json of "
        "`moesaic eval`"
    )
