"""Arrays over tokens on disk: .npy files that `numpy.load(mmap_mode="r")` opens, read and written a few rows at a time.

By position and into memory of our own: pages of a mapped file count as this process's memory. Torch-free.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.lib import format as npy

from moesaic.checkpoint.pio import allocate, explained, read_into, write_all
from moesaic.common.errors import MoesaicError


class TokenFile:
    """An array whose first axis is tokens. Use as `with open_tokens(path) as file: file.read(0, 100)`."""

    def __init__(self, path: Path, fd: int, offset: int, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self.path = path
        self.shape = shape
        self.dtype = dtype
        self._fd = fd
        self._offset = offset
        self._row = int(np.prod(shape[1:])) * dtype.itemsize

    def read(self, start: int, stop: int) -> np.ndarray:
        """Rows start to stop, as a new array."""
        rows = np.empty((stop - start, *self.shape[1:]), self.dtype)
        read_into(self._fd, _bytes(rows), self._offset + start * self._row, self.path)
        return rows

    def write(self, start: int, rows: np.ndarray) -> None:
        """Put rows at their place."""
        assert rows.dtype == self.dtype, f"{rows.dtype} into a file of {self.dtype}"
        assert rows.shape[1:] == self.shape[1:], "rows of another shape"
        write_all(self._fd, _bytes(np.ascontiguousarray(rows)), self._offset + start * self._row, self.path)


def _bytes(rows: np.ndarray) -> memoryview:
    return rows.reshape(-1).view(np.uint8).data


@contextmanager
def create_tokens(path: Path, shape: tuple[int, ...], dtype: np.dtype) -> Iterator[TokenFile]:
    """A new file of a known size; its space is reserved at once."""
    with explained(path), path.open("xb+", buffering=0) as raw:
        npy.write_array_header_1_0(raw, {"descr": npy.dtype_to_descr(dtype), "fortran_order": False, "shape": shape})
        offset = raw.tell()
        allocate(raw.fileno(), offset + int(np.prod(shape)) * dtype.itemsize, path)
        yield TokenFile(path, raw.fileno(), offset, shape, dtype)


@contextmanager
def open_tokens(path: Path) -> Iterator[TokenFile]:
    """A file that `create_tokens` or numpy made."""
    with explained(path), path.open("rb", buffering=0) as raw:
        try:
            if npy.read_magic(raw) != (1, 0):
                raise ValueError("another version of the npy format")
            shape, _, dtype = npy.read_array_header_1_0(raw)
        except ValueError as error:
            raise MoesaicError(f"{path}: damaged ({error}); run `moesaic inspect` again") from error
        offset = raw.tell()
        if os.fstat(raw.fileno()).st_size != offset + int(np.prod(shape)) * dtype.itemsize:
            raise MoesaicError(f"{path}: is cut off; run `moesaic inspect` again")
        yield TokenFile(path, raw.fileno(), offset, shape, dtype)
