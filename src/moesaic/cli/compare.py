"""`moesaic compare`."""

import sys
from typing import Annotated

from cyclopts import Parameter

from moesaic.cli.options import Json
from moesaic.cli.output import print_result
from moesaic.comparison.tables import Format

NAME = "compare"
USAGE = "Usage: moesaic compare [NAME=]RUN... [--baseline NAME] [--format table|md|csv|json]"
EXAMPLE = """Examples:
  moesaic compare emo.results.json standard.results.json --baseline standard
  moesaic compare emo=runs/emo-s0 emo=runs/emo-s1 standard=runs/std-s0 standard=runs/std-s1
  moesaic compare E=runs/e up=runs/up mE=runs/me --gap-closure E up mE --format md
"""


def command(
    *runs: Annotated[
        str,
        Parameter(
            name="RUN", help="Results file or folder of a training run, as NAME=PATH or PATH; seeds share a name."
        ),
    ],
    baseline: Annotated[str | None, Parameter(help="Name of the run that differences are to.")] = None,
    gap_closure: Annotated[
        tuple[str, str, str] | None,
        Parameter(help="Names of the small, the upcycled and the large model.", metavar="SMALL UPCYCLED LARGE"),
    ] = None,
    format: Annotated[Format, Parameter(help="How the tables are written.")] = "table",
    json: Json = False,
) -> None:
    """Put results of evaluations and training runs side by side, with intervals."""
    from moesaic.comparison.compare import compare

    found = compare(runs, baseline=baseline, gap=gap_closure)
    bold = sys.stdout.isatty() and not json
    print_result(found.lines(format, bold=bold), found.to_dict(), as_json=json)
