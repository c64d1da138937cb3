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

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

from moesaic.checkpoint.headers import DTYPE_BITS, TensorInfo, tensor_bytes
from moesaic.checkpoint.pio import opened, read_into
from moesaic.common import seeds

if TYPE_CHECKING:
    import torch
    from torch import Tensor

COPY_BYTES = 512 << 10
"""Bytes that only move, at a time: a block stays in the cache while it is checked, hashed and written."""

BLOCK_BYTES = 4 << 20
"""Numbers that steps change, at a time."""

_MEAN_BYTES = 512 << 10
"""A block in float64 takes four times that for bf16: it and its sum stay in the second-level cache."""

Step = Callable[["Tensor"], "Tensor"]
"""A function of each number by itself; it may change its argument. Equal steps are equal as objects."""

Put = Callable[[str, int, Any], None]
"""(name of a tensor, number of its first element, contiguous values of its dtype or their bytes)."""

Blocks = Callable[[], Iterator[tuple[int, int, "Tensor"]]]
"""Makes numbers: (number of the part, its first element, contiguous values), each element of each part once.

A block may be changed by who gets it, and may be overwritten by the next one.
"""


# --- pieces -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """`count` runs of `width` bytes of a stored tensor, from its byte `start` on, each `stride` bytes after the last.

    The stride is a row of the stored matrix: bytes `start // stride * stride` on are whole rows.
    """

    source: TensorInfo
    start: int
    width: int
    count: int = 1
    stride: int = 0
    steps: tuple[Step, ...] = ()

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.width * self.count * 8 // DTYPE_BITS[self.source.dtype]

    def cut(self, first: int, size: int) -> Region:
        """The elements `first` to `first + size`."""
        if size == self.size:
            return self
        start, nbytes = self.bytes_of(first), self.bytes_of(size)
        if self.count == 1:
            return replace(self, start=self.start + start, width=nbytes)
        assert start % self.width == nbytes % self.width == 0, f"{self.source.name}: columns are cut at whole rows"
        rows, count = start // self.width, nbytes // self.width
        return replace(self, start=self.start + rows * self.stride, count=count)

    def bytes_of(self, elements: int) -> int:
        """Bytes of so many stored elements."""
        return elements * DTYPE_BITS[self.source.dtype] // 8

    @property
    def whole(self) -> bool:
        """Whether it is a stored tensor as it is."""
        return self.count == 1 and self.width == self.source.nbytes and not self.steps


@dataclass(frozen=True, kw_only=True, eq=False)
class Maker:
    """One computation, whose numbers may go to several tensors; `sources` are the stored tensors that it reads."""

    sources: tuple[TensorInfo, ...]
    blocks: Blocks


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """All of part `number` of what a maker makes."""

    maker: Maker
    number: int
    size: int
    steps: tuple[Step, ...] = ()

    def cut(self, first: int, size: int) -> Made:
        """Only all of it: what is computed is not cut."""
        assert (first, size) == (0, self.size), "what is computed cannot be cut; compute the part that is needed"
        return self


Piece = Region | Made


@dataclass(frozen=True, slots=True)
class Cast:
    """Another dtype, rounded to nearest."""

    code: str

    def __call__(self, values: Tensor) -> Tensor:
        """The values in that dtype."""
        return values.to(torch_dtype(self.code))


@dataclass(frozen=True, slots=True)
class Times:
    """Times a factor, rounded once: torch multiplies 16-bit floats in float32, in place as well."""

    factor: float

    def __call__(self, values: Tensor) -> Tensor:
        """The products, in place."""
        return values.mul_(self.factor)


@dataclass(frozen=True, slots=True)
class Divided:
    """Divided by a number, rounded once."""

    divisor: float

    def __call__(self, values: Tensor) -> Tensor:
        """The quotients, in place."""
        return values.div_(self.divisor)


# --- lazy tensors -----------------------------------------------------------------------------------------------------


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
            return replace(self, shape=shape, pieces=tuple(_cut(self.pieces, start * inner, length * inner)))
        assert axis == len(self.shape) - 1 == 1, f"no slices along axis {axis} of {self.shape}; see `take`"
        if length == self.shape[1]:
            return self
        return replace(self, shape=shape, pieces=tuple(_columns(p, self.shape[1], start, length) for p in self.pieces))

    def take(self, slots: Sequence[int], axis: int = 0) -> Lazy:
        """As `Tensor.index_select`: the slots of these numbers along `axis`, in this order, repeated or not."""
        outer, count, inner = prod(self.shape[:axis]), self.shape[axis], prod(self.shape[axis + 1 :])
        assert all(0 <= slot < count for slot in slots), (slots, self.shape)
        starts = ((row * count + slot) * inner for row in range(outer) for slot in slots)
        pieces = (piece for start in starts for piece in _cut(self.pieces, start, inner))
        shape = (*self.shape[:axis], len(slots), *self.shape[axis + 1 :])
        return replace(self, shape=shape, pieces=tuple(_joined(pieces)))

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
        return self if factor == 1.0 else self.map(Times(factor))

    def __truediv__(self, divisor: float) -> Lazy:
        """Divided by a number, in its own dtype."""
        return self if divisor == 1.0 else self.map(Divided(divisor))

    def read(self) -> Tensor:
        """The numbers, contiguous, in memory of their own."""
        import torch

        only = self.pieces[0] if len(self.pieces) == 1 else None
        if isinstance(only, Region) and only.count == 1:
            return _stepped(_read(only), only.steps, self.dtype).view(self.shape)
        values = torch.empty(self.shape, dtype=torch_dtype(self.dtype))
        flat = values.view(-1)

        def put(_: str, start: int, block: Any) -> None:
            part = block if isinstance(block, torch.Tensor) else torch.frombuffer(block, dtype=flat.dtype)
            flat[start : start + part.numel()] = part.view(-1)

        for unit in units({"": self}):
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
    return Lazy(dtype=first.dtype, shape=shape, pieces=tuple(_joined(pieces)))


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

    def blocks() -> Iterator[tuple[int, int, Tensor]]:
        for start in range(0, first.size, step):
            stop = min(start + step, first.size)
            yield 0, start, function([one.rows(start, stop).read() for one in flat])

    return _made(first.shape, dtype, parts, blocks)


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

    def blocks() -> Iterator[tuple[int, int, Tensor]]:
        for start, values in seeds.normal_blocks(prod(shape), std, seeds.generator(seed, *purpose)):
            yield 0, start, values

    return _made(shape, "F32", (), blocks)


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


def blockwise(shape: Sequence[int], dtype: str, function: Callable[[], Iterator[tuple[int, Tensor]]]) -> Lazy:
    """What `function` yields when it is written, by blocks: (number of the first element, values)."""
    return _made(shape, dtype, (), lambda: ((0, start, values) for start, values in function()))


def torch_dtype(code: str) -> torch.dtype:
    """The torch dtype of a safetensors code."""
    from moesaic.checkpoint.reader import TORCH_DTYPES

    return TORCH_DTYPES[code]


def promoted(*codes: str) -> str:
    """The narrowest of the float dtypes F64, F32, F16 and BF16 that holds the numbers of all of these."""
    kinds = set(codes)
    assert kinds <= {"F64", "F32", "F16", "BF16"}, kinds
    return "F64" if "F64" in kinds else kinds.pop() if len(kinds) == 1 else "F32"


def _made(shape: Sequence[int], dtype: str, parts: Iterable[Lazy], blocks: Blocks) -> Lazy:
    maker = Maker(sources=_all_sources(parts), blocks=blocks)
    return Lazy(dtype=dtype, shape=tuple(shape), pieces=(Made(maker=maker, number=0, size=prod(shape)),))


def _all_sources(parts: Iterable[Lazy]) -> tuple[TensorInfo, ...]:
    return tuple({(info.file, info.name): info for part in parts for info in part.sources}.values())


def _side_by_side(parts: Sequence[Lazy], shape: tuple[int, ...]) -> Lazy:
    """Matrices beside each other: blocks of rows, of each matrix once."""
    once = {id(one): one for one in parts}
    step = max(BLOCK_BYTES // max(parts[0].nbytes // max(shape[0], 1), 1), 1)

    def blocks() -> Iterator[tuple[int, int, Tensor]]:
        import torch

        for start in range(0, shape[0], step):
            read = {key: one.rows(start, min(start + step, shape[0])).read() for key, one in once.items()}
            yield 0, start * shape[1], torch.cat([read[id(one)] for one in parts], dim=1)

    return _made(shape, parts[0].dtype, parts, blocks)


def _cut(pieces: Iterable[Piece], first: int, size: int) -> Iterator[Piece]:
    """The pieces of the elements `first` to `first + size`."""
    position, last = 0, first + size
    for piece in pieces:
        low, high = max(first - position, 0), min(last - position, piece.size)
        if low < high:
            yield piece.cut(low, high - low)
        position += piece.size


def _columns(piece: Piece, row: int, start: int, length: int) -> Region:
    """Some columns of a piece that is whole rows of `row` elements."""
    assert isinstance(piece, Region), "columns of what is computed; compute the ones that are needed"
    width = piece.bytes_of(row)
    rows, rest = divmod(piece.width, width)
    assert rest == 0, f"{piece.source.name}: its columns were cut before"
    assert piece.count == 1 or rows == 1, piece
    stride = piece.stride if piece.count > 1 else width
    begin = piece.start + piece.bytes_of(start)
    return replace(piece, start=begin, width=piece.bytes_of(length), count=piece.count * rows, stride=stride)


def _joined(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """The same numbers in as few pieces as possible."""
    last: Piece | None = None
    for piece in pieces:
        if isinstance(last, Region) and isinstance(piece, Region) and _adjoining(last, piece):
            last = replace(last, width=last.width + piece.width)
            continue
        if last is not None:
            yield last
        last = piece
    if last is not None:
        yield last


def _adjoining(one: Region, other: Region) -> bool:
    return (
        one.count == other.count == 1
        and one.source is other.source
        and other.start == one.start + one.width
        and one.steps == other.steps
    )


# --- streaming --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One independent piece of work, for any thread, at any time."""

    nbytes: int
    """What it writes."""
    computes: bool
    run: Callable[[Put], None]


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Where a piece goes: from element `start` of tensor `name`, which is `dtype`."""

    name: str
    start: int
    dtype: str
    piece: Piece


def units(tensors: Mapping[str, Lazy]) -> list[Unit]:
    """All that there is to do for these tensors: together the units put every element of each once.

    A tensor's stored pieces are one unit. Makers that fill the same tensors are one unit too: nothing that one of them
    made is kept while the next runs, however many threads there are.
    """
    chains: dict[frozenset[str], list[list[_Place]]] = defaultdict(list)
    copies: list[list[_Place]] = []
    makers: dict[Maker, list[_Place]] = defaultdict(list)
    for name, lazy in tensors.items():
        regions: list[_Place] = []
        start = 0
        for piece in lazy.pieces:
            place = _Place(name=name, start=start, dtype=lazy.dtype, piece=piece)
            (makers[piece.maker] if isinstance(piece, Made) else regions).append(place)
            start += piece.size
        assert start == lazy.size, (name, start, lazy.shape)
        if regions:
            copies.append(regions)
    for places in makers.values():
        chains[frozenset(place.name for place in places)].append(places)
    return [
        *(_unit(chain, partial(_make_all, chain), computes=True) for chain in chains.values()),
        *(_unit([places], partial(_copy_all, places), computes=False) for places in copies),
    ]


def _unit(places: list[list[_Place]], run: Callable[[Put], None], *, computes: bool) -> Unit:
    nbytes = sum(place.piece.size * DTYPE_BITS[place.dtype] // 8 for group in places for place in group)
    return Unit(nbytes=nbytes, computes=computes, run=run)


def _make_all(chain: list[list[_Place]], put: Put) -> None:
    for places in chain:
        _make(places, put)  # in a function of its own, so that nothing of one maker is alive in the next


def _make(places: list[_Place], put: Put) -> None:
    first = places[0].piece
    assert isinstance(first, Made)
    for number, start, values in first.maker.blocks():
        targets = [place for place in places if isinstance(place.piece, Made) and place.piece.number == number]
        for place in targets:
            own = values.clone() if len(targets) > 1 else values  # steps may change it
            put(place.name, place.start + start, _stepped(own, place.piece.steps, place.dtype))


def _copy_all(places: list[_Place], put: Put) -> None:
    """Stored pieces of one tensor: runs in their order, then columns by bands of rows, each band read once."""
    bands: dict[Any, list[tuple[_Place, Region]]] = defaultdict(list)
    buffer = memoryview(bytearray(min(COPY_BYTES, max(place.piece.size for place in places) * 8)))
    for place in places:
        region = place.piece
        assert isinstance(region, Region)
        if region.count > 1:
            band = (region.source.file, region.source.name, region.start // region.stride, region.count)
            bands[band, region.stride, region.steps].append((place, region))
        elif region.steps:
            _copy_numbers(place, region, put)
        elif region.width:
            _copy_bytes(place, region, buffer, put)
    for members in bands.values():
        _copy_columns(members, put)


def _copy_bytes(place: _Place, region: Region, buffer: memoryview, put: Put) -> None:
    source, bits = region.source, DTYPE_BITS[place.dtype]
    with opened(source.file) as fd:
        for at in range(0, region.width, len(buffer)):
            block = buffer[: min(len(buffer), region.width - at)]
            read_into(fd, block, source.offset + region.start + at, source.file)
            put(place.name, place.start + at * 8 // bits, block)


def _copy_numbers(place: _Place, region: Region, put: Put) -> None:
    size = BLOCK_BYTES * 8 // DTYPE_BITS[region.source.dtype]
    for start in range(0, region.size, size):
        part = region.cut(start, min(size, region.size - start))
        put(place.name, place.start + start, _stepped(_read(part), part.steps, place.dtype))


def _copy_columns(members: list[tuple[_Place, Region]], put: Put) -> None:
    """Columns of the same rows of one matrix: a block of whole rows is read once and cut for all of them."""
    place, first = members[0]
    bits = DTYPE_BITS[first.source.dtype]
    begin = first.start // first.stride * first.stride
    step = max(BLOCK_BYTES // first.stride, 1)
    for row in range(0, first.count, step):
        rows = min(step, first.count - row)
        whole = replace(first, start=begin + row * first.stride, width=rows * first.stride, count=1)
        block = _stepped(_read(whole), first.steps, place.dtype).view(rows, -1)
        for place, region in members:
            column, width = (region.start - begin) * 8 // bits, region.width * 8 // bits
            put(place.name, place.start + row * width, block[:, column : column + width].contiguous())


def _read(region: Region) -> Tensor:
    """The stored numbers of consecutive bytes, before any steps, in one dimension."""
    from moesaic.checkpoint.reader import read_range

    assert region.count == 1, region
    return read_range(region.source, region.start, region.width)


def _stepped(values: Tensor, steps: Sequence[Step], dtype: str) -> Tensor:
    """The values after the steps, contiguous, rounded to `dtype` if they are wider."""
    for step in steps:
        values = step(values)
    return values.to(torch_dtype(dtype)).contiguous()
