"""The verb `report`: one HTML file about inspections, training runs and evaluations. Reads everything, then writes."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from moesaic.analysis.format import is_inspection, read_inspection
from moesaic.analysis.inspection import Inspection
from moesaic.common.errors import MoesaicError
from moesaic.common.files import write_file
from moesaic.common.shown import Shown
from moesaic.common.verbs import verb
from moesaic.reporting.page import render, size
from moesaic.reporting.payload import (
    METRICS_FILE,
    inspected_models,
    model_payload,
    read_run,
    reader_payload,
    results_payload,
)
from moesaic.reporting.recipe import ReportRecipe

Kind = Literal["inspection", "run", "results"]

DATA_LIMIT = 12_500_000
"""Bytes of data in a page: with Plotly and the page itself below 15 MB."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """One input."""

    kind: Kind
    path: Path
    name: str
    """Short name on the page; different for all inputs of a kind."""


@dataclass(frozen=True, kw_only=True, repr=False)
class ReportResult(Shown):
    """What was written."""

    out: Path
    bytes: int
    models: tuple[str, ...]
    runs: tuple[str, ...]
    results: tuple[str, ...]
    tokens: int
    """Tokens that the statistics are over, all models together."""
    reader_layers: tuple[tuple[int, int], ...]
    """Per model, layers that the reader has and MoE layers of the model."""

    def lines(self) -> list[str]:
        """What was written, for people."""
        parts = [
            f"{len(names)} {word}{'' if len(names) == 1 else 's'}"
            for names, word in ((self.models, "model"), (self.runs, "run"), (self.results, "evaluation"))
            if names
        ]
        lines = [f"{self.out}: {self.bytes / 1e6:.1f} MB, {', '.join(parts)}"]
        for name, (kept, of) in zip(self.models, self.reader_layers, strict=True):
            if kept < of:
                lines.append(f"{name}: the reader shows {kept} of {of} layers, so that the file stays below 15 MB")
        return lines

    def to_dict(self) -> dict[str, Any]:
        """What was written, as plain values."""
        return vars(self) | {"out": str(self.out)}


@verb(ReportRecipe, positional=("inputs",), out="file", convert={"inputs": lambda inputs: tuple(map(str, inputs))})
def report(recipe: ReportRecipe, out: str | Path, *, overwrite: bool = False) -> ReportResult:
    """Write one HTML file about inspections, training runs and evaluations.

    Raises:
        MoesaicError: an input that is none of these or is damaged, a target that exists or cannot be written.
    """
    target = _target(out, overwrite)
    sources = find_sources(recipe.inputs)
    inspections = _inspections([source for source in sources if source.kind == "inspection"])
    payload: dict[str, Any] = {
        "models": [model_payload(inspection, name) for name, inspection in inspections.items()],
        "runs": [read_run(source.path, source.name) for source in sources if source.kind == "run"],
        "results": _results([source for source in sources if source.kind == "results"]),
    }
    names = [part["name"] for kind in ("models", "runs", "results") for part in payload[kind]]
    payload["title"] = recipe.title or title_of(names)
    for_each = (DATA_LIMIT - size(payload)) // max(1, len(inspections))
    for model, inspection in zip(payload["models"], inspections.values(), strict=True):
        model["reader"] = reader_payload(inspection.reader, for_each)
    page = render(payload, payload["title"]).encode("utf-8", "replace")  # a title may be what a shell made of bytes
    write_file(target, page)
    return ReportResult(
        out=target,
        bytes=len(page),
        models=tuple(inspections),
        runs=tuple(run["name"] for run in payload["runs"]),
        results=tuple(result["name"] for result in payload["results"]),
        tokens=sum(inspection.data.tokens for inspection in inspections.values()),
        reader_layers=tuple((len(one["reader"]["layers"]), len(one["model"]["layers"])) for one in payload["models"]),
    )


def title_of(names: Sequence[str]) -> str:
    """A title that a tab and a phone have room for.

    >>> title_of(["emo", "standard", "emo", "emo-half", "emo-quarter"])
    'Report on emo, standard and 2 more'
    """
    first, *rest = dict.fromkeys(names)
    if len(rest) > 2:
        return f"Report on {first}, {rest[0]} and {len(rest) - 1} more"
    return "Report on " + " and ".join([", ".join([first, *rest[:-1]]), *rest[-1:]])


def _inspections(sources: Sequence[Source]) -> dict[str, Inspection]:
    """All models by the names that the page gives them: those of the checkpoints, told apart where they are equal."""
    found = [(source, model) for source in sources for model in inspected_models(read_inspection(source.path))]
    names = _told_apart([model.model.name for _, model in found], [source for source, _ in found])
    return {name: model for name, (_, model) in zip(names, found, strict=True)}


def _results(sources: Sequence[Source]) -> list[dict[str, Any]]:
    found = [results_payload(source.path) for source in sources]
    names = _told_apart([result["checkpoint"]["name"] for result in found], sources)
    return [{"name": name, **result} for name, result in zip(names, found, strict=True)]


def _told_apart(checkpoints: Sequence[str], sources: Sequence[Source]) -> list[str]:
    """Short names of checkpoints; those that are there more than once with the name of the input, and a number."""
    names = short_names([Path(checkpoint) for checkpoint in dict.fromkeys(checkpoints)])
    short = dict(zip(dict.fromkeys(checkpoints), names, strict=True))
    uses = Counter(checkpoints)
    wanted = [
        short[checkpoint] if uses[checkpoint] == 1 else f"{short[checkpoint]} ({source.name})"
        for checkpoint, source in zip(checkpoints, sources, strict=True)
    ]
    earlier = [wanted[:place].count(name) for place, name in enumerate(wanted)]
    return [name if count == 0 else f"{name}, {count + 1}" for name, count in zip(wanted, earlier, strict=True)]


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


def _target(out: str | Path, overwrite: bool) -> Path:
    path = Path(out)
    if path.suffix.lower() not in (".html", ".htm"):
        raise MoesaicError(f"{path}: the report is one HTML file; end its name with .html, after the inputs")
    if path.exists() and not overwrite:
        raise MoesaicError(f"{path}: exists; choose another name, or pass --overwrite to replace it")
    parent = path.absolute().parent
    if not parent.is_dir():
        raise MoesaicError(f"{path}: there is no folder {parent}; make it first")
    return path
