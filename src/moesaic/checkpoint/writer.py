"""Weight files of a new checkpoint: where every tensor goes, and writing in place, in any order.

The layout is a pure function of the tensor list and the shard size, before any tensor exists, so the bytes written
cannot depend on the number of workers or on the order in which tensors are finished. Importing this imports no torch.
"""

from __future__ import annotations

import json
import os
import re
import threading
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from moesaic.checkpoint.headers import DTYPE_BITS, INDEX_FILE, MAX_HEADER_BYTES, SINGLE_FILE, tensor_bytes
from moesaic.checkpoint.pio import allocate, read_into, start_flush, sync_path, write_all
from moesaic.checkpoint.record import weights_hash
from moesaic.checkpoint.streaming import HASH
from moesaic.common.errors import MoesaicError
from moesaic.common.files import explained

if TYPE_CHECKING:
    from torch import Tensor

_CHUNK_BYTES = 1 << 20  # written, then hashed while it is in the cache
_FLUSH_BYTES = 32 << 20

DEFAULT_SHARD_SIZE = 5_000_000_000
"""5 GB, as `save_pretrained` of transformers."""

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputTensor:
    """A tensor to be written: its name, safetensors dtype code ("BF16") and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return tensor_bytes(self.dtype, self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputFile:
    """One file to be written: `header` (length prefix included), then the tensors at absolute `offsets`."""

    name: str
    header: bytes
    tensors: tuple[OutputTensor, ...]
    offsets: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the whole file in bytes."""
        return len(self.header) + sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """All weight files of an output checkpoint; `index` are the bytes of the index file, None for a single file."""

    files: tuple[OutputFile, ...]
    index: bytes | None

    @property
    def nbytes(self) -> int:
        """Size of all weight files and the index in bytes."""
        return sum(file.nbytes for file in self.files) + len(self.index or b"")

    @property
    def tensors(self) -> tuple[OutputTensor, ...]:
        """All tensors in the order they have in the files."""
        return tuple(tensor for file in self.files for tensor in file.tensors)


def parse_size(text: str | int, *, flag: str = "--shard-size") -> int:
    """Bytes in "5GB", "500MB", "2GiB", "1.5GB" or plain "5000000000"; 1 GB = 10^9 bytes, 1 GiB = 2^30.

    A size that cannot be read, or is not positive, is a MoesaicError that names `flag`.
    """
    match = re.fullmatch(r"\s*(\d+(?:_\d+)*(?:\.\d+)?|\.\d+)\s*([A-Za-z]*)\s*", str(text), flags=re.ASCII)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise MoesaicError(f'{flag} {text}: not a size; write "5GB", "500MB", "2GiB" or a number of bytes')
    whole, _, fraction = match[1].replace("_", "").partition(".")
    size = (int(whole or "0") * 10 ** len(fraction) + int(fraction or "0")) * unit // 10 ** len(fraction)
    if size <= 0:
        raise MoesaicError(f'{flag} {text}: must be at least one byte; the default is "5GB"')
    return size


def plan_files(tensors: Iterable[OutputTensor], shard_size: int = DEFAULT_SHARD_SIZE) -> Layout:
    """Distribute tensors over files of at most `shard_size` bytes of tensors, in the order given.

    Within a file, tensors of wider dtypes come first (else in the order given), so that each starts at a multiple of
    its element size: loaders that view a mapped file as a tensor need that.
    One file is `model.safetensors`; several are `model-00001-of-0000N.safetensors` and an index. A tensor larger than
    `shard_size` gets a file of its own. Names must be unique.
    """
    ordered = tuple(tensors)
    _check(ordered)
    shards = _split(ordered, shard_size)
    names = [SINGLE_FILE]
    if len(shards) > 1:
        names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    files = tuple(_plan_file(name, shard) for name, shard in zip(names, shards, strict=True))
    return Layout(files=files, index=_index(files) if len(files) > 1 else None)


def _check(tensors: Sequence[OutputTensor]) -> None:
    names: set[str] = set()
    for tensor in tensors:
        assert tensor.dtype in DTYPE_BITS, f"{tensor.name}: unknown dtype {tensor.dtype}"
        assert tensor.name not in names, f"{tensor.name}: planned twice"
        assert tensor.name != "__metadata__", "a reserved name"
        names.add(tensor.name)


def _split(tensors: Sequence[OutputTensor], shard_size: int) -> list[list[OutputTensor]]:
    shards: list[list[OutputTensor]] = [[]]
    used = 0
    for tensor in tensors:
        if shards[-1] and used + tensor.nbytes > shard_size:
            shards.append([])
            used = 0
        shards[-1].append(tensor)
        used += tensor.nbytes
    return shards


def _plan_file(name: str, unordered: Sequence[OutputTensor]) -> OutputFile:
    tensors = sorted(unordered, key=lambda tensor: -DTYPE_BITS[tensor.dtype])
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    ends = [0]
    for tensor in tensors:
        ends.append(ends[-1] + tensor.nbytes)
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [ends[-2], ends[-1]],
        }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    # Spaces after the JSON are allowed by the format. Tensors start at a multiple of 64 bytes, a cache line.
    text += b" " * (-(8 + len(text)) % 64)
    assert len(text) <= MAX_HEADER_BYTES, "more tensors than one safetensors header can hold"
    header = len(text).to_bytes(8, "little") + text
    offsets = tuple(len(header) + end for end in ends[:-1])
    return OutputFile(name=name, header=header, tensors=tuple(tensors), offsets=offsets)


def _index(files: Sequence[OutputFile]) -> bytes:
    weight_map = {tensor.name: file.name for file in files for tensor in file.tensors}
    total = sum(tensor.nbytes for file in files for tensor in file.tensors)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode("utf-8")


# --- writing ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Written:
    """What `finish` wrote: hash per tensor (as `scan`), hash of all (as `fingerprint`), size of the files in bytes."""

    tensor_hashes: Mapping[str, str]
    first_hashes: Mapping[str, str]
    """Of the first bytes of tensors, as many as `hash_first` said."""
    weights_hash: str
    nbytes: int


class CheckpointWriter:
    """Context manager that writes the weight files of a layout into an existing folder.

    `write` may be called from several threads and in any order; `finish` must be called before the block ends.
    Failures of the disk are MoesaicErrors; on an error the files stay as they are, `output_folder` removes them.
    """

    def __init__(self, folder: Path, layout: Layout, *, hash_first: Mapping[str, int] | None = None):
        """`hash_first`: numbers of first bytes of tensors, ends of runs, whose hash is wanted as well."""
        self._folder = folder
        self._layout = layout
        self._hash_first = hash_first or {}
        self._files: list[_OpenFile] = []
        self._slots: dict[str, _Slot] = {}
        self._finished = False

    def __enter__(self) -> Self:
        try:
            for planned in self._layout.files:
                file = _OpenFile(self._folder / planned.name, planned)
                self._files.append(file)
                for tensor, offset in zip(planned.tensors, planned.offsets, strict=True):
                    self._slots[tensor.name] = _Slot(tensor, file, offset, self._hash_first.get(tensor.name))
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()
        if kind is None and not self._finished:
            raise RuntimeError(f"{self._folder}: the writer was left without finish()")

    def write(self, name: str, tensor: Tensor | memoryview | bytes | bytearray, start: int = 0) -> None:
        """Write a run of elements of tensor `name`, from element `start` (row-major) on.

        `tensor` is contiguous, on the CPU and of the declared dtype (any shape), or the raw bytes of such elements.
        Nothing is copied. Elements outside the tensor, or written before, are a bug and raise RuntimeError.
        """
        slot = self._slots[name]
        slot.write(_as_bytes(tensor, slot.tensor), start * DTYPE_BITS[slot.tensor.dtype] // 8)

    def finish(self, workers: int = 1) -> Written:
        """Check that every element was written exactly once, write the index, fsync, and return the hashes.

        Tensors that were not written front to back are read back for their hash, by `workers` threads.
        """
        incomplete = [name for name, slot in self._slots.items() if not slot.complete]
        if incomplete:
            raise RuntimeError(f"{len(incomplete)} tensors are not complete, the first is {incomplete[0]!r}")
        with ThreadPoolExecutor(max(workers, 1), thread_name_prefix="finish") as pool:
            hashes = dict(zip(self._slots, pool.map(_Slot.digest, self._slots.values()), strict=True))
            list(pool.map(_OpenFile.sync, self._files))
        if self._layout.index is not None:
            index_file = self._folder / INDEX_FILE
            with explained(index_file):
                index_file.write_bytes(self._layout.index)
            sync_path(index_file)
        sync_path(self._folder)
        self._finished = True
        total = weights_hash(
            (tensor.name, tensor.dtype, tensor.shape, hashes[tensor.name]) for tensor in self._layout.tensors
        )
        first = {name: found for name in self._hash_first if (found := self._slots[name].first_hash) is not None}
        return Written(tensor_hashes=hashes, first_hashes=first, weights_hash=total, nbytes=self._layout.nbytes)

    def _close(self) -> None:
        for file in self._files:
            file.close()


class _OpenFile:
    def __init__(self, path: Path, planned: OutputFile):
        self.path = path
        self._unflushed = 0
        with explained(path):
            self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            allocate(self.fd, planned.nbytes, path)
            write_all(self.fd, memoryview(planned.header), 0, path)
        except BaseException:
            os.close(self.fd)
            raise

    def write(self, chunk: memoryview, offset: int) -> None:
        write_all(self.fd, chunk, offset, self.path)
        # Threads may lose each other's counts here: then a hint to the kernel comes later, nothing else.
        self._unflushed += len(chunk)
        if self._unflushed >= _FLUSH_BYTES:
            self._unflushed = 0
            start_flush(self.fd)

    def sync(self) -> None:
        with explained(self.path):
            os.fsync(self.fd)

    def close(self) -> None:
        os.close(self.fd)


class _Slot:
    """One tensor's place in a file: which bytes are taken, how many are written, the hash of the first ones."""

    def __init__(self, tensor: OutputTensor, file: _OpenFile, offset: int, first: int | None):
        self.tensor = tensor
        self.first_hash: str | None = None
        self._first = first
        self._file = file
        self._offset = offset
        self._lock = threading.Lock()
        self._starts: list[int] = []  # disjoint intervals, sorted, neighbours merged
        self._stops: list[int] = []
        self._written = 0
        self._hash = HASH()
        self._hashed = 0
        self._hashing = False
        self._advance(0)

    @property
    def complete(self) -> bool:
        return self._written == self.tensor.nbytes

    def write(self, data: memoryview, start: int) -> None:
        if not len(data):
            return
        with self._lock:
            self._take(start, start + len(data))
            hashing = start == self._hashed and not self._hashing
            self._hashing |= hashing
        for at in range(0, len(data), _CHUNK_BYTES):
            chunk = data[at : at + _CHUNK_BYTES]
            self._file.write(chunk, self._offset + start + at)
            if hashing:
                self._hash.update(chunk)
        with self._lock:
            self._written += len(data)
            if hashing:
                self._advance(len(data))
                self._hashing = False

    def _take(self, start: int, stop: int) -> None:
        """Record an interval of bytes; intervals never overlap, so the tensor is complete when their sizes add up."""
        if start < 0 or stop > self.tensor.nbytes:
            raise RuntimeError(f"{self.tensor.name}: bytes {start}:{stop} are outside its {self.tensor.nbytes}")
        i = bisect_left(self._starts, start)
        if (i > 0 and self._stops[i - 1] > start) or (i < len(self._starts) and self._starts[i] < stop):
            raise RuntimeError(f"{self.tensor.name}: bytes {start}:{stop} are written twice")
        after = i > 0 and self._stops[i - 1] == start
        before = i < len(self._starts) and self._starts[i] == stop
        self._starts[i - after : i + before] = [self._starts[i - 1] if after else start]
        self._stops[i - after : i + before] = [self._stops[i] if before else stop]

    def _advance(self, count: int) -> None:
        """So many bytes more are in the hash."""
        self._hashed += count
        if self._hashed == self._first:
            self.first_hash = self._hash.hexdigest()

    def digest(self) -> str:
        """Hash of the tensor's bytes; what could not be hashed while it was written is read back."""
        buffer = memoryview(bytearray(min(_CHUNK_BYTES, self.tensor.nbytes - self._hashed)))
        while self._hashed < self.tensor.nbytes:
            stop = self._first if self._first is not None and self._hashed < self._first else self.tensor.nbytes
            chunk = buffer[: stop - self._hashed]
            read_into(self._file.fd, chunk, self._offset + self._hashed, self._file.path)
            self._hash.update(chunk)
            self._advance(len(chunk))
        return self._hash.hexdigest()


def _as_bytes(data: Tensor | memoryview | bytes | bytearray, declared: OutputTensor) -> memoryview:
    """The same memory as bytes."""
    if not isinstance(data, memoryview | bytes | bytearray):
        import torch

        from moesaic.checkpoint.reader import DTYPE_CODES

        code = DTYPE_CODES.get(data.dtype)
        assert code == declared.dtype, f"{declared.name}: is declared {declared.dtype}, got {data.dtype}"
        assert data.device.type == "cpu", f"{declared.name}: is on {data.device}, not on the CPU"
        assert data.is_contiguous(), f"{declared.name}: is not contiguous"
        return data.detach().view(-1).view(torch.uint8).numpy().data
    view = memoryview(data).cast("B")
    assert len(view) * 8 % DTYPE_BITS[declared.dtype] == 0, f"{declared.name}: {len(view)} bytes end inside an element"
    return view
