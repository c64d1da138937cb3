"""Tensors that are not there yet: what they will be made of, and how they stream from files into their places.

A lazy tensor is a row of pieces, one after the other in row-major order. A piece is bytes of a stored tensor (a run of
them, or equal runs at equal distances: the columns of a matrix) or part of what a function makes. So cutting, stacking
and choosing slots only move pieces; arithmetic is noted on them as steps, which act on blocks of numbers while these go
from file to file. Bytes without steps are copied as bytes. Importing this imports no torch.

    experts = [down.columns(j * width, (j + 1) * width) * 2.0 for j in range(4)]
    tensors = {"experts.down_proj": stack(experts).cast("BF16"), "router": computed((4, 64), "F32", function)}

`write.write` makes a checkpoint of them, `read` gives one in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any

from moesaic.checkpoint.headers import DTYPE_BITS, TensorInfo, tensor_bytes
from moesaic.checkpoint.streaming import (
    BLOCK_BYTES,
    Made,
    Maker,
    Piece,
    Region,
    Step,
    columns_of,
    cut,
    joined,
    read_region,
    stepped,
    torch_dtype,
    units,
)
from moesaic.common import seeds

if TYPE_CHECKING:
    from torch import Tensor

_MEAN_BYTES = 512 << 10
"""A block in float64 takes four times that for bf16: it and its sum stay in the second-level cache."""


@dataclass(frozen=True, slots=True)
class Cast:
    """Another dtype, rounded to nearest."""

    code: str

    def __call__(self, values: Tensor) -> Tensor:
        """The values in that dtype."""
        return values.to(torch_dtype(self.code))


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """`mul_` or `div_` with a number, rounded once: torch computes 16-bit floats in float32, in place as well."""

    method: str
    number: float

    def __call__(self, values: Tensor) -> Tensor:
        """The results, in place."""
        return getattr(values, self.method)(self.number)


@dataclass(frozen=True, kw_only=True, slots=True)
class Lazy:
    """A tensor of safetensors dtype `dtype` ("BF16") that is `pieces` one after the other, row-major."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...] = field(repr=False)

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return tensor_bytes(self.dtype, self.shape)

    @property
    def sources(self) -> tuple[TensorInfo, ...]:
        """The stored tensors that it is made of, each once."""
        found = (piece.maker.sources if isinstance(piece, Made) else (piece.source,) for piece in self.pieces)
        return tuple({(info.file, info.name): info for infos in found for info in infos}.values())

    @property
    def begins_with(self) -> TensorInfo | None:
        """The stored tensor whose bytes, all of them as they are, come first: copying them tells their hash."""
        first = self.pieces[0] if self.pieces else None
        return first.source if isinstance(first, Region) and first.whole else None

    def rows(self, start: int, stop: int) -> Lazy:
        """Rows `start` to before `stop`: slices along the first axis."""
        return self.narrow(0, start, stop - start)

    def columns(self, start: int, stop: int) -> Lazy:
        """Columns `start` to before `stop` of a matrix of stored numbers (steps included)."""
        return self.narrow(-1, start, stop - start)

    def index(self, number: int) -> Lazy:
        """Slot `number` along the first axis, without that axis."""
        return self.narrow(0, number, 1).reshape(*self.shape[1:])

    def narrow(self, axis: int, start: int, length: int) -> Lazy:
        """As `Tensor.narrow`, along the first axis, or along the last one of a matrix."""
        axis %= len(self.shape)
        assert 0 <= start <= start + length <= self.shape[axis], (start, length, self.shape)
        shape = (*self.shape[:axis], length, *self.shape[axis + 1 :])
        if axis == 0:
            inner = prod(self.shape[1:])
            return replace(self, shape=shape, pieces=tuple(cut(self.pieces, start * inner, length * inner)))
        assert axis == len(self.shape) - 1 == 1, f"no slices along axis {axis} of {self.shape}; see `take`"
        row = self.shape[1]
        if length == row:
            return self
        return replace(self, shape=shape, pieces=tuple(columns_of(one, row, start, length) for one in self.pieces))

    def take(self, slots: Sequence[int], axis: int = 0) -> Lazy:
        """As `Tensor.index_select`: the slots of these numbers along `axis`, in this order, repeated or not."""
        outer, count, inner = prod(self.shape[:axis]), self.shape[axis], prod(self.shape[axis + 1 :])
        assert all(0 <= slot < count for slot in slots), (slots, self.shape)
        starts = ((row * count + slot) * inner for row in range(outer) for slot in slots)
        pieces = (piece for start in starts for piece in cut(self.pieces, start, inner))
        shape = (*self.shape[:axis], len(slots), *self.shape[axis + 1 :])
        return replace(self, shape=shape, pieces=joined(pieces))

    def reshape(self, *shape: int) -> Lazy:
        """The same numbers under another shape."""
        assert prod(shape) == self.size, (shape, self.shape)
        return replace(self, shape=shape)

    def map(self, step: Step, dtype: str | None = None) -> Lazy:
        """`step` of every number, which gives numbers of `dtype` (default: the same)."""
        pieces = tuple(replace(piece, steps=(*piece.steps, step)) for piece in self.pieces)
        return replace(self, dtype=dtype or self.dtype, pieces=pieces)

    def cast(self, dtype: str) -> Lazy:
        """Another dtype, rounded to nearest."""
        return self if dtype == self.dtype else self.map(Cast(dtype), dtype)

    def __mul__(self, factor: float) -> Lazy:
        """Times a factor, in its own dtype: cast before, where the product should be rounded to a wider one."""
        return self if factor == 1.0 else self.map(Arithmetic("mul_", factor))

    def __truediv__(self, divisor: float) -> Lazy:
        """Divided by a number, in its own dtype."""
        return self if divisor == 1.0 else self.map(Arithmetic("div_", divisor))

    def read(self) -> Tensor:
        """The numbers, contiguous, in memory of their own."""
        import torch

        only = self.pieces[0] if len(self.pieces) == 1 else None
        if isinstance(only, Region) and only.count == 1:
            return stepped(read_region(only), only.steps, self.dtype).view(self.shape)
        values = torch.empty(self.shape, dtype=torch_dtype(self.dtype))
        flat = values.view(-1)

        def put(_: str, start: int, block: Any) -> None:
            part = block if isinstance(block, torch.Tensor) else torch.frombuffer(block, dtype=flat.dtype)
            flat[start : start + part.numel()] = part.view(-1)

        for unit in units([("", self.dtype, self.pieces)]):
            unit.run(put)
        return values


def stored(info: TensorInfo) -> Lazy:
    """A stored tensor as it is."""
    return Lazy(dtype=info.dtype, shape=info.shape, pieces=(Region(source=info, start=0, width=info.nbytes),))


def concat(parts: Sequence[Lazy], axis: int = 0) -> Lazy:
    """As `torch.cat`, of one dtype, along the first axis, or along the last one of matrices."""
    first = parts[0]
    axis %= len(first.shape)
    around = (first.dtype, first.shape[:axis], first.shape[axis + 1 :])
    assert all((one.dtype, one.shape[:axis], one.shape[axis + 1 :]) == around for one in parts), parts
    shape = (*first.shape[:axis], sum(one.shape[axis] for one in parts), *first.shape[axis + 1 :])
    if axis:
        return _side_by_side(parts, shape)
    pieces = (piece for one in parts for piece in one.pieces)
    return Lazy(dtype=first.dtype, shape=shape, pieces=joined(pieces))


def stack(parts: Sequence[Lazy]) -> Lazy:
    """As `torch.stack`, along a new first axis."""
    assert all(one.shape == parts[0].shape for one in parts), parts
    return concat([one.reshape(1, *one.shape) for one in parts])


def combine(
    function: Callable[[list[Tensor]], Tensor], parts: Sequence[Lazy], dtype: str, *, block_bytes: int = BLOCK_BYTES
) -> Lazy:
    """`function` of the numbers of several tensors at the same place, by blocks; `function` may change its arguments.

    It may give a wider dtype than `dtype`, and is then rounded. Its sources are those of all parts.
    """
    first = parts[0]
    assert all(one.shape == first.shape for one in parts), parts
    step = max(block_bytes * 8 // DTYPE_BITS[first.dtype], 1)
    flat = [one.reshape(one.size) for one in parts]

    def blocks() -> Iterator[tuple[int, Tensor]]:
        for start in range(0, first.size, step):
            stop = min(start + step, first.size)
            yield start, function([one.rows(start, stop).read() for one in flat])

    return blockwise(first.shape, dtype, blocks, parts)


def mean(parts: Sequence[Lazy]) -> Lazy:
    """The mean in float64 (cast it to what is wanted); of one tensor: that tensor as it is.

    A sum of up to 2^29 equal float32 values is exact in float64, so the mean of equal tensors is that tensor.
    """
    return parts[0] if len(parts) == 1 else combine(_mean, parts, "F64", block_bytes=_MEAN_BYTES)


def _mean(values: list[Tensor]) -> Tensor:
    total = values[0].double()
    for other in values[1:]:
        total += other
    return total.div_(len(values))


def normal(shape: Sequence[int], std: float, seed: int, *purpose: str | int) -> Lazy:
    """Draws from N(0, std) in float32, from a generator of their own (see `seeds.generator`)."""
    return blockwise(shape, "F32", lambda: seeds.normal_blocks(prod(shape), std, seeds.generator(seed, *purpose)))


def computed(shape: Sequence[int], dtype: str, function: Callable[[], Tensor], parts: Sequence[Lazy] = ()) -> Lazy:
    """What `function` gives when it is written, rounded to `dtype`; `parts` are what it reads, for the record."""
    return together({"": (shape, dtype)}, lambda: {"": function()}, parts)[""]


def together(
    outputs: Mapping[str, tuple[Sequence[int], str]],
    function: Callable[[], Mapping[str, Tensor]],
    parts: Iterable[Lazy] = (),
) -> dict[str, Lazy]:
    """Several tensors that one call of `function` gives: key -> (shape, dtype), and key -> values.

    `parts` are what it reads, for the record. The values are dropped before another such call into the same outputs.
    """
    keys = list(outputs)

    def blocks() -> Iterator[tuple[int, int, Tensor]]:
        made = function()
        for number, key in enumerate(keys):
            assert tuple(made[key].shape) == tuple(outputs[key][0]), (key, made[key].shape, outputs[key])
            yield number, 0, made[key]

    maker = Maker(sources=_all_sources(parts), blocks=blocks)
    return {
        key: Lazy(dtype=dtype, shape=tuple(shape), pieces=(Made(maker=maker, number=number, size=prod(shape)),))
        for number, (key, (shape, dtype)) in enumerate(outputs.items())
    }


def blockwise(
    shape: Sequence[int], dtype: str, function: Callable[[], Iterator[tuple[int, Tensor]]], parts: Iterable[Lazy] = ()
) -> Lazy:
    """What `function` yields when it is written, by blocks: (number of the first element, values)."""
    maker = Maker(sources=_all_sources(parts), blocks=lambda: ((0, start, values) for start, values in function()))
    return Lazy(dtype=dtype, shape=tuple(shape), pieces=(Made(maker=maker, number=0, size=prod(shape)),))


def promoted(*codes: str) -> str:
    """The narrowest of the float dtypes F64, F32, F16 and BF16 that holds the numbers of all of these."""
    kinds = set(codes)
    assert kinds <= {"F64", "F32", "F16", "BF16"}, kinds
    return "F64" if "F64" in kinds else kinds.pop() if len(kinds) == 1 else "F32"


def _all_sources(parts: Iterable[Lazy]) -> tuple[TensorInfo, ...]:
    return tuple({(info.file, info.name): info for part in parts for info in part.sources}.values())


def _side_by_side(parts: Sequence[Lazy], shape: tuple[int, ...]) -> Lazy:
    """Matrices beside each other: blocks of rows, of each matrix once."""
    once = {id(one): one for one in parts}
    step = max(BLOCK_BYTES // max(parts[0].nbytes // max(shape[0], 1), 1), 1)

    def blocks() -> Iterator[tuple[int, Tensor]]:
        import torch

        for start in range(0, shape[0], step):
            read = {key: one.rows(start, min(start + step, shape[0])).read() for key, one in once.items()}
            yield start * shape[1], torch.cat([read[id(one)] for one in parts], dim=1)

    return blockwise(shape, parts[0].dtype, blocks, parts)
