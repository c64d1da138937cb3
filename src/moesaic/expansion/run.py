"""The expansion: `expand(recipe, out)`."""

import time
from pathlib import Path

from moesaic.checkpoint.output import check_target
from moesaic.checkpoint.rewrite import check_space, rewrite
from moesaic.common.progress import notice
from moesaic.expansion.build import build, parameters
from moesaic.expansion.recipe import ExpandRecipe
from moesaic.expansion.resolve import ExpandPlan, resolve
from moesaic.expansion.result import ExpandResult
from moesaic.expansion.statement import statement
from moesaic.expansion.utility import UtilityTable, find_utilities, needs_model


def expand(
    recipe: ExpandRecipe,
    out: str | Path,
    *,
    overwrite: bool = False,
    dry_run: bool = False,
    quiet: bool = False,
    workers: int | None = None,
) -> ExpandResult:
    """Grow the routed experts of an MoE checkpoint by copies; same family, names and layout.

    Everything that can be refused from headers is refused first. Then utilities are computed where they are asked for,
    and the result is streamed to a hidden folder beside `out`, which is renamed when it is complete and synced. With
    utilities, OUT/utility.json has them, for `--utility-from`.

    Args:
        recipe: what to make.
        out: the folder to write.
        overwrite: replace `out` if it is a checkpoint; it stays intact until the new one is complete.
        dry_run: resolve and check only; nothing is written and no model runs.
        quiet: no progress and no notices.
        workers: threads; default: one per core, at most 8. The bytes written do not depend on it.

    Returns:
        What was made (or would be).

    Raises:
        MoesaicError: a mistake in the recipe or the checkpoint, a layer whose utilities are all 0, a full disk.
    """
    started = time.monotonic()
    recipe.check_utility()
    plan = resolve(recipe)
    check_target(out, overwrite, sources=[plan.checkpoint.path])  # before the model runs
    for line in plan.notices:
        notice(line, quiet=quiet)
    # Sizes do not depend on which experts are copied.
    even = build(plan, _even(plan), {})
    check_space(even, out)
    unknown = dry_run and needs_model(plan)
    table = None if unknown else find_utilities(plan, quiet=quiet)
    for line in table.notices if table else ():
        notice(line, quiet=quiet)
    copies = None if unknown else plan.copies(table.per_layer if table else {})
    if not dry_run:
        assert copies is not None
        texts = {"utility.json": table.text()} if table else {}
        rewrite(build(plan, copies, texts), out, overwrite=overwrite, workers=workers, quiet=quiet)
    total, active = parameters(even.tensors, even.config)
    return ExpandResult(
        out=None if dry_run else Path(out),
        plan=plan,
        copies=copies,
        statement=statement(plan),
        notices=(*plan.notices, *_notices(table)),
        nbytes=even.files.nbytes,
        parameters=total,
        active_parameters=active,
        seconds=time.monotonic() - started,
    )


def _even(plan: ExpandPlan) -> dict[int, list[int]]:
    return plan.copies({})


def _notices(table: UtilityTable | None) -> tuple[str, ...]:
    return table.notices if table else ()
