"""A new checkpoint from lazy tensors: the one executor behind every verb that writes weights of others.

Weights, config.json, moesaic.json, recipe.yaml, README.md and the files that come along go into a hidden folder that
becomes the target when all is complete and synced. The bytes do not depend on the number of threads.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from filecmp import cmp
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moesaic.checkpoint.config_file import write_config
from moesaic.checkpoint.headers import TensorInfo
from moesaic.checkpoint.lazy import Lazy
from moesaic.checkpoint.output import check_target, output_folder, require_disk
from moesaic.checkpoint.record import (
    check_side_files,
    combine,
    copy_side_files,
    how_to_load,
    source_record,
    weights_hash,
    write_card,
    write_provenance,
)
from moesaic.checkpoint.same_tokens import keep_source_ids
from moesaic.checkpoint.source import Checkpoint
from moesaic.checkpoint.streaming import Unit, has_nonfinite, refuse_nonfinite, scan, units
from moesaic.checkpoint.writer import DEFAULT_SHARD_SIZE, CheckpointWriter, Layout, OutputTensor, Written, plan_files
from moesaic.common.errors import MoesaicError
from moesaic.common.files import explained
from moesaic.common.progress import progress, warn
from moesaic.common.recipe import dump_recipe, recipe_values
from moesaic.common.shown import Shown
from moesaic.common.workers import default_workers

_SMALL_FILES_BYTES = 1 << 20
"""config.json, moesaic.json, recipe, card, code: a generous bound."""

Hashes = Sequence[Mapping[str, str]]
"""Per source: name of a tensor that is used -> hash of its bytes."""


@dataclass(frozen=True, kw_only=True)
class NewCheckpoint:
    """Everything about a new checkpoint, resolved from headers."""

    verb: str
    sources: tuple[tuple[str, Checkpoint], ...]
    """(role, checkpoint); the first one's tokenizer, generation_config.json and chat template come along."""
    tensors: Mapping[str, Lazy]
    """By name, in the order of the files."""
    config: Mapping[str, Any]
    recipe: Any
    """A frozen dataclass: becomes recipe.yaml and the recipe of moesaic.json."""
    seed: int | None
    card: str
    """README.md."""
    record: Mapping[str, Any]
    """Further keys of moesaic.json."""
    texts: Mapping[str, str] = field(default_factory=dict)
    """Further small files: name -> content; the code of our architecture is `modeling.names.code_files(config)`."""
    shard_size: int = DEFAULT_SHARD_SIZE
    allow_nonfinite: bool = False
    """Accept NaN and infinity in the sources."""
    if_out_of_range: str | None = None
    """What the user can do where a number that was changed or made is not finite in the tensor's dtype; with None it
    is written."""

    @cached_property
    def files(self) -> Layout:
        """Names, sizes and headers of the weight files."""
        outputs = (OutputTensor(name=name, dtype=one.dtype, shape=one.shape) for name, one in self.tensors.items())
        return plan_files(outputs, self.shard_size)


@dataclass(frozen=True, kw_only=True, repr=False)
class WriteResult(Shown):
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


def check_output(out: str | Path, files: Layout, sources: Sequence[Checkpoint], *, overwrite: bool) -> None:
    """Refuse (MoesaicError) a target that cannot be written, small files that are damaged, a disk that is too small.

    `sources` are the new checkpoint's; the first one's small files come along.
    """
    check_target(out, overwrite, sources=[source.path for source in sources])
    require_disk(out, files.nbytes + check_side_files(sources[0]) + _SMALL_FILES_BYTES)


def write_unless_dry(
    new: NewCheckpoint, out: str | Path, *, dry_run: bool, overwrite: bool, workers: int | None, quiet: bool
) -> Path | None:
    """Check target and space, and write unless it is a dry run: the folder that was written, if one was."""
    if dry_run:
        check_output(out, new.files, [source for _, source in new.sources], overwrite=overwrite)
        return None
    write(new, out, overwrite=overwrite, workers=workers, quiet=quiet)
    return Path(out)


def write(
    new: NewCheckpoint,
    out: str | Path,
    *,
    overwrite: bool = False,
    workers: int | None = None,
    quiet: bool = False,
    hashes: Hashes | None = None,
) -> Written:
    """Write a checkpoint; `out` is absent or complete at all times.

    NaN and infinity in what is used of the sources are refused and hashes of it recorded: of tensors that come whole
    and first in one of the new ones while they are copied, of others before. With `hashes` the caller has read the
    sources (`check_sources`), and nothing is checked again.

    Args:
        new: what to write.
        out: the folder.
        overwrite: replace `out` if it is a checkpoint.
        workers: threads; the bytes do not depend on it. Default: one per core, at most 8.
        quiet: no progress.
        hashes: per source, those of the tensors that are used.

    Raises:
        MoesaicError: a NaN in a source, a full disk, a target that exists.
    """
    checkpoints = [checkpoint for _, checkpoint in new.sources]
    check_output(out, new.files, checkpoints, overwrite=overwrite)
    count = workers or default_workers()
    with output_folder(out, overwrite, sources=[one.path for one in checkpoints]) as folder, _one_thread_per_unit():
        copies = {} if hashes is not None else _whole_copies(new)
        if hashes is None:
            hashes = check_sources(_used(new, copies), count, quiet=quiet, allow_nonfinite=new.allow_nonfinite)
        written = _write_weights(new, folder, copies, count, quiet)
        copied = {key: written.first_hashes[name] for key, (name, _) in copies.items()}
        complete = [
            {
                **found,
                **{name: copied[info.file, name] for name, info in one.tensors.items() if (info.file, name) in copied},
            }
            for one, found in zip(checkpoints, hashes, strict=True)
        ]
        _write_small_files(new, folder, complete, written)
    return written


def check_sources(
    tensors: Sequence[Iterable[TensorInfo]], workers: int, *, quiet: bool, allow_nonfinite: bool
) -> list[dict[str, str]]:
    """Read tensors once, per source: refuse NaN and infinity, and return the hashes by name."""
    infos = [list(of_source) for of_source in tensors]
    total = sum(info.nbytes for of_source in infos for info in of_source)
    with progress(total, label="checking the sources", quiet=quiet) as tick:
        return [scan(of_source, workers, allow_nonfinite, tick) for of_source in infos]


Key = tuple[Path, str]
"""File and name of a stored tensor."""


def _whole_copies(new: NewCheckpoint) -> dict[Key, tuple[str, TensorInfo]]:
    """Stored tensors that come whole and first in a new one, whose name is here: copying tells their hash."""
    begins = ((name, lazy.begins_with) for name, lazy in new.tensors.items())
    return {(info.file, info.name): (name, info) for name, info in begins if info is not None}


def _used(new: NewCheckpoint, copies: Mapping[Key, object]) -> list[list[TensorInfo]]:
    """Per source, the tensors that are used and not in `copies`, in the order of the source."""
    used = {(info.file, info.name) for lazy in new.tensors.values() for info in lazy.sources} - copies.keys()
    return [
        [info for info in checkpoint.tensors.values() if (info.file, info.name) in used]
        for _, checkpoint in new.sources
    ]


class _StoppedError(Exception):
    """Another unit failed, or the user interrupted: this one ends without a result."""


def _write_weights(
    new: NewCheckpoint, folder: Path, copies: Mapping[Key, tuple[str, TensorInfo]], workers: int, quiet: bool
) -> Written:
    firsts = dict(copies.values())
    first_elements = {name: prod(info.shape) for name, info in firsts.items()}
    stop = threading.Event()
    total = sum(lazy.nbytes for lazy in new.tensors.values())
    with (
        progress(total, label="writing", quiet=quiet) as tick,
        CheckpointWriter(folder, new.files, hash_first={name: one.nbytes for name, one in firsts.items()}) as writer,
    ):

        def put(name: str, start: int, values: Tensor | memoryview) -> None:
            if stop.is_set():
                raise _StoppedError
            if isinstance(values, Tensor):
                _refuse_out_of_range(new, name, values)
            elif not new.allow_nonfinite and start < first_elements.get(name, 0):
                refuse_nonfinite(values, firsts[name])  # the rest was checked before; no block has bytes of two sources
            writer.write(name, values, start)
            tick(values.nbytes)

        # What is computed first, as it takes long; then large ones first, so that no thread is left alone with one.
        ordered = sorted(
            units((name, lazy.dtype, lazy.pieces) for name, lazy in new.tensors.items()),
            key=lambda unit: (not unit.computes, -unit.nbytes),
        )
        _run(ordered, put, stop, workers)
        return writer.finish(workers)


def _refuse_out_of_range(new: NewCheckpoint, name: str, values: Tensor) -> None:
    """Sources are finite, but scaling and narrowing can leave a dtype's range."""
    if new.if_out_of_range is None or new.allow_nonfinite:
        return
    if has_nonfinite(values.view(-1).view(torch.uint8).numpy().data, new.tensors[name].dtype):
        dtype = str(values.dtype).removeprefix("torch.")
        raise MoesaicError(f"{name}: a value is outside the range of {dtype}; {new.if_out_of_range}")


def _run(work: Sequence[Unit], put: Callable[..., None], stop: threading.Event, workers: int) -> None:
    """Run all units; the first that fails ends the others (through `stop`, which `put` watches) and is raised."""
    with ThreadPoolExecutor(workers, thread_name_prefix="write") as pool:
        futures = [pool.submit(unit.run, put) for unit in work]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
            failed = next((future for future in futures if future.done() and future.exception()), None)
            if failed is not None:
                failed.result()
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)


@contextmanager
def _one_thread_per_unit() -> Iterator[None]:
    """Units run in parallel already; and a reduction's bits must not depend on the number of threads inside torch."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _source_records(sources: Sequence[tuple[str, Checkpoint]], hashes: Hashes) -> list[dict[str, Any]]:
    """The `sources` of moesaic.json; `weights_hash` is there where all tensors of a source were used."""
    records = []
    for (role, checkpoint), found in zip(sources, hashes, strict=True):
        complete = combine(checkpoint, found) if found.keys() == checkpoint.tensors.keys() else None
        used = [(i.name, i.dtype, i.shape, found[i.name]) for i in checkpoint.tensors.values() if i.name in found]
        record = {"role": role, **source_record(checkpoint, complete)}
        records.append(record | {"used_tensors": len(used), "used_hash": weights_hash(used)})
    return records


def _write_small_files(new: NewCheckpoint, folder: Path, hashes: Hashes, written: Written) -> None:
    source = new.sources[0][1]
    copied = copy_side_files(source, folder)
    write_config(folder, new.config)
    # Beside a config.json of the same type, the same files are read in the same way.
    if new.config.get("model_type") != source.config.get("model_type"):
        if differs := keep_source_ids(source.path, folder):
            warn(differs)
        copied = [name for name in copied if cmp(source.path / name, folder / name, shallow=False)]
    for name, text in {"recipe.yaml": dump_recipe(new.recipe), **new.texts}.items():
        path = folder / name
        with explained(path):
            path.write_text(text, encoding="utf-8")
    write_card(folder, new.card + how_to_load(folder, new.config))
    write_provenance(
        folder,
        verb=new.verb,
        recipe=recipe_values(new.recipe),
        seed=new.seed,
        sources=_source_records(new.sources, hashes),
        weights_hash=written.weights_hash,
        extra={**new.record, "copied_files": copied},
    )
