"""Stored matrices, or some of their rows, before it is decided which tensor they become. No arithmetic."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from moesaic.checkpoint.headers import DTYPE_BITS, TensorInfo
from moesaic.checkpoint.pieces import CopiedTensor, Run
from moesaic.checkpoint.pio import explained, read_into
from moesaic.checkpoint.reader import TORCH_DTYPES
from moesaic.checkpoint.writer import OutputTensor


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Consecutive rows (slices along the first axis) of stored tensors: `runs` one after the other have `shape`."""

    dtype: str
    shape: tuple[int, ...]
    runs: tuple[Run, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return prod(self.shape) * DTYPE_BITS[self.dtype] // 8

    @property
    def sources(self) -> tuple[TensorInfo, ...]:
        """The stored tensors that they are taken from."""
        return tuple(run.source for run in self.runs if run.source is not None)


def stored(info: TensorInfo) -> Rows:
    """A stored tensor as it is."""
    return Rows(dtype=info.dtype, shape=info.shape, runs=(Run(source=info, start=0, nbytes=info.nbytes),))


def part(rows: Rows, start: int, stop: int) -> Rows:
    """The rows from `start` to before `stop`."""
    assert 0 <= start < stop <= rows.shape[0], (start, stop, rows.shape)
    size = rows.nbytes // rows.shape[0]
    first, last, position = start * size, stop * size, 0
    runs = []
    for run in rows.runs:
        low, high = max(first - position, 0), min(last - position, run.nbytes)
        if low < high:
            runs.append(Run(source=run.source, start=run.start + low, nbytes=high - low))
        position += run.nbytes
    return Rows(dtype=rows.dtype, shape=(stop - start, *rows.shape[1:]), runs=tuple(runs))


def slot(info: TensorInfo, index: int) -> Rows:
    """One slot of a stacked tensor, without the axis of the experts."""
    rows = part(stored(info), index, index + 1)
    return Rows(dtype=rows.dtype, shape=rows.shape[1:], runs=rows.runs)


def joined(parts: Sequence[Rows]) -> Rows:
    """Matrices one below the other."""
    first = parts[0]
    assert all(one.dtype == first.dtype and one.shape[1:] == first.shape[1:] for one in parts), first
    rows = sum(one.shape[0] for one in parts)
    return Rows(dtype=first.dtype, shape=(rows, *first.shape[1:]), runs=tuple(run for one in parts for run in one.runs))


def stacked(parts: Sequence[Rows]) -> Rows:
    """Matrices of one shape along a new first axis."""
    whole = joined(parts)
    return Rows(dtype=whole.dtype, shape=(len(parts), *parts[0].shape), runs=whole.runs)


def tensor(name: str, rows: Rows) -> CopiedTensor:
    """The output tensor that these rows become."""
    return CopiedTensor(output=OutputTensor(name=name, dtype=rows.dtype, shape=rows.shape), runs=rows.runs)


def read_run(run: Run, start: int = 0, nbytes: int | None = None) -> bytearray:
    """Some of the bytes of a run, all of them by default."""
    assert run.source is not None
    data = bytearray(run.nbytes - start if nbytes is None else nbytes)
    with explained(run.source.file):
        fd = os.open(run.source.file, os.O_RDONLY)
    try:
        read_into(fd, memoryview(data), run.source.offset + run.start + start, run.source.file)
    finally:
        os.close(fd)
    return data


def read(rows: Rows) -> Tensor:
    """The values, in the dtype of the file."""
    data = bytearray().join(read_run(run) for run in rows.runs)
    return torch.frombuffer(data, dtype=TORCH_DTYPES[rows.dtype]).reshape(rows.shape)
