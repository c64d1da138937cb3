"""Quantised weights read as numbers: fp8 blocks, MXFP4, and int4 as compressed-tensors packs it.

A quantised matrix is stored as codes and scales under names that begin with its own: `NAME` and `NAME_scale_inv`,
`NAME_blocks` and `NAME_scales`, `NAME_packed` and `NAME_scale`. `decoded` gives one tensor NAME of dtype BF16 in their
place, whose bytes are made when they are read, a block at a time; so all that reads stored tensors reads these. Torch
is imported when numbers are made.
"""

from __future__ import annotations

import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from moesaic.checkpoint.headers import TensorInfo, tensor_bytes
from moesaic.common.errors import MoesaicError

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]

KEYS = ("quantization_config", "compression_config")
"""Where a config.json says how its weights are quantised."""

WAY_OUT = "; use the bf16 release, or load it with transformers, dequantise and save it"

_BITS = 4
_PER_WORD = 32 // _BITS
_BAND = 1 << 20
"""Numbers of int4 that are decoded together, about."""

_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Numbers of the sixteen codes of E2M1 (OCP Microscaling Formats 1.0, table 5)."""

_ROUTER = re.compile(r"\.(gate|router|gate\.wg)(\.weight)?$")

_last = threading.local()


@dataclass(frozen=True, kw_only=True)
class Codes(ABC):
    """How the numbers of a tensor of `shape` are made; slots are its last two axes, rows and columns."""

    codes: TensorInfo
    scales: TensorInfo
    shape: Shape

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

        words = _elements(self.codes, (slot * self.slot + start) // _PER_WORD, (stop - start) // _PER_WORD)
        halves = words.view(torch.uint8)
        integers = torch.stack([halves & 15, halves >> 4], dim=1).view(torch.int8) - 8
        groups = self.scales.shape[-1]
        width = self.shape[-1] // groups
        scales = _elements(self.scales, (slot * self.slot + start) // width, (stop - start) // width)
        return (integers.view(-1, width).to(scales.dtype) * scales[:, None]).bfloat16().view(-1)


def _elements(info: TensorInfo, start: int, count: int) -> Tensor:
    from moesaic.checkpoint.reader import read_range

    size = info.nbytes // max(prod(info.shape), 1)
    return read_range(info, start * size, count * size)


def _power(scales: Tensor) -> Tensor:
    """Scales in float32; bytes are exponents, 127 above what they are."""
    import torch

    return (scales.float() - 127).exp2() if scales.dtype == torch.uint8 else scales.float()


# --- schemes ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """A way to quantise: what codes and scales are called after the tensor's own name, and how they are read."""

    title: str
    codes: str
    scales: str
    unread: tuple[str, ...] = ()
    """Further endings of what is stored and not needed."""
    shape: Callable[[Shape], Shape]
    """Of the numbers, from the codes'."""
    make: Callable[[TensorInfo, TensorInfo, Shape, Mapping[str, Any]], Codes | str]
    """A text says what is missing."""
    sizes: Callable[[str, Shape, Mapping[str, Any]], float | None]
    """Bytes of codes and scales of a tensor of that name and shape; None where it is not quantised."""

    def own_name(self, name: str, names: Any) -> str | None:
        """The tensor that a stored one belongs to; None for one that is not quantised."""
        for end in (self.scales, *self.unread, self.codes):
            own = name.removesuffix(end)
            if name.endswith(end) and own + self.codes in names and own + self.scales in names:
                return own
        return None


def _fp8(codes: TensorInfo, scales: TensorInfo, shape: Shape, settings: Mapping[str, Any]) -> Codes | str:
    rows, columns = shape[-2:]
    grid = scales.shape[-2:] if len(scales.shape) >= 2 else (1, 1)
    told: Any = settings.get("weight_block_size")
    block = tuple(told) if told else (rows, columns)
    if grid != tuple(-(-size // one) for size, one in zip((rows, columns), block, strict=True)):
        if rows % grid[0] or columns % grid[1]:
            return f"{scales.name} has shape {list(scales.shape)}, which is no grid of blocks over {list(shape)}"
        block = (rows // grid[0], columns // grid[1])
    return Fp8Blocks(codes=codes, scales=scales, shape=shape, block=(int(block[0]), int(block[1])))


def _mxfp4(codes: TensorInfo, scales: TensorInfo, shape: Shape, _: Mapping[str, Any]) -> Codes | str:
    if len(codes.shape) != 4 or scales.shape != codes.shape[:-1]:
        return f"{scales.name} has shape {list(scales.shape)}, not {list(codes.shape[:-1])} as the blocks ask for"
    return Mxfp4(codes=codes, scales=scales, shape=shape)


def _int4(codes: TensorInfo, scales: TensorInfo, shape: Shape, settings: Mapping[str, Any]) -> Codes | str:
    for group in settings.get("config_groups", {}).values():
        weights = group.get("weights") or {}
        if weights.get("num_bits") != _BITS or weights.get("type") != "int" or not weights.get("symmetric", True):
            return "no reader for anything but symmetric integers of 4 bits"
        if weights.get("actorder") not in (None, "weight", "static"):
            return f"no reader for actorder {weights['actorder']!r}"
    if len(scales.shape) != 2 or scales.shape[0] != shape[0] or shape[1] % max(scales.shape[1], 1):
        return f"{scales.name} has shape {list(scales.shape)}, which are no groups of {list(shape)}"
    return PackedInt4(codes=codes, scales=scales, shape=shape)


def _fp8_bytes(name: str, shape: Shape, settings: Mapping[str, Any]) -> float | None:
    kept: Any = settings.get("modules_to_not_convert") or ()
    if not _is_linear(name, shape) or any(one in name for one in kept):
        return None
    block: Any = settings.get("weight_block_size") or shape[-2:]
    grid = prod(-(-size // one) for size, one in zip(shape[-2:], block, strict=True))
    return prod(shape) + 4 * prod(shape[:-2]) * grid


def _mxfp4_bytes(name: str, shape: Shape, _: Mapping[str, Any]) -> float | None:
    return prod(shape) * (1 / 2 + 1 / 32) if name.endswith(("experts.gate_up_proj", "experts.down_proj")) else None


def _int4_bytes(name: str, shape: Shape, settings: Mapping[str, Any]) -> float | None:
    module = name.removesuffix(".weight")
    kept: Any = settings.get("ignore") or ()
    rules = (re.match(one[3:], module) if one.startswith("re:") else one == module for one in kept)
    if not _is_linear(name, shape) or any(rules):
        return None
    groups: Any = settings.get("config_groups") or {}
    size = min((group["weights"].get("group_size") or shape[-1] for group in groups.values()), default=shape[-1])
    return prod(shape) * (1 / 2 + 2 / size)


def _is_linear(name: str, shape: Shape) -> bool:
    """A matrix in a layer, or a stack of them, that is no router."""
    return len(shape) >= 2 and "layers." in name and not _ROUTER.search(name)


SCHEMES: Mapping[str, Scheme] = {
    "fp8": Scheme(
        title="fp8 blocks",
        codes="",
        scales="_scale_inv",
        shape=lambda shape: shape,
        make=_fp8,
        sizes=_fp8_bytes,
    ),
    "mxfp4": Scheme(
        title="MXFP4",
        codes="_blocks",
        scales="_scales",
        shape=lambda shape: (*shape[:-3], 2 * prod(shape[-2:]), shape[-3]) if len(shape) >= 3 else shape,
        make=_mxfp4,
        sizes=_mxfp4_bytes,
    ),
    "compressed-tensors": Scheme(
        title="int4 packed by compressed-tensors",
        codes="_packed",
        scales="_scale",
        unread=("_shape",),
        shape=lambda shape: (*shape[:-1], shape[-1] * _PER_WORD),
        make=_int4,
        sizes=_int4_bytes,
    ),
}
"""quant_method of config.json -> how its weights are stored."""


def settings_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What a config.json says of how its weights are quantised; None where they are not."""
    text: Any = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        for key in KEYS:
            if part.get(key):
                return part[key] if isinstance(part[key], dict) else {"quant_method": None}
    return None


def without_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the same model in bf16."""
    rest = {key: value for key, value in config.items() if key not in KEYS}
    if isinstance(text := rest.get("text_config"), dict):
        rest["text_config"] = without_settings(text)
    return rest


def scheme_of(settings: Mapping[str, Any], name: str) -> Scheme:
    """The scheme that these settings name.

    Raises:
        MoesaicError: there is no reader for it.
    """
    method, form = settings.get("quant_method"), settings.get("format")
    known = method if isinstance(method, str) else None
    if known == "compressed-tensors" and form != "pack-quantized":
        known, method = None, f"compressed-tensors, format {form}"
    if known is None or known not in SCHEMES:
        readers = ", ".join(scheme.title for scheme in SCHEMES.values())
        raise MoesaicError(
            f"{name}: is quantised ({method or 'unknown method'}); there are readers for {readers} only{WAY_OUT}"
        )
    return SCHEMES[known]


def numbers_of(scheme: Scheme, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Names and shapes of the tensors that stored ones of these names and shapes stand for."""
    found: dict[str, Shape] = {}
    for name, shape in shapes.items():
        own = scheme.own_name(name, shapes)
        if own is None:
            found[name] = shape
        elif name == own + scheme.codes:
            found[own] = scheme.shape(shape)
    return found


def decoded(
    scheme: Scheme, settings: Mapping[str, Any], tensors: Mapping[str, TensorInfo], name: str
) -> dict[str, TensorInfo]:
    """The tensors with one of dtype BF16 in place of each quantised one's codes and scales; `name` is for messages.

    Raises:
        MoesaicError: no tensor is quantised as the scheme says, or one is in a way that is not read.
    """
    shapes = numbers_of(scheme, {key: info.shape for key, info in tensors.items()})
    if shapes.keys() == tensors.keys():
        raise MoesaicError(
            f"{name}: config.json says it is quantised ({scheme.title}), but no tensor has a *{scheme.scales}{WAY_OUT}"
        )
    found: dict[str, TensorInfo] = {}
    for own, shape in shapes.items():
        codes, scales = tensors.get(own + scheme.codes), tensors.get(own + scheme.scales)
        if codes is None or scales is None or (own in tensors and scheme.codes != ""):
            found[own] = tensors[own]
            continue
        made = scheme.make(codes, scales, shape, settings)
        if isinstance(made, str):
            raise MoesaicError(f"{name}: tensor {own!r} is quantised ({scheme.title}): {made}{WAY_OUT}")
        found[own] = TensorInfo(
            name=own,
            dtype="BF16",
            shape=shape,
            file=codes.file,
            offset=codes.offset,
            nbytes=tensor_bytes("BF16", shape),
            codes=made,
        )
    return found
