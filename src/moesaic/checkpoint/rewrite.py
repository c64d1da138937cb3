"""A new checkpoint made of the tensors of others: copied whole, with slots along one axis chosen again, or computed.

`expand` repeats slots, `extract` leaves some out, `merge-back` takes them from two checkpoints. What is copied moves as
bytes: no dtype changes and no arithmetic touches it.
"""

import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moesaic.checkpoint.card import write_card
from moesaic.checkpoint.headers import DTYPE_BITS, TensorInfo
from moesaic.checkpoint.layout import DEFAULT_SHARD_SIZE, Layout, OutputTensor, plan_files
from moesaic.checkpoint.output import output_folder, require_disk
from moesaic.checkpoint.pio import explained, read_into
from moesaic.checkpoint.provenance import (
    combine,
    copy_side_files,
    side_files,
    source_record,
    weights_hash,
    write_provenance,
)
from moesaic.checkpoint.scan import scan
from moesaic.checkpoint.source import Checkpoint
from moesaic.checkpoint.writer import CheckpointWriter, Written
from moesaic.modeling.names import modeling_file
from moesaic.progress import progress
from moesaic.recipe import dump_recipe, recipe_values

_BLOCK_BYTES = 4 << 20
_SMALL_FILES_BYTES = 1 << 20
"""config.json, moesaic.json, recipe, card, code: a generous bound."""

_OURS = "moesaic_"

Tick = Callable[[float], object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """`nbytes` consecutive bytes of a stored tensor, from its byte `start` on."""

    source: TensorInfo
    start: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class CopiedTensor:
    """An output tensor whose bytes are those of `runs`, one after the other."""

    output: OutputTensor
    runs: tuple[Run, ...]

    @property
    def sources(self) -> tuple[TensorInfo, ...]:
        """The stored tensors that it is made of, each once."""
        return tuple({(run.source.file, run.source.name): run.source for run in self.runs}.values())


@dataclass(frozen=True, kw_only=True)
class ComputedTensor:
    """A small output tensor that is computed, in the dtype and shape of `output`, from `sources`."""

    output: OutputTensor
    sources: tuple[TensorInfo, ...]
    compute: Callable[[], Tensor]


NewTensor = CopiedTensor | ComputedTensor


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
    shard_size: int = DEFAULT_SHARD_SIZE
    allow_nonfinite: bool = False

    @cached_property
    def files(self) -> Layout:
        """Names, sizes and headers of the weight files."""
        return plan_files((tensor.output for tensor in self.tensors), self.shard_size)


def whole(source: TensorInfo, name: str | None = None) -> CopiedTensor:
    """A stored tensor as it is, under its own name or another."""
    output = OutputTensor(name=name or source.name, dtype=source.dtype, shape=source.shape)
    return CopiedTensor(output=output, runs=(Run(source=source, start=0, nbytes=source.nbytes),))


def slot_tensor(name: str, picks: Sequence[tuple[TensorInfo, int]], *, axis: int = 0) -> CopiedTensor:
    """The tensor whose slot i along `axis` is slot `picks[i][1]` of the stored tensor `picks[i][0]`.

    All stored tensors have one dtype and, but for `axis`, one shape.
    """
    first = picks[0][0]
    around = (first.shape[:axis], first.shape[axis + 1 :], first.dtype)
    inner = prod(first.shape[axis + 1 :]) * DTYPE_BITS[first.dtype] // 8
    for source, slot in picks:
        assert (source.shape[:axis], source.shape[axis + 1 :], source.dtype) == around, source.name
        assert 0 <= slot < source.shape[axis], (source.name, slot)
    pieces = (
        Run(source=source, start=(outer * source.shape[axis] + slot) * inner, nbytes=inner)
        for outer in range(prod(first.shape[:axis]))
        for source, slot in picks
    )
    shape = (*first.shape[:axis], len(picks), *first.shape[axis + 1 :])
    return CopiedTensor(output=OutputTensor(name=name, dtype=first.dtype, shape=shape), runs=tuple(_joined(pieces)))


def stack_rows(name: str, shape: tuple[int, ...], parts: Sequence[tuple[TensorInfo, int, int]]) -> CopiedTensor:
    """A tensor of `shape` that is rows `start:stop` of each part, one after the other, in memory order."""
    dtype = parts[0][0].dtype
    runs = []
    for source, start, stop in parts:
        assert source.dtype == dtype, (source.name, source.dtype, dtype)
        row = source.nbytes // max(source.shape[0], 1)
        runs.append(Run(source=source, start=start * row, nbytes=(stop - start) * row))
    tensor = CopiedTensor(output=OutputTensor(name=name, dtype=dtype, shape=shape), runs=tuple(_joined(runs)))
    assert sum(run.nbytes for run in runs) == tensor.output.nbytes, (name, shape)
    return tensor


def check_space(plan: Rewrite, out: str | Path) -> None:
    """Refuse (MoesaicError) where the disk of `out` is too small."""
    base = plan.sources[0][1]
    side_bytes = sum((base.path / name).stat().st_size for name in side_files(base))
    require_disk(out, plan.files.nbytes + side_bytes + _SMALL_FILES_BYTES)


def rewrite(
    plan: Rewrite, out: str | Path, *, overwrite: bool = False, workers: int | None = None, quiet: bool = False
) -> Written:
    """Write the checkpoint: weights, config.json, moesaic.json, recipe.yaml, README.md and the files that come along.

    What goes into the result is read once before (NaN and infinity are refused, hashes recorded); `out` is absent or
    complete at all times. The bytes do not depend on `workers` (threads; default: one per core, at most 8).

    Raises:
        MoesaicError: a NaN in a source, a full disk, a target that exists.
    """
    check_space(plan, out)
    count = workers or min(len(os.sched_getaffinity(0)), 8)
    paths = [checkpoint.path for _, checkpoint in plan.sources]
    with output_folder(out, overwrite, sources=paths) as folder, one_thread_per_job():
        hashes = _check_sources(plan, count, quiet)
        written = _write(plan, folder, count, quiet)
        _write_small_files(plan, folder, hashes, written)
    return written


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


def _joined(runs: Iterable[Run]) -> Iterator[Run]:
    """The same bytes in as few runs as possible."""
    last: Run | None = None
    for run in runs:
        if last is not None and run.source is last.source and run.start == last.start + last.nbytes:
            last = Run(source=last.source, start=last.start, nbytes=last.nbytes + run.nbytes)
            continue
        if last is not None:
            yield last
        last = run
    if last is not None:
        yield last


def _check_sources(plan: Rewrite, workers: int, quiet: bool) -> list[dict[str, str]]:
    """Hashes of the tensors that are used, by name, per source."""
    used = {(info.file, info.name) for tensor in plan.tensors for info in tensor.sources}
    infos = [
        [info for info in checkpoint.tensors.values() if (info.file, info.name) in used]
        for _, checkpoint in plan.sources
    ]
    total = sum(info.nbytes for per_source in infos for info in per_source)
    with progress(total, label="checking the sources", quiet=quiet) as tick:
        return [scan(per_source, workers, plan.allow_nonfinite, tick) for per_source in infos]


def _write(plan: Rewrite, folder: Path, workers: int, quiet: bool) -> Written:
    total = sum(tensor.output.nbytes for tensor in plan.tensors)
    stop = threading.Event()
    with (
        progress(total, label="writing", quiet=quiet) as tick,
        CheckpointWriter(folder, plan.files) as writer,
    ):
        # Large ones first, so that no thread is left alone with one at the end.
        ordered = sorted(plan.tensors, key=lambda tensor: -tensor.output.nbytes)
        run_jobs([_job(tensor, writer, stop, tick) for tensor in ordered], stop, workers)
        return writer.finish(workers)


def _job(tensor: NewTensor, writer: CheckpointWriter, stop: threading.Event, tick: Tick) -> Callable[[], None]:
    def compute() -> None:
        assert isinstance(tensor, ComputedTensor)
        values = tensor.compute()
        assert tuple(values.shape) == tensor.output.shape, tensor.output.name
        writer.write(tensor.output.name, values.contiguous())
        tick(tensor.output.nbytes)

    def copy() -> None:
        assert isinstance(tensor, CopiedTensor)
        _copy_runs(tensor, writer, stop, tick)

    return copy if isinstance(tensor, CopiedTensor) else compute


def _copy_runs(tensor: CopiedTensor, writer: CheckpointWriter, stop: threading.Event, tick: Tick) -> None:
    itemsize = DTYPE_BITS[tensor.output.dtype] // 8
    buffer = memoryview(bytearray(min(_BLOCK_BYTES, max((run.nbytes for run in tensor.runs), default=0))))
    position = 0
    for run in tensor.runs:
        with explained(run.source.file):
            fd = os.open(run.source.file, os.O_RDONLY)
        try:
            for at in range(0, run.nbytes, _BLOCK_BYTES):
                if stop.is_set():
                    return
                block = buffer[: min(_BLOCK_BYTES, run.nbytes - at)]
                read_into(fd, block, run.source.offset + run.start + at, run.source.file)
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
