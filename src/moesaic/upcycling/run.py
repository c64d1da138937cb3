"""The conversion: `upcycle(recipe, out)`."""

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path

import torch

from moesaic.checkpoint.output import output_folder, require_disk
from moesaic.checkpoint.pio import explained
from moesaic.checkpoint.provenance import combine, copy_side_files, side_files, source_record, write_provenance
from moesaic.checkpoint.scan import scan
from moesaic.checkpoint.writer import CheckpointWriter, Written
from moesaic.families.dense import DenseModel
from moesaic.modeling.names import modeling_file
from moesaic.progress import notice, progress
from moesaic.recipe import dump_recipe, recipe_values
from moesaic.upcycling.card import model_card
from moesaic.upcycling.jobs import Job, jobs
from moesaic.upcycling.layout import UpcyclePlan
from moesaic.upcycling.method import BASE
from moesaic.upcycling.recipe import UpcycleRecipe
from moesaic.upcycling.resolve import resolve
from moesaic.upcycling.result import UpcycleResult, config_text
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
    for line in plan.notices:
        notice(line, quiet=quiet)
    side_bytes = sum((plan.base.checkpoint.path / name).stat().st_size for name in side_files(plan.base.checkpoint))
    require_disk(out, plan.files.nbytes + side_bytes + _SMALL_FILES_BYTES)
    if dry_run:
        promise = statement(plan.layer, identical=len(_used_sources(plan)) <= 1)
        return UpcycleResult(out=None, plan=plan, statement=promise, notices=plan.notices, seconds=0.0)
    count = workers or min(len(os.sched_getaffinity(0)), 8)
    models = (plan.base, *plan.specialists)
    with (
        output_folder(out, overwrite, sources=[model.checkpoint.path for model in models]) as folder,
        _one_thread_per_job(),
    ):
        hashes = _scan(plan, models, count, quiet)
        promise, more = _settle(plan, hashes)
        for line in more:
            notice(line, quiet=quiet)
        written = _write(plan, folder, count, quiet)
        _write_small_files(plan, folder, hashes, written, promise)
    return UpcycleResult(
        out=Path(out),
        plan=plan,
        statement=promise,
        notices=(*plan.notices, *more),
        seconds=time.monotonic() - started,
    )


@contextmanager
def _one_thread_per_job() -> Iterator[None]:
    """Jobs run in parallel already; and a reduction's bits must not depend on the number of threads inside torch."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _scan(plan: UpcyclePlan, models: Sequence[DenseModel], workers: int, quiet: bool) -> Hashes:
    """Read every source once: refuse NaN and infinity, and hash."""
    total = sum(info.nbytes for model in models for info in model.checkpoint.tensors.values())
    with progress(total, label="checking the sources", quiet=quiet) as tick:
        return [scan(model.checkpoint.tensors.values(), workers, plan.recipe.allow_nonfinite, tick) for model in models]


def _used_sources(plan: UpcyclePlan) -> set[int]:
    """The numbers of the sources that experts are copies of; the base alone where experts are computed."""
    copies, spec = plan.layer.method.copies, plan.layer
    return {copies(number, spec.shards).source for number in range(spec.experts)} if copies else {BASE}


def _settle(plan: UpcyclePlan, hashes: Hashes) -> tuple[Statement, list[str]]:
    """What only the weights can tell: whether the experts' sources are equal, to each other and to the base."""
    ffns = {
        source: [
            hashes[source][rows.info.name]
            for layer in plan.moe_layers
            for rows in vars(plan.ffns(layer)[source]).values()
            if rows is not None
        ]
        for source in {BASE, *_used_sources(plan)}
    }
    used = [ffns[source] for source in sorted(_used_sources(plan))]
    identical = all(hashes_of == used[0] for hashes_of in used)
    notices = []
    if identical and len(used) > 1:
        notices.append(
            "all specialists have the same FFN weights, so their experts are identical; train them apart"
            + ("" if used[0] == ffns[BASE] else " (they differ from the base's)")
        )
    return statement(plan.layer, identical=identical), notices


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
        _run(jobs(plan, target), target, workers)
        return writer.finish(workers)


def _run(work: Sequence[Job], target: Target, workers: int) -> None:
    """Run all jobs; the first that fails ends the others and is raised."""
    with ThreadPoolExecutor(workers, thread_name_prefix="upcycle") as pool:
        futures = [pool.submit(job.run) for job in work]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
            failed = next((future for future in futures if future.done() and future.exception()), None)
            if failed is not None:
                failed.result()
        finally:
            target.stop.set()
            pool.shutdown(cancel_futures=True)


def _write_small_files(plan: UpcyclePlan, folder: Path, hashes: Hashes, written: Written, promise: Statement) -> None:
    checkpoints = [model.checkpoint for model in (plan.base, *plan.specialists)]
    names = copy_side_files(checkpoints[BASE], folder)
    texts = {
        "config.json": config_text(plan),
        "recipe.yaml": dump_recipe(plan.recipe),
        "README.md": model_card(plan, promise, UpcycleResult.count(plan)),
        modeling_file().name: modeling_file().read_text(encoding="utf-8"),
    }
    for name, text in texts.items():
        path = folder / name
        with explained(path):
            path.write_text(text, encoding="utf-8")
    records = [source_record(one, combine(one, found)) for one, found in zip(checkpoints, hashes, strict=True)]
    roles = ["base", *(specialist.name for specialist in plan.recipe.specialists)]
    write_provenance(
        folder,
        verb="upcycle",
        recipe=recipe_values(plan.recipe),
        seed=plan.recipe.seed,
        sources=[{"role": role, **record} for role, record in zip(roles, records, strict=True)],
        weights_hash=written.weights_hash,
        extra={"statement": {"code": promise.code, "text": promise.text}, "copied_files": names},
    )
