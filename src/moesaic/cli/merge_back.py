"""`moesaic merge-back`."""

from typing import Annotated, Any

from cyclopts import Parameter

from moesaic.cli.options import DryRun, Json, Overwrite, Quiet
from moesaic.cli.output import print_result
from moesaic.common.workers import check_workers

NAME = "merge-back"
USAGE = "Usage: moesaic merge-back FULL SUBSET OUT [OPTIONS]"
EXAMPLE = """Examples:
  moesaic merge-back ./moe ./math-experts-tuned ./moe-math
  moesaic merge-back ./moe ./math-experts-tuned ./moe-math --with router,shared --average 0.5
"""


def command(
    full: Annotated[str, Parameter(help="The model that the subset was extracted from: folder or hub id.")],
    subset: Annotated[str, Parameter(help="What `moesaic extract` wrote, trained or not.")],
    out: Annotated[str, Parameter(help="Folder to write.")],
    /,
    *,
    parts: Annotated[
        str,
        Parameter(
            name="--with",
            help="Put back as well, with commas: router (rows of these experts), shared (shared experts), other (all "
            "the rest).",
            show_default=False,
        ),
    ] = "",
    average: Annotated[
        float | None, Parameter(help="Share of the subset in the mean with the full model [default: replace].")
    ] = None,
    allow_nonfinite: Annotated[bool, Parameter(help="Accept NaN and infinity in the weights.")] = False,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    workers: Annotated[int | None, Parameter(help="Threads [default: one per core, at most 8].")] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Put the experts of a fine-tuned subset back to their places in the full model.

    Several subsets go back one after the other; experts that two of them hold need --average.
    """
    from moesaic.selection.merge import merge_back

    chosen: Any = [part.strip() for part in parts.split(",") if part.strip()]
    result = merge_back(
        full,
        subset,
        out,
        parts=chosen,
        average=average,
        allow_nonfinite=allow_nonfinite,
        overwrite=overwrite,
        dry_run=dry_run,
        quiet=quiet,
        workers=check_workers(workers),
    )
    print_result(() if quiet else result.lines(), result.to_dict(), as_json=json)
