"""The verb `upcycle` as a function of the public API, with keywords in place of flags."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesaic.common.errors import MoesaicError
from moesaic.common.recipe import load_recipe
from moesaic.common.workers import check_workers
from moesaic.upcycling.recipe import MethodName, UpcycleRecipe

if TYPE_CHECKING:
    from moesaic.upcycling.run import UpcycleResult


def upcycle(
    base: str | Path,
    out: str | Path,
    *,
    method: MethodName,
    specialists: Mapping[str, str | Path] | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    quiet: bool = True,
    workers: int | None = None,
    **settings: Any,
) -> "UpcycleResult":
    """Turn a dense checkpoint, or a base and its specialists, into a mixture-of-experts checkpoint.

    Args:
        base: the dense checkpoint: folder, or hub id `org/name[@revision]`.
        out: folder to write.
        method: scratch, sparse, drop, virtual_group, btx or divmoe.
        specialists: short name -> folder or hub id, in the order of their experts (btx and divmoe only).
        overwrite: replace `out` if it exists.
        dry_run: check everything, write nothing.
        quiet: print no progress and no notices.
        workers: threads; the result does not depend on it. Default: one per core, at most 8.
        settings: the other keys of `moesaic.upcycling.recipe.UpcycleRecipe`, such as `shards=2, top_k=2, seed=0`.

    Raises:
        MoesaicError: anything in the sources or settings that does not fit, before anything is written.
    """
    from moesaic.upcycling import run

    if specialists is not None and not isinstance(specialists, Mapping):
        raise MoesaicError(
            f"upcycle(): specialists: expected short names and folders, such as {{'math': './math'}}, "
            f"got {specialists!r}"
        )
    sources = [{"name": name, "path": str(path)} for name, path in (specialists or {}).items()]
    values = {"base": str(base), "method": method, "specialists": sources, **settings}
    recipe = load_recipe(UpcycleRecipe, values, name="upcycle()")
    return run.upcycle(
        recipe, Path(out), overwrite=overwrite, dry_run=dry_run, quiet=quiet, workers=check_workers(workers)
    )
