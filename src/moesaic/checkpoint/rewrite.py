"""A new checkpoint made of the tensors of others (`pieces` says of which parts of them).

`expand` repeats slots of experts, `extract` leaves some out, `merge-back` takes them from two checkpoints.
"""

import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moesaic.checkpoint.card import write_card
from moesaic.checkpoint.headers import DTYPE_BITS
from moesaic.checkpoint.layout import DEFAULT_SHARD_SIZE, Layout, plan_files
from moesaic.checkpoint.output import check_target, output_folder, require_disk
from moesaic.checkpoint.pieces import ComputedTensor, CopiedTensor, NewTensor, Work
from moesaic.checkpoint.pieces import slot_tensor as slot_tensor
from moesaic.checkpoint.pieces import whole as whole
from moesaic.checkpoint.pio import explained, read_into
from moesaic.checkpoint.provenance import (
    check_side_files,
    combine,
    copy_side_files,
    source_record,
    weights_hash,
    write_provenance,
)
from moesaic.checkpoint.provenance import original_experts as original_experts
from moesaic.checkpoint.scan import BLOCK_BYTES, refuse_nonfinite, scan
from moesaic.checkpoint.source import Checkpoint
from moesaic.checkpoint.writer import CheckpointWriter, Written
from moesaic.common.progress import progress
from moesaic.common.recipe import dump_recipe, recipe_values
from moesaic.common.workers import default_workers
from moesaic.modeling.names import modeling_file

_SMALL_FILES_BYTES = 1 << 20
"""config.json, moesaic.json, recipe, card, code: a generous bound."""

_OURS = "moesaic_"

Tick = Callable[[float], object]


@dataclass(frozen=True, kw_only=True)
class Rewrite:
    """Everything about a new checkpoint, resolved from headers."""

    verb: str
    sources: tuple[tuple[str, Checkpoint], ...]
    """(role, checkpoint); the first one's tokenizer, generation_config.json and chat template come along."""
    tensors: tuple[NewTensor, ...]
    config: Mapping[str, Any]
    recipe: Any
    """A frozen dataclass: becomes recipe.yaml and the recipe of moesaic.json."""
    seed: int | None
    card: str
    """README.md."""
    record: Mapping[str, Any]
    """Further keys of moesaic.json."""
    work: tuple[Work, ...] = ()
    texts: Mapping[str, str] = field(default_factory=dict)
    """Further small files: name -> content."""
    shard_size: int = DEFAULT_SHARD_SIZE
    allow_nonfinite: bool = False

    @cached_property
    def files(self) -> Layout:
        """Names, sizes and headers of the weight files."""
        return plan_files((tensor.output for tensor in self.tensors), self.shard_size)


def check_space(plan: Rewrite, out: str | Path) -> None:
    """Refuse (MoesaicError) where the disk of `out` is too small."""
    side_bytes = check_side_files(plan.sources[0][1])
    require_disk(out, plan.files.nbytes + side_bytes + _SMALL_FILES_BYTES)


def rewrite(
    plan: Rewrite, out: str | Path, *, overwrite: bool = False, workers: int | None = None, quiet: bool = False
) -> Written:
    """Write the checkpoint: weights, config.json, moesaic.json, recipe.yaml, README.md and the files that come along.

    NaN and infinity are refused and hashes of what was used recorded, of tensors that come whole and first in one of
    the new ones while they are copied, of others before; `out` is absent or complete at all times. The bytes do not
    depend on `workers` (threads; default: one per core, at most 8).

    Raises:
        MoesaicError: a NaN in a source, a full disk, a target that exists.
    """
    check_space(plan, out)
    count = workers or default_workers()
    paths = [checkpoint.path for _, checkpoint in plan.sources]
    with output_folder(out, overwrite, sources=paths) as folder, one_thread_per_job():
        copies = _whole_copies(plan)
        hashes = _check_sources(plan, copies, count, quiet)
        written = _write(plan, folder, copies, count, quiet)
        for (_, checkpoint), found in zip(plan.sources, hashes, strict=True):
            found |= {
                info.name: written.first_hashes[copies[info.file, info.name]]
                for info in checkpoint.tensors.values()
                if (info.file, info.name) in copies
            }
        _write_small_files(plan, folder, hashes, written)
    return written


def rewrite_unless_dry(
    plan: Rewrite, out: str | Path, *, dry_run: bool, overwrite: bool, workers: int | None, quiet: bool
) -> Path | None:
    """Check target and space, and write unless it is a dry run: the folder that was written, if one was."""
    check_target(out, overwrite, sources=[source.path for _, source in plan.sources])
    check_space(plan, out)
    if dry_run:
        return None
    rewrite(plan, out, overwrite=overwrite, workers=workers, quiet=quiet)
    return Path(out)


@dataclass(frozen=True, kw_only=True)
class RewriteResult:
    """What a verb made that writes a checkpoint from others."""

    out: Path | None
    """None after a dry run."""
    nbytes: int
    """Of the weight files."""
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for `--json`."""
        return {**vars(self), "out": None if self.out is None else str(self.out), "seconds": round(self.seconds, 3)}

    def line(self, what: str) -> str:
        """The same for people."""
        where = "would be" if self.out is None else f"{self.out}:"
        return f"{where} {what}, {self.nbytes / 1e6:,.1f} MB, in {self.seconds:.1f} s"


def run_jobs(jobs: Iterable[Callable[[], None]], stop: threading.Event, workers: int) -> None:
    """Run all jobs; the first that fails ends the others (through `stop`, which they watch) and is raised."""
    with ThreadPoolExecutor(workers, thread_name_prefix="rewrite") as pool:
        futures = [pool.submit(job) for job in jobs]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
            failed = next((future for future in futures if future.done() and future.exception()), None)
            if failed is not None:
                failed.result()
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)


@contextmanager
def one_thread_per_job() -> Iterator[None]:
    """Jobs run in parallel already; and a reduction's bits must not depend on the number of threads inside torch."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def source_records(
    sources: Sequence[tuple[str, Checkpoint]], hashes: Sequence[Mapping[str, str]]
) -> list[dict[str, Any]]:
    """The `sources` of moesaic.json; `hashes` are those of the tensors that were used, by name, per source.

    `weights_hash` is there where all tensors of a source were used.
    """
    records = []
    for (role, checkpoint), found in zip(sources, hashes, strict=True):
        complete = combine(checkpoint, found) if found.keys() == checkpoint.tensors.keys() else None
        used = [(i.name, i.dtype, i.shape, found[i.name]) for i in checkpoint.tensors.values() if i.name in found]
        record = {"role": role, **source_record(checkpoint, complete)}
        records.append(record | {"used_tensors": len(used), "used_hash": weights_hash(used)})
    return records


def _whole_copies(plan: Rewrite) -> dict[tuple[Path, str], str]:
    """Stored tensors that come whole and first in an output tensor, which then tells their hash, and its name."""
    copies = ((tensor.begins_with, tensor) for tensor in plan.tensors if isinstance(tensor, CopiedTensor))
    return {(info.file, info.name): tensor.output.name for info, tensor in copies if info is not None}


def _check_sources(
    plan: Rewrite, copies: Mapping[tuple[Path, str], str], workers: int, quiet: bool
) -> list[dict[str, str]]:
    """Hashes of the tensors that are used and not in `copies`, by name, per source."""
    used = {(info.file, info.name) for part in (*plan.tensors, *plan.work) for info in part.sources} - copies.keys()
    infos = [
        [info for info in checkpoint.tensors.values() if (info.file, info.name) in used]
        for _, checkpoint in plan.sources
    ]
    total = sum(info.nbytes for per_source in infos for info in per_source)
    with progress(total, label="checking the sources", quiet=quiet) as tick:
        return [scan(per_source, workers, plan.allow_nonfinite, tick) for per_source in infos]


def _write(plan: Rewrite, folder: Path, copies: Mapping[tuple[Path, str], str], workers: int, quiet: bool) -> Written:
    sizes = {(info.file, info.name): info.nbytes for _, source in plan.sources for info in source.tensors.values()}
    total = sum(tensor.output.nbytes for tensor in plan.tensors)
    stop = threading.Event()
    with (
        progress(total, label="writing", quiet=quiet) as tick,
        CheckpointWriter(folder, plan.files, hash_first={copies[key]: sizes[key] for key in copies}) as writer,
    ):
        # Large ones first, so that no thread is left alone with one at the end.
        ordered = sorted(plan.tensors, key=lambda tensor: -tensor.output.nbytes)
        work = [_work_job(work, writer, stop, tick) for work in plan.work]
        check = not plan.allow_nonfinite
        run_jobs([*work, *(_job(tensor, writer, stop, tick, check) for tensor in ordered)], stop, workers)
        return writer.finish(workers)


def _job(
    tensor: NewTensor, writer: CheckpointWriter, stop: threading.Event, tick: Tick, check: bool
) -> Callable[[], None]:
    def compute() -> None:
        assert isinstance(tensor, ComputedTensor)
        values = tensor.compute()
        assert tuple(values.shape) == tensor.output.shape, tensor.output.name
        writer.write(tensor.output.name, values.contiguous())
        tick(tensor.output.nbytes)

    def copy() -> None:
        assert isinstance(tensor, CopiedTensor)
        _copy_runs(tensor, writer, stop, tick, check=check and tensor.begins_with is not None)

    return copy if isinstance(tensor, CopiedTensor) else compute


def _work_job(work: Work, writer: CheckpointWriter, stop: threading.Event, tick: Tick) -> Callable[[], None]:
    def put(name: str, start: int, values: Tensor) -> None:
        writer.write(name, values, start)
        tick(values.nbytes)

    def compute() -> None:
        if not stop.is_set():
            work.run(put)

    return compute


def _copy_runs(
    tensor: CopiedTensor, writer: CheckpointWriter, stop: threading.Event, tick: Tick, *, check: bool
) -> None:
    itemsize = DTYPE_BITS[tensor.output.dtype] // 8
    buffer = memoryview(bytearray(min(BLOCK_BYTES, max((run.nbytes for run in tensor.runs), default=0))))
    position = 0
    for run in tensor.runs:
        if run.source is None:
            position += run.nbytes
            continue
        with explained(run.source.file):
            fd = os.open(run.source.file, os.O_RDONLY)
        try:
            for at in range(0, run.nbytes, BLOCK_BYTES):
                if stop.is_set():
                    return
                block = buffer[: min(BLOCK_BYTES, run.nbytes - at)]
                read_into(fd, block, run.source.offset + run.start + at, run.source.file)
                if check and run is tensor.runs[0]:  # the other bytes were checked before
                    refuse_nonfinite(block, run.source)
                writer.write(tensor.output.name, block, position // itemsize)
                position += len(block)
                tick(len(block))
        finally:
            os.close(fd)


def _write_small_files(plan: Rewrite, folder: Path, hashes: list[dict[str, str]], written: Written) -> None:
    copied = copy_side_files(plan.sources[0][1], folder)
    texts = {
        "config.json": json.dumps(plan.config, indent=2, sort_keys=True, ensure_ascii=False) + "\n",
        "recipe.yaml": dump_recipe(plan.recipe),
        **plan.texts,
    }
    if str(plan.config.get("model_type")).startswith(_OURS):
        texts[modeling_file().name] = modeling_file().read_text(encoding="utf-8")
    for name, text in texts.items():
        path = folder / name
        with explained(path):
            path.write_text(text, encoding="utf-8")
    write_card(folder, plan.card)
    write_provenance(
        folder,
        verb=plan.verb,
        recipe=recipe_values(plan.recipe),
        seed=plan.seed,
        sources=source_records(plan.sources, hashes),
        weights_hash=written.weights_hash,
        extra={**plan.record, "copied_files": copied},
    )
