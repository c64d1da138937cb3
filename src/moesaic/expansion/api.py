"""The verb `expand` as a function of the public API, with keywords in place of flags."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesaic.common.recipe import load_recipe
from moesaic.common.workers import check_workers
from moesaic.expansion.recipe import ExpandRecipe

if TYPE_CHECKING:
    from moesaic.expansion.result import ExpandResult


def expand(
    checkpoint: str | Path,
    out: str | Path,
    *,
    experts: int,
    overwrite: bool = False,
    dry_run: bool = False,
    quiet: bool = True,
    workers: int | None = None,
    **settings: Any,
) -> "ExpandResult":
    """Grow the routed experts of an MoE checkpoint by copies of those it has.

    Args:
        checkpoint: folder, or hub id `org/name[@revision]`.
        out: folder to write.
        experts: routed experts per layer of the result.
        overwrite: replace `out` if it exists.
        dry_run: check everything, write nothing, run no model.
        quiet: print no progress and no notices.
        workers: threads; the result does not depend on it. Default: one per core, at most 8.
        settings: the other keys of `moesaic.expansion.recipe.ExpandRecipe`, such as `calibration=["a.jsonl"], cap=2`.

    Raises:
        MoesaicError: anything in the checkpoint or settings that does not fit, before anything is written.
    """
    from moesaic.expansion import run

    values = {"checkpoint": str(checkpoint), "experts": experts, **settings}
    recipe = load_recipe(ExpandRecipe, values, name="expand()")
    threads = check_workers(workers)
    return run.expand(recipe, out, overwrite=overwrite, dry_run=dry_run, quiet=quiet, workers=threads)
