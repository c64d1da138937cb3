"""`moesaic plan`."""

from typing import Annotated

from cyclopts import Parameter

from moesaic.cli.options import Json, Quiet
from moesaic.cli.output import print_result

NAME = "plan"
USAGE = "Usage: moesaic plan RECIPE|CHECKPOINT [OPTIONS]"
EXAMPLE = """Examples:
  moesaic plan ./moe
  moesaic plan recipe.yaml --json
"""


def command(
    subject: Annotated[
        str,
        Parameter(
            name="RECIPE|CHECKPOINT",
            help="A recipe file (.yaml), a checkpoint folder, or a hub id org/name[@revision].",
        ),
    ],
    /,
    *,
    context: Annotated[
        int, Parameter(help="Sequence length in tokens that FLOPs and the key/value cache are stated for.")
    ] = 4096,
    json: Json = False,
    quiet: Quiet = False,  # noqa: ARG001 (every verb takes it; there is nothing but the result here)
) -> None:
    """Say what a checkpoint is, or what a recipe would make and cost, from headers alone.

    Total and active parameters (with and without embeddings), bytes, FLOPs per token, peak memory, disk, download size
    and expected minutes. Reads no weights and loads no model.
    """
    from moesaic.planning.run import plan

    report = plan(subject, context=context)
    print_result(report.lines(), report.to_dict(), as_json=json)
