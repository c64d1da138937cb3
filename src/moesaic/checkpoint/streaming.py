"""Pieces of tensors that are not there yet, and how they stream from files into their places (see `lazy`).

Torch is imported when numbers are changed or made, not before: planning needs none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from moesaic.checkpoint.headers import DTYPE_BITS, TensorInfo
from moesaic.checkpoint.pio import opened, read_into

if TYPE_CHECKING:
    import torch
    from torch import Tensor

COPY_BYTES = 512 << 10
"""Bytes that only move, at a time: a block stays in the cache while it is checked, hashed and written."""

BLOCK_BYTES = 4 << 20
"""Numbers that steps change, at a time."""

Step = Callable[["Tensor"], "Tensor"]
"""A function of each number by itself; it may change its argument. Only steps that compare equal are taken as one."""

Put = Callable[[str, int, Any], None]
"""(name of a tensor, number of its first element, contiguous values of its dtype or their bytes)."""

Blocks = Callable[[], Iterator[tuple[int, int, "Tensor"]]]
"""Makes numbers: (number of the part, its first element, contiguous values), each element of each part once.

A block may be changed by who gets it, and may be overwritten by the next one.
"""


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


def cut(pieces: Iterable[Piece], first: int, size: int) -> Iterator[Piece]:
    """The pieces of the elements `first` to `first + size`."""
    position, last = 0, first + size
    for piece in pieces:
        low, high = max(first - position, 0), min(last - position, piece.size)
        if low < high:
            yield piece.cut(low, high - low)
        position += piece.size


def columns_of(piece: Piece, row: int, start: int, length: int) -> Region:
    """Some columns of a piece that is whole rows of `row` elements."""
    assert isinstance(piece, Region), "columns of what is computed; compute the ones that are needed"
    width = piece.bytes_of(row)
    rows, rest = divmod(piece.width, width)
    assert rest == 0, f"{piece.source.name}: its columns were cut before"
    assert piece.count == 1 or rows == 1, piece
    stride = piece.stride if piece.count > 1 else width
    begin = piece.start + piece.bytes_of(start)
    return replace(piece, start=begin, width=piece.bytes_of(length), count=piece.count * rows, stride=stride)


def joined(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """The same numbers in as few pieces as possible."""
    made: list[Piece] = []
    for piece in pieces:
        last = made[-1] if made else None
        if isinstance(last, Region) and isinstance(piece, Region) and _adjoining(last, piece):
            made[-1] = replace(last, width=last.width + piece.width)
        else:
            made.append(piece)
    return tuple(made)


def _adjoining(one: Region, other: Region) -> bool:
    runs = one.count == other.count == 1 and one.source is other.source and one.steps == other.steps
    return runs and other.start == one.start + one.width


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


def units(tensors: Iterable[tuple[str, str, Sequence[Piece]]]) -> list[Unit]:
    """All that there is to do for tensors (name, dtype, pieces): together the units put every element of each once.

    A tensor's stored pieces are one unit. Makers that fill the same tensors are one unit too: nothing that one of them
    made is kept while the next runs, however many threads there are.
    """
    chains: dict[frozenset[str], list[list[_Place]]] = defaultdict(list)
    copies: list[list[_Place]] = []
    makers: dict[Maker, list[_Place]] = defaultdict(list)
    for name, dtype, pieces in tensors:
        regions: list[_Place] = []
        start = 0
        for piece in pieces:
            place = _Place(name=name, start=start, dtype=dtype, piece=piece)
            (makers[piece.maker] if isinstance(piece, Made) else regions).append(place)
            start += piece.size
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
            put(place.name, place.start + start, stepped(own, place.piece.steps, place.dtype))


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
        put(place.name, place.start + start, stepped(read_region(part), part.steps, place.dtype))


def _copy_columns(members: list[tuple[_Place, Region]], put: Put) -> None:
    """Columns of the same rows of one matrix: a block of whole rows is read once and cut for all of them."""
    place, first = members[0]
    bits = DTYPE_BITS[first.source.dtype]
    begin = first.start // first.stride * first.stride
    step = max(BLOCK_BYTES // first.stride, 1)
    for row in range(0, first.count, step):
        rows = min(step, first.count - row)
        whole = replace(first, start=begin + row * first.stride, width=rows * first.stride, count=1)
        block = stepped(read_region(whole), first.steps, place.dtype).view(rows, -1)
        for place, region in members:
            column, width = (region.start - begin) * 8 // bits, region.width * 8 // bits
            put(place.name, place.start + row * width, block[:, column : column + width].contiguous())


def read_region(region: Region) -> Tensor:
    """The stored numbers of consecutive bytes, before any steps, in one dimension."""
    from moesaic.checkpoint.reader import read_range

    assert region.count == 1, region
    return read_range(region.source, region.start, region.width)


def stepped(values: Tensor, steps: Sequence[Step], dtype: str) -> Tensor:
    """The values after the steps, contiguous, rounded to `dtype` if they are wider."""
    for step in steps:
        values = step(values)
    return values.to(torch_dtype(dtype)).contiguous()


def torch_dtype(code: str) -> torch.dtype:
    """The torch dtype of a safetensors code."""
    from moesaic.checkpoint.reader import TORCH_DTYPES

    return TORCH_DTYPES[code]
