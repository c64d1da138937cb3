"""Stored tensors on their way: read once to be checked and hashed, or in pieces into new ones (see `lazy`).

Torch and NumPy are imported when numbers are looked at, changed or made, not before: planning needs none.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import xxhash

from moesaic.checkpoint.headers import DTYPE_BITS, TensorInfo
from moesaic.checkpoint.pio import opened, read_into
from moesaic.common.errors import MoesaicError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from moesaic.checkpoint.codes import Codes

COPY_BYTES = 512 << 10
"""Bytes that only move, at a time: a block stays in the cache while it is checked, hashed and written.

256 KiB to 1 MiB measured within 20% of each other.
"""

HASH = xxhash.xxh3_128

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


# --- one pass over stored tensors -------------------------------------------------------------------------------------

# Seen as integers, the finite numbers of a float format are those below the code of infinity, once among the positive
# ones (signed view) and once among the negative ones (unsigned view). So a block is finite if two maxima are small: no
# copy, no conversion, and no dtype that numpy lacks (bf16).
_FLOATS = {
    "F64": ("int64", "uint64", 0x7FF << 52, 0xFFF << 52),
    "F32": ("int32", "uint32", 0x7F800000, 0xFF800000),
    "F16": ("int16", "uint16", 0x7C00, 0xFC00),
    "BF16": ("int16", "uint16", 0x7F80, 0xFF80),
}
"""dtype -> its integers, signed and not; the codes of infinity and minus infinity."""


def scan(
    tensors: Iterable[TensorInfo],
    workers: int = 1,
    allow_nonfinite: bool = False,
    progress: Callable[[int], object] | None = None,
) -> dict[str, str]:
    """Hash (xxh3, 128 bits, hex) of every tensor's bytes, by name, and a check for NaN and infinity on the way.

    The first tensor (in the order given) with a NaN or an infinity is a MoesaicError that names file and tensor, unless
    `allow_nonfinite`. `progress` is called with numbers of bytes, never by two threads at once. The result does not
    depend on `workers`.
    """
    infos = list(tensors)
    stop, reporting = threading.Event(), threading.Lock()

    def digest(info: TensorInfo) -> str:
        state = HASH()
        for _, block in byte_blocks(info, 0, info.nbytes):
            if stop.is_set():
                break
            if not allow_nonfinite:
                refuse_nonfinite(block, info)
            state.update(block)
            if progress is not None:
                with reporting:
                    progress(len(block))
        return state.hexdigest()

    if workers <= 1:
        return {info.name: digest(info) for info in infos}
    with ThreadPoolExecutor(workers, thread_name_prefix="scan") as pool:
        futures = [(info.name, pool.submit(digest, info)) for info in infos]
        try:
            return {name: future.result() for name, future in futures}
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise


def has_nonfinite(block: memoryview, dtype: str) -> bool:
    """Is there a NaN or an infinity among these bytes of a tensor of this safetensors dtype (integers: never)."""
    bits = _FLOATS.get(dtype)
    if bits is None or not len(block):
        return False
    import numpy as np

    signed, unsigned, infinity, negative_infinity = bits
    array = np.frombuffer(block, dtype=unsigned)
    return bool(array.view(signed).max() >= infinity or array.max() >= negative_infinity)


def refuse_nonfinite(block: memoryview, info: TensorInfo) -> None:
    """Raise MoesaicError, naming file and tensor, where these bytes of it hold a NaN or an infinity."""
    if has_nonfinite(block, info.dtype):
        raise MoesaicError(
            f"{info.file}: tensor {info.name!r} has a NaN or an infinity; fix the checkpoint, or pass --allow-nonfinite"
        )


def byte_blocks(source: TensorInfo, start: int, nbytes: int) -> Iterator[tuple[int, memoryview]]:
    """Yield bytes of a stored tensor from its byte `start` on: (number of the first of the block, block).

    A block is overwritten by the next one.
    """
    if source.codes is not None:
        yield from _made_blocks(source.codes, start, nbytes, DTYPE_BITS[source.dtype] // 8)
        return
    buffer = memoryview(bytearray(min(COPY_BYTES, nbytes)))
    with opened(source.file) as fd:
        for at in range(0, nbytes, COPY_BYTES):
            block = buffer[: min(COPY_BYTES, nbytes - at)]
            read_into(fd, block, source.offset + start + at, source.file)
            yield at, block


def _made_blocks(codes: Codes, start: int, nbytes: int, size: int) -> Iterator[tuple[int, memoryview]]:
    """`byte_blocks` of what is made of codes, whose numbers have `size` bytes."""
    import torch

    for at, values in codes.blocks(start // size, (start + nbytes) // size):
        yield at * size - start, values.view(torch.uint8).numpy().data


# --- pieces of tensors ------------------------------------------------------------------------------------------------


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
    for place in places:
        region = place.piece
        assert isinstance(region, Region)
        if region.count > 1:
            band = (region.source.file, region.source.name, region.start // region.stride, region.count)
            bands[band, region.stride, region.steps].append((place, region))
        elif region.steps:
            _copy_numbers(place, region, put)
        else:
            for at, block in byte_blocks(region.source, region.start, region.width):
                put(place.name, place.start + at * 8 // DTYPE_BITS[place.dtype], block)
    for members in bands.values():
        _copy_columns(members, put)


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
