"""`moesaic report`."""

from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from moesaic.cli.options import Json, Overwrite, Quiet
from moesaic.cli.output import print_result
from moesaic.common.errors import MoesaicError

if TYPE_CHECKING:
    from moesaic.reporting.api import ReportResult

NAME = "report"
USAGE = "Usage: moesaic report RUN_OR_INSPECT... OUT.html [OPTIONS]"
EXAMPLE = """Examples:
  moesaic report ./inspected report.html
  moesaic report ./emo-inspected ./baseline-inspected ./emo ./baseline results.json report.html
"""


def command(
    *paths: Annotated[
        str,
        Parameter(
            name="RUN_OR_INSPECT OUT",
            help="Folders of `moesaic inspect` and `moesaic train`, results of `moesaic eval`; last the file to write.",
        ),
    ],
    title: Annotated[str | None, Parameter(help="Title of the page [default: the names of its inputs].")] = None,
    overwrite: Overwrite = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write one self-contained HTML file: verdicts, expert load, domains, clusters, texts, learning curves, results.

    It needs no network and no server: open it in a browser, send it to somebody, keep it with the run.
    """
    if len(paths) < 2:
        raise MoesaicError(f"report: expected RUN_OR_INSPECT... OUT.html, got {len(paths)} paths")
    from moesaic.reporting.api import report

    *inputs, out = paths
    result = report(inputs, out, title=title, overwrite=overwrite)
    print_result(() if quiet else _lines(result), _document(result), as_json=json)


def _lines(result: "ReportResult") -> list[str]:
    parts = [
        f"{len(names)} {word}{'' if len(names) == 1 else 's'}"
        for names, word in ((result.models, "model"), (result.runs, "run"), (result.results, "evaluation"))
        if names
    ]
    lines = [f"{result.out}: {result.bytes / 1e6:.1f} MB, {', '.join(parts)}"]
    for name, (kept, of) in zip(result.models, result.reader_layers, strict=True):
        if kept < of:
            lines.append(f"{name}: the reader shows {kept} of {of} layers, so that the file stays below 15 MB")
    return lines


def _document(result: "ReportResult") -> dict[str, Any]:
    return {
        "out": str(result.out),
        "bytes": result.bytes,
        "models": result.models,
        "runs": result.runs,
        "results": result.results,
        "tokens": result.tokens,
        "reader_layers": result.reader_layers,
    }
