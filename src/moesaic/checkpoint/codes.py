"""How the numbers of a quantised tensor are made from its codes and scales: fp8 blocks, MXFP4, packed int4.

A block at a time, when they are read. Torch is imported then.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from moesaic.checkpoint.headers import TensorInfo
from moesaic.common.errors import MoesaicError

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]

WAY_OUT = "; use the bf16 release, or load it with transformers, dequantise and save it"

BITS = 4
PER_WORD = 32 // BITS
_BAND = 1 << 20
"""Numbers of int4 that are decoded together, about."""

_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Numbers of the sixteen codes of E2M1 (OCP Microscaling Formats 1.0, table 5)."""

_last = threading.local()


@dataclass(frozen=True, kw_only=True)
class Codes(ABC):
    """How the numbers of a tensor of `shape` are made; slots are its last two axes, rows and columns."""

    codes: TensorInfo
    scales: TensorInfo
    shape: Shape
    told: TensorInfo | None = None
    """Where the shape is stored as well."""

    @property
    def slot(self) -> int:
        """Numbers of a slot."""
        return prod(self.shape[-2:])

    @property
    @abstractmethod
    def unit(self) -> int:
        """Numbers of a slot that are decoded together; its last ones may be fewer."""

    @abstractmethod
    def decode(self, slot: int, start: int, stop: int) -> Tensor:
        """The numbers `start` to `stop` of a slot, where a unit begins and ends, in bf16."""

    def blocks(self, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """Numbers `start` to `stop` of the tensor by units: (place of the first, values). Not to be changed."""
        while start < stop:
            slot, within = divmod(start, self.slot)
            first = within // self.unit * self.unit
            last = min(first + self.unit, self.slot)
            values = self._cached(slot, first, last)
            end = min(stop, slot * self.slot + last)
            yield start, values[within - first : within - first + end - start]
            start = end

    def _cached(self, slot: int, start: int, stop: int) -> Tensor:
        """A thread keeps its last unit: whoever reads by small blocks has it decoded once."""
        key = (self.codes.file, self.codes.name, slot, start)
        if getattr(_last, "key", None) != key:
            _last.key, _last.values = key, None  # not two at a time
            if self.told is not None:
                _refuse_padding(self.told, self.shape)
            _last.values = self.decode(slot, start, stop)
        return _last.values


@dataclass(frozen=True, kw_only=True)
class Fp8Blocks(Codes):
    """8-bit floats times a scale per block of `block` rows and columns, multiplied in float32."""

    block: tuple[int, int]

    @property
    def unit(self) -> int:
        """A band of blocks."""
        return self.block[0] * self.shape[-1]

    def decode(self, slot: int, start: int, stop: int) -> Tensor:
        """As `Codes.decode`."""
        from moesaic.checkpoint.reader import read_tensor

        (rows, columns), width = self.shape[-2:], self.block[1]
        values = _elements(self.codes, slot * self.slot + start, stop - start).float().view(-1, columns)
        bands = -(-rows // self.block[0])
        scales = _power(read_tensor(self.scales)).view(-1, bands, -(-columns // width))
        row = scales[slot, start // self.unit].repeat_interleave(width)[:columns]
        return values.mul_(row).bfloat16().view(-1)


@dataclass(frozen=True, kw_only=True)
class Mxfp4(Codes):
    """E2M1 pairs, the first in the low half, times 2^(scale - 127) per block; rows are stored as columns."""

    @property
    def unit(self) -> int:
        """An expert, as its matrix is turned over."""
        return self.slot

    def decode(self, slot: int, start: int, stop: int) -> Tensor:
        """As `Codes.decode`."""
        import torch

        assert (start, stop) == (0, self.slot), (start, stop)
        inputs, outputs = self.shape[-2:]
        numbers = torch.tensor(_FP4)
        pairs = torch.stack([numbers.repeat(16), numbers.repeat_interleave(16)], dim=1).bfloat16()
        codes = _elements(self.codes, slot * self.slot // 2, self.slot // 2)
        values = pairs[codes.int()].view(-1, 2 * self.codes.shape[-1])
        scales = _elements(self.scales, slot * values.shape[0], values.shape[0])
        values = torch.ldexp(values, scales.int().sub_(127)[:, None]).bfloat16()
        return values.view(outputs, inputs).T.contiguous().view(-1)


@dataclass(frozen=True, kw_only=True)
class PackedInt4(Codes):
    """Eight 4-bit integers in an int32, lowest first, 8 above what they are, times a scale per group of a row."""

    @property
    def unit(self) -> int:
        """Some rows."""
        return max(_BAND // self.shape[-1], 1) * self.shape[-1]

    def decode(self, slot: int, start: int, stop: int) -> Tensor:
        """As `Codes.decode`."""
        import torch

        words = _elements(self.codes, (slot * self.slot + start) // PER_WORD, (stop - start) // PER_WORD)
        halves = words.view(torch.uint8)
        integers = torch.stack([halves & 15, halves >> 4], dim=1).view(torch.int8) - 8
        groups = self.scales.shape[-1]
        width = self.shape[-1] // groups
        scales = _elements(self.scales, (slot * self.slot + start) // width, (stop - start) // width)
        return (integers.view(-1, width).to(scales.dtype) * scales[:, None]).bfloat16().view(-1)


def _refuse_padding(told: TensorInfo, shape: Shape) -> None:
    from moesaic.checkpoint.reader import read_tensor

    if (sizes := read_tensor(told).tolist()) != list(shape):
        raise MoesaicError(
            f"{told.file}: {told.name} says {sizes}, but the codes are of {list(shape)}: no reader for padding{WAY_OUT}"
        )


def _elements(info: TensorInfo, start: int, count: int) -> Tensor:
    from moesaic.checkpoint.reader import read_range

    size = info.nbytes // max(prod(info.shape), 1)
    return read_range(info, start * size, count * size)


def _power(scales: Tensor) -> Tensor:
    """Scales in float32; bytes are exponents, 127 above what they are."""
    import torch

    return (scales.float() - 127).exp2() if scales.dtype == torch.uint8 else scales.float()
