"""The conversion: `upcycle(recipe, out)`."""

import time
from collections.abc import Sequence
from pathlib import Path

from moesaic.checkpoint.card import write_card
from moesaic.checkpoint.headers import TensorInfo
from moesaic.checkpoint.output import check_target, output_folder, require_disk
from moesaic.checkpoint.pio import explained
from moesaic.checkpoint.provenance import (
    check_side_files,
    copy_side_files,
    write_provenance,
)
from moesaic.checkpoint.rewrite import one_thread_per_job, run_jobs, source_records
from moesaic.checkpoint.scan import scan
from moesaic.checkpoint.writer import CheckpointWriter, Written
from moesaic.common.progress import notice, progress
from moesaic.common.recipe import dump_recipe, recipe_values
from moesaic.common.workers import default_workers
from moesaic.modeling.names import modeling_file
from moesaic.upcycling.card import model_card
from moesaic.upcycling.jobs import jobs
from moesaic.upcycling.layout import UpcyclePlan
from moesaic.upcycling.method import BASE
from moesaic.upcycling.recipe import UpcycleRecipe
from moesaic.upcycling.resolve import resolve
from moesaic.upcycling.result import UNREAD, UpcycleResult, config_text
from moesaic.upcycling.statement import Statement, statement
from moesaic.upcycling.stream import Target

_SMALL_FILES_BYTES = 1 << 20
"""config.json, moesaic.json, recipe, card, code: a generous bound."""

Hashes = list[dict[str, str]]
"""Per source (base first): tensor name -> hash of its bytes."""


def upcycle(
    recipe: UpcycleRecipe,
    out: str | Path,
    *,
    overwrite: bool = False,
    dry_run: bool = False,
    quiet: bool = False,
    workers: int | None = None,
) -> UpcycleResult:
    """Convert a dense checkpoint (and its specialists) to a mixture-of-experts checkpoint.

    Everything that can be refused from headers is refused first; then all sources are read once (NaN, hashes); then the
    result is streamed to a hidden folder beside `out`, which is renamed when it is complete and synced.

    Args:
        recipe: what to make.
        out: the folder to write.
        overwrite: replace `out` if it is a checkpoint; it stays intact until the new one is complete.
        dry_run: resolve and check only; nothing is written.
        quiet: no progress and no notices.
        workers: threads; default: one per core, at most 8. The bytes written do not depend on it.

    Returns:
        What was made (or would be).

    Raises:
        MoesaicError: a mistake in the recipe or the sources, a full disk, a target that exists.
    """
    started = time.monotonic()
    plan = resolve(recipe)
    notices = list(plan.notices)
    for line in notices:
        notice(line, quiet=quiet)
    side_bytes = check_side_files(plan.base.checkpoint)
    folders = [model.checkpoint.path for model in plan.models]
    check_target(out, overwrite, sources=folders)
    require_disk(out, plan.files.nbytes + side_bytes + _SMALL_FILES_BYTES)
    if dry_run:
        promise = statement(plan.layer, identical=len(plan.ffn_sources()) == 1)
        unread = (UNREAD,) if plan.specialists else ()
        return UpcycleResult(out=None, plan=plan, statement=promise, notices=(*plan.notices, *unread), seconds=0.0)
    count = workers or default_workers()
    with (
        output_folder(out, overwrite, sources=folders) as folder,
        one_thread_per_job(),
    ):
        hashes = _check_sources(plan, count, quiet)
        for line in _equal_specialists(plan, hashes):
            notices.append(line)
            notice(line, quiet=quiet)
        promise = statement(plan.layer, identical=_equal_ffns(plan, hashes, plan.ffn_sources()))
        written = _write(plan, folder, count, quiet)
        _write_small_files(plan, folder, hashes, written, promise)
    return UpcycleResult(
        out=Path(out),
        plan=plan,
        statement=promise,
        notices=tuple(notices),
        seconds=time.monotonic() - started,
    )


def _check_sources(plan: UpcyclePlan, workers: int, quiet: bool) -> Hashes:
    """Read everything that goes into the result once: refuse NaN and infinity, and hash.

    Where all experts come from equal FFNs of several sources, the rest is read as well: with the hashes of whole
    checkpoints in the record, `verify` can tell whether the sources are the same model.
    """
    hashes = _scan(plan.used_tensors(), workers, quiet, plan.recipe.allow_nonfinite)
    if not plan.specialists or not _equal_ffns(plan, hashes, plan.expert_sources()):
        return hashes
    pairs = zip(plan.models, hashes, strict=True)
    rest = [[info for name, info in model.checkpoint.tensors.items() if name not in found] for model, found in pairs]
    more = _scan(rest, workers, quiet, allow_nonfinite=True)
    return [first | second for first, second in zip(hashes, more, strict=True)]


def _scan(tensors: list[list[TensorInfo]], workers: int, quiet: bool, allow_nonfinite: bool) -> Hashes:
    total = sum(info.nbytes for infos in tensors for info in infos)
    with progress(total, label="checking the sources", quiet=quiet) as tick:
        return [scan(infos, workers, allow_nonfinite, tick) for infos in tensors]


def _equal_ffns(plan: UpcyclePlan, hashes: Hashes, sources: Sequence[int]) -> bool:
    """Whether these sources have the same FFN weights in all MoE layers."""
    return len({_ffn_hashes(plan, hashes, source) for source in sources}) == 1


def _ffn_hashes(plan: UpcyclePlan, hashes: Hashes, source: int) -> tuple[str, ...]:
    """Hashes of the tensors that hold one source's FFNs of the MoE layers."""
    return tuple(
        hashes[source][rows.info.name]
        for layer in plan.moe_layers
        for rows in vars(plan.ffns(layer)[source]).values()
        if rows is not None
    )


def _equal_specialists(plan: UpcyclePlan, hashes: Hashes) -> list[str]:
    """One sentence for each set of specialists whose FFNs are the same weights."""
    names: dict[tuple[str, ...], list[str]] = {}
    for source, specialist in enumerate(plan.recipe.specialists, start=BASE + 1):
        names.setdefault(_ffn_hashes(plan, hashes, source), []).append(specialist.name)
    everyone = len(plan.recipe.specialists)
    equal = [same for same in names.values() if len(same) > 1]
    whose = ["all specialists" if len(same) == everyone else f"the specialists {', '.join(same)}" for same in equal]
    return [f"{who} have the same FFN weights: the experts are identical until they are trained" for who in whose]


def _write(plan: UpcyclePlan, folder: Path, workers: int, quiet: bool) -> Written:
    """Stream all tensors into the output's files."""
    total = sum(tensor.nbytes for tensor in plan.files.tensors)
    with (
        progress(total, label="writing", quiet=quiet) as tick,
        CheckpointWriter(folder, plan.files) as writer,
    ):
        target = Target(
            writer=writer,
            dtypes={tensor.name: tensor.dtype for tensor in plan.files.tensors},
            allow_nonfinite=plan.recipe.allow_nonfinite,
            tick=tick,
        )
        run_jobs([job.run for job in jobs(plan, target)], target.stop, workers)
        return writer.finish(workers)


def _write_small_files(plan: UpcyclePlan, folder: Path, hashes: Hashes, written: Written, promise: Statement) -> None:
    checkpoints = [model.checkpoint for model in plan.models]
    names = copy_side_files(checkpoints[BASE], folder)
    texts = {
        "config.json": config_text(plan),
        "recipe.yaml": dump_recipe(plan.recipe),
        modeling_file().name: modeling_file().read_text(encoding="utf-8"),
    }
    write_card(folder, model_card(plan, promise, UpcycleResult.count(plan)))
    for name, text in texts.items():
        path = folder / name
        with explained(path):
            path.write_text(text, encoding="utf-8")
    roles = ["base", *(specialist.name for specialist in plan.recipe.specialists)]
    records = source_records(list(zip(roles, checkpoints, strict=True)), hashes)
    write_provenance(
        folder,
        verb="upcycle",
        recipe=recipe_values(plan.recipe),
        seed=plan.recipe.seed,
        sources=records,
        weights_hash=written.weights_hash,
        extra={"statement": {"code": promise.code, "text": promise.text}, "copied_files": names},
    )
