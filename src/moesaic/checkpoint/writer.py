"""Weight files written in place: every header first, then runs of elements at their known positions, in any order."""

import os
import threading
from bisect import bisect_left
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from moesaic.checkpoint.headers import DTYPE_BITS, INDEX_FILE
from moesaic.checkpoint.layout import Layout, OutputFile, OutputTensor
from moesaic.checkpoint.pio import allocate, explained, read_into, start_flush, sync_path, write_all
from moesaic.checkpoint.reader import DTYPE_CODES
from moesaic.checkpoint.record import weights_hash
from moesaic.checkpoint.scan import HASH

_CHUNK_BYTES = 1 << 20  # written, then hashed while it is in the cache
_FLUSH_BYTES = 32 << 20


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
    if isinstance(data, Tensor):
        code = DTYPE_CODES.get(data.dtype)
        assert code == declared.dtype, f"{declared.name}: is declared {declared.dtype}, got {data.dtype}"
        assert data.device.type == "cpu", f"{declared.name}: is on {data.device}, not on the CPU"
        assert data.is_contiguous(), f"{declared.name}: is not contiguous"
        return data.detach().view(-1).view(torch.uint8).numpy().data
    view = memoryview(data).cast("B")
    assert len(view) * 8 % DTYPE_BITS[declared.dtype] == 0, f"{declared.name}: {len(view)} bytes end inside an element"
    return view
