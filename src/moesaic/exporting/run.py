"""The verb `export`."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from moesaic.checkpoint.output import check_target, scratch_folder
from moesaic.checkpoint.rewrite import check_space, rewrite
from moesaic.common.errors import MoesaicError
from moesaic.common.progress import warn
from moesaic.common.recipe import load_recipe
from moesaic.exporting.plan import ExportPlan, plan_export
from moesaic.exporting.recipe import ExportRecipe
from moesaic.exporting.result import ExportResult, LogitCheck
from moesaic.exporting.view import view_of


def export(
    checkpoint: str | Path,
    out: str | Path,
    *,
    to: str = "auto",
    layout: str = "family",
    dtype: str | None = None,
    check: bool = False,
    text: str | Path | None = None,
    device: str | None = None,
    llama_cpp: str | Path | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    quiet: bool = True,
    workers: int | None = None,
    **settings: Any,
) -> ExportResult:
    """Write the same model as a native family, as our architecture, in another layout or dtype, or as GGUF.

    Args:
        checkpoint: a mixture of experts: folder, or hub id `org/name[@revision]`.
        out: folder to write.
        to: `auto` (the family itself, else the best one that is exactly the model), `moesaic`, a family, or `gguf`.
        layout: `family` (as on the hub), `input`, `per-expert` or `fused`.
        dtype: float32, bfloat16 or float16. Default: the checkpoint's.
        check: run source and result on random and real tokens and compare the logits.
        text: UTF-8 text for the check. Default: docstrings of Python's own library.
        device: where the check runs. Default: cuda if there is one, else cpu.
        llama_cpp: folder of llama.cpp, with its converter (`gguf` only). Default: $MOESAIC_LLAMA_CPP.
        overwrite: replace `out` if it exists.
        dry_run: check everything, write nothing.
        quiet: print no progress and no notices.
        workers: threads; the bytes do not depend on it. Default: one per core, at most 8.
        settings: `shard_size`, `allow_nonfinite`.

    Raises:
        MoesaicError: the model is not exactly the family (every rule that fails is named), a NaN in the source, a full
            disk, a target that exists.
    """
    started = time.monotonic()
    values = {"checkpoint": str(checkpoint), "to": to, "layout": layout, "dtype": dtype, **settings}
    recipe = load_recipe(ExportRecipe, values, name="export()")
    if check and dry_run:
        raise MoesaicError("--check needs the result: leave out --dry-run")
    if check:
        from moesaic.exporting.check import refuse_settings

        refuse_settings(text, device)
    if to == "gguf":
        from moesaic.exporting.gguf import export_gguf

        return export_gguf(
            recipe, Path(out), llama_cpp=llama_cpp, check=check, text=text, device=device, overwrite=overwrite,
            dry_run=dry_run, quiet=quiet, workers=workers,
        )  # fmt: skip
    plan = plan_export(recipe)
    files = plan.rewrite(str(out))
    check_target(out, overwrite, sources=[plan.checkpoint.path])
    check_space(files, out)
    if not quiet:
        for notice in plan.notices:
            warn(notice)
    checks: tuple[LogitCheck, ...] = ()
    if not dry_run:
        rewrite(files, out, overwrite=overwrite, workers=workers, quiet=quiet)
        checks = checked(plan, Path(out), text=text, device=device, quiet=quiet) if check else ()
    return ExportResult(
        out=None if dry_run else Path(out),
        family=plan.family,
        why=plan.why,
        layout=layout,
        nbytes=files.files.nbytes,
        seconds=time.monotonic() - started,
        checks=checks,
        notices=plan.notices,
    )


def checked(
    plan: ExportPlan, out: Path, *, text: str | Path | None, device: str | None, quiet: bool
) -> tuple[LogitCheck, ...]:
    """Compare source and result; a source that transformers cannot run is compared as our architecture."""
    from moesaic.exporting.check import compare_models

    source = plan.checkpoint.path
    if plan.family != plan.checkpoint.config.get("model_type") and not view_of(plan.checkpoint).loads:
        with scratch_folder(out) as folder:
            ours = plan_export(replace(plan.recipe, to="moesaic", layout="family", dtype=None))
            rewrite(ours.rewrite("ours"), folder / "ours", quiet=quiet)
            return tuple(compare_models(folder / "ours", out, text=text, device=device, quiet=quiet))
    return tuple(compare_models(source, out, text=text, device=device, quiet=quiet))
