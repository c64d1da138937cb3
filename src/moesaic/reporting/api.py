"""`moesaic report`: read everything, then write one file."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moesaic.analysis.format import read_inspection
from moesaic.analysis.inspection import Inspection
from moesaic.checkpoint.pio import write_file
from moesaic.common.errors import MoesaicError
from moesaic.reporting.inspections import inspected_models, model_payload, reader_payload
from moesaic.reporting.packing import size
from moesaic.reporting.page import render
from moesaic.reporting.results import results_payload
from moesaic.reporting.runs import read_run
from moesaic.reporting.sources import Source, find_sources, short_names

DATA_LIMIT = 12_500_000
"""Bytes of data in a page: with Plotly and the page itself below 15 MB."""


@dataclass(frozen=True, kw_only=True)
class ReportResult:
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


def report(
    inputs: Sequence[str | Path], out: str | Path, *, title: str | None = None, overwrite: bool = False
) -> ReportResult:
    """Write one HTML file about inspections, training runs and evaluations.

    Args:
        inputs: folders of `inspect` and `train`, and results files of `eval`, in the order of the page.
        out: the file to write, `*.html`.
        title: of the page. Default: the names of what it is about.
        overwrite: replace `out` if it exists.

    Raises:
        MoesaicError: an input that is none of these or is damaged, a target that exists or cannot be written.
    """
    target = _target(out, overwrite)
    sources = find_sources(inputs)
    inspections = _inspections([source for source in sources if source.kind == "inspection"])
    payload: dict[str, Any] = {
        "models": [model_payload(inspection, name) for name, inspection in inspections.items()],
        "runs": [read_run(source.path, source.name) for source in sources if source.kind == "run"],
        "results": _results([source for source in sources if source.kind == "results"]),
    }
    names = [part["name"] for kind in ("models", "runs", "results") for part in payload[kind]]
    payload["title"] = title or " · ".join(dict.fromkeys(names))
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


def _target(out: str | Path, overwrite: bool) -> Path:
    path = Path(out)
    if path.suffix.lower() not in (".html", ".htm"):
        raise MoesaicError(f"{path}: the report is one HTML file; end its name with .html, after the inputs")
    if path.is_dir():
        raise MoesaicError(f"{path}: is a folder; name a file")
    if path.exists() and not overwrite:
        raise MoesaicError(f"{path}: exists; choose another name, or pass --overwrite to replace it")
    parent = path.absolute().parent
    if not parent.is_dir():
        raise MoesaicError(f"{path}: there is no folder {parent}; make it first")
    return path
