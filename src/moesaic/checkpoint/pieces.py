"""What the tensors of a new checkpoint are made of: bytes of stored tensors, computed ones, gaps that work fills.

No dtype changes and no arithmetic touches what is copied.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor

from moesaic.checkpoint.headers import DTYPE_BITS, TensorInfo
from moesaic.checkpoint.layout import OutputTensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """`nbytes` consecutive bytes of a stored tensor, from its byte `start` on; without a source, a gap for `Work`."""

    source: TensorInfo | None
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
        stored = (run.source for run in self.runs if run.source is not None)
        return tuple({(source.file, source.name): source for source in stored}.values())

    @property
    def begins_with(self) -> TensorInfo | None:
        """The stored tensor whose bytes, all of them in their order, come first."""
        first = self.runs[0]
        return first.source if first.source is not None and first.source.nbytes == first.nbytes else None


@dataclass(frozen=True, kw_only=True)
class ComputedTensor:
    """A small output tensor that is computed, in the dtype and shape of `output`, from `sources`."""

    output: OutputTensor
    sources: tuple[TensorInfo, ...]
    compute: Callable[[], Tensor]


NewTensor = CopiedTensor | ComputedTensor

Put = Callable[[str, int, Tensor], None]
"""(output tensor, number of its first element, contiguous values of its dtype)."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """One independent computation that fills gaps of copied tensors."""

    sources: tuple[TensorInfo, ...]
    run: Callable[[Put], None]


def whole(source: TensorInfo, name: str | None = None) -> CopiedTensor:
    """A stored tensor as it is, under its own name or another."""
    output = OutputTensor(name=name or source.name, dtype=source.dtype, shape=source.shape)
    return CopiedTensor(output=output, runs=(Run(source=source, start=0, nbytes=source.nbytes),))


def gap(source: TensorInfo, name: str) -> CopiedTensor:
    """A tensor of the dtype and shape of a stored one that `Work` fills."""
    output = OutputTensor(name=name, dtype=source.dtype, shape=source.shape)
    return CopiedTensor(output=output, runs=(Run(source=None, start=0, nbytes=output.nbytes),))


def slot_tensor(name: str, picks: Sequence[tuple[TensorInfo, int] | None], *, axis: int = 0) -> CopiedTensor:
    """The tensor whose slot i along `axis` is slot `picks[i][1]` of the stored tensor `picks[i][0]` (None: a gap).

    All stored tensors have one dtype and, but for `axis`, one shape; at least one slot is no gap.
    """
    first = next(pick[0] for pick in picks if pick is not None)
    around = (first.shape[:axis], first.shape[axis + 1 :], first.dtype)
    inner = prod(first.shape[axis + 1 :]) * DTYPE_BITS[first.dtype] // 8
    for source, slot in filter(None, picks):
        assert (source.shape[:axis], source.shape[axis + 1 :], source.dtype) == around, source.name
        assert 0 <= slot < source.shape[axis], (source.name, slot)

    def run(pick: tuple[TensorInfo, int] | None, outer: int) -> Run:
        if pick is None:
            return Run(source=None, start=0, nbytes=inner)
        source, slot = pick
        return Run(source=source, start=(outer * source.shape[axis] + slot) * inner, nbytes=inner)

    pieces = (run(pick, outer) for outer in range(prod(first.shape[:axis])) for pick in picks)
    shape = (*first.shape[:axis], len(picks), *first.shape[axis + 1 :])
    return CopiedTensor(output=OutputTensor(name=name, dtype=first.dtype, shape=shape), runs=tuple(_joined(pieces)))


def concatenated(name: str, shape: tuple[int, ...], parts: Sequence[TensorInfo | int]) -> CopiedTensor:
    """A tensor of `shape` that is whole stored tensors one after the other; a number is a gap of so many bytes."""
    dtype = next(part.dtype for part in parts if isinstance(part, TensorInfo))
    runs = []
    for part in parts:
        if isinstance(part, int):
            runs.append(Run(source=None, start=0, nbytes=part))
        else:
            assert part.dtype == dtype, (part.name, part.dtype, dtype)
            runs.append(Run(source=part, start=0, nbytes=part.nbytes))
    tensor = CopiedTensor(output=OutputTensor(name=name, dtype=dtype, shape=shape), runs=tuple(_joined(runs)))
    assert sum(run.nbytes for run in runs) == tensor.output.nbytes, (name, shape)
    return tensor


def _joined(runs: Iterable[Run]) -> Iterator[Run]:
    """The same bytes in as few runs as possible."""
    last: Run | None = None
    for run in runs:
        if last is not None and last.source is run.source is not None and run.start == last.start + last.nbytes:
            last = Run(source=last.source, start=last.start, nbytes=last.nbytes + run.nbytes)
            continue
        if last is not None:
            yield last
        last = run
    if last is not None:
        yield last
