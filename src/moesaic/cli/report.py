"""`moesaic report`."""

from typing import Annotated

from cyclopts import Parameter

from moesaic.cli.options import Json, Overwrite, Quiet
from moesaic.cli.output import print_result
from moesaic.common.errors import MoesaicError

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
    from moesaic.reporting.report import report

    *inputs, out = paths
    result = report(inputs, out, title=title, overwrite=overwrite)
    print_result(() if quiet else result.lines, result.to_dict(), as_json=json)
