"""Tensors from safetensors files by positional reads into their own memory.

Never mmap: the pages of a mapped file count as resident memory, so a mapped 5 GB shard is a 5 GB peak.

Most of the time of reading a large tensor is the kernel handing out fresh pages: measured, 1.2 GB/s into new memory and
5 to 13 GB/s into memory used before. So large tensors live in blocks that are used again when the tensor is freed.
"""

import mmap
import threading
import weakref
from collections import deque
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from moesaic.checkpoint.headers import TensorInfo
from moesaic.checkpoint.pio import opened, read_into
from moesaic.common.errors import MoesaicError

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
}
"""safetensors dtype code -> torch dtype, for every code whose elements are whole bytes."""

DTYPE_CODES: Mapping[torch.dtype, str] = {dtype: code for code, dtype in TORCH_DTYPES.items()}
"""torch dtype -> safetensors dtype code."""


def read_tensor(info: TensorInfo, start_row: int = 0, stop_row: int | None = None) -> Tensor:
    """The tensor, or its rows `start_row:stop_row` along the first dimension (all the rest when None).

    Contiguous, on the CPU, in the file's dtype; its memory goes to the next call when it is freed. A file that is
    missing or was cut since its header was read is a MoesaicError.
    """
    offset, nbytes, shape = _row_range(info, start_row, stop_row)
    return read_range(info, offset - info.offset, nbytes).view(shape)


def read_range(info: TensorInfo, start: int, nbytes: int) -> Tensor:
    """The numbers in `nbytes` bytes of a tensor from its byte `start` on, in one dimension (see `read_tensor`)."""
    if info.dtype not in TORCH_DTYPES:
        raise MoesaicError(f"{info.file}: tensor {info.name!r} is {info.dtype}, which torch cannot hold")
    if info.codes is not None:
        size = TORCH_DTYPES[info.dtype].itemsize
        blocks = [values for _, values in info.codes.blocks(start // size, (start + nbytes) // size)]
        return torch.cat(blocks)
    bytes_N = torch.empty(nbytes, dtype=torch.uint8) if nbytes < SMALL_BYTES else torch.from_numpy(POOL.take(nbytes))
    with opened(info.file) as fd:
        read_into(fd, bytes_N.numpy().data, info.offset + start, info.file)
    return bytes_N.view(TORCH_DTYPES[info.dtype])


def _row_range(info: TensorInfo, start: int, stop: int | None) -> tuple[int, int, tuple[int, ...]]:
    """Absolute offset, size in bytes and shape of some rows of a tensor."""
    if start == 0 and stop is None:
        return info.offset, info.nbytes, info.shape
    assert info.shape, f"{info.name}: a scalar has no rows"
    rows = info.shape[0]
    stop = rows if stop is None else stop
    assert 0 <= start <= stop <= rows, f"{info.name}: no rows {start}:{stop} in {rows}"
    row_bytes = info.nbytes // max(rows, 1)
    return info.offset + start * row_bytes, (stop - start) * row_bytes, (stop - start, *info.shape[1:])


# --- memory that is used again ----------------------------------------------------------------------------------------

SMALL_BYTES = 1 << 20
"""Below this the allocator of the C library does the same."""

_HUGE_PAGE = 2 << 20


class BufferPool:
    """Blocks of anonymous memory; at most `idle_bytes` are kept while nobody uses them."""

    def __init__(self, idle_bytes: int):
        self._idle_bytes = idle_bytes
        self._idle: list[mmap.mmap] = []
        self._lock = threading.Lock()
        # Filled by finalizers, which may run anywhere, even inside `take`: so they never wait for the lock.
        self._returned: deque[mmap.mmap] = deque()

    def take(self, nbytes: int) -> np.ndarray:
        """A writable uint8 array of `nbytes` with any content; its block comes back when the array is freed."""
        with self._lock:
            self._collect()
            block = self._best(nbytes)
        if block is None:
            # Private: shared memory is not what `ulimit -d` counts, and seldom gets huge pages.
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            block = mmap.mmap(-1, -(-nbytes // _HUGE_PAGE) * _HUGE_PAGE, flags=flags)
            block.madvise(mmap.MADV_HUGEPAGE)
        array = np.frombuffer(block, dtype=np.uint8, count=nbytes)
        weakref.finalize(array, self._give_back, block).atexit = False
        return array

    def _give_back(self, block: mmap.mmap) -> None:
        self._returned.append(block)
        if self._lock.acquire(blocking=False):
            try:
                self._collect()
            finally:
                self._lock.release()

    def _best(self, nbytes: int) -> mmap.mmap | None:
        fitting = [block for block in self._idle if nbytes <= len(block) <= max(2 * nbytes, _HUGE_PAGE)]
        if not fitting:
            return None
        best = min(fitting, key=len)
        self._idle.remove(best)
        return best

    def _collect(self) -> None:
        while self._returned:
            self._idle.append(self._returned.popleft())
        while sum(map(len, self._idle)) > self._idle_bytes:
            self._idle.pop(0)


POOL = BufferPool(idle_bytes=128 << 20)
"""The one that `read_range` uses."""
