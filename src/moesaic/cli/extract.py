"""`moesaic extract`."""

from typing import Annotated

from cyclopts import Parameter

from moesaic.cli.options import DryRun, Json, Overwrite, Quiet
from moesaic.cli.output import print_result
from moesaic.common.workers import check_workers

NAME = "extract"
USAGE = "Usage: moesaic extract CHECKPOINT SELECTION.json OUT [OPTIONS]"
EXAMPLE = """Example:
  moesaic extract ./moe math.json ./math-experts
"""


def command(
    checkpoint: Annotated[str, Parameter(help="The full model: folder, or hub id org/name[@revision].")],
    selection: Annotated[str, Parameter(help="What `moesaic select` wrote.")],
    out: Annotated[str, Parameter(help="Folder to write.")],
    /,
    *,
    top_k: Annotated[
        int | None, Parameter(help="Experts that each token uses [default: as the selection says, else as the model].")
    ] = None,
    allow_nonfinite: Annotated[bool, Parameter(help="Accept NaN and infinity in the weights.")] = False,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    workers: Annotated[int | None, Parameter(help="Threads [default: one per core, at most 8].")] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write a standalone checkpoint of the same family with only the selected experts.

    Shared experts and everything outside the experts are kept; moesaic.json records the original ids for merge-back.
    """
    from moesaic.selection.extract import extract

    result = extract(
        checkpoint,
        selection,
        out,
        top_k=top_k,
        allow_nonfinite=allow_nonfinite,
        overwrite=overwrite,
        dry_run=dry_run,
        quiet=quiet,
        workers=check_workers(workers),
    )
    print_result(() if quiet else result.lines(), result.to_dict(), as_json=json)
