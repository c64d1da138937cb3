"""Quantised weights read as numbers: fp8 blocks, MXFP4, and int4 as compressed-tensors packs it.

A quantised matrix is stored as codes and scales under names that begin with its own: `NAME` and `NAME_scale_inv`,
`NAME_blocks` and `NAME_scales`, `NAME_packed` and `NAME_scale`. `decoded` gives one tensor NAME of dtype BF16 in their
place, whose bytes are made when they are read, a block at a time; so all that reads stored tensors reads these. Torch
is imported when numbers are made.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from moesaic.checkpoint.codes import BITS, PER_WORD, WAY_OUT, Codes, Fp8Blocks, Mxfp4, PackedInt4, Shape
from moesaic.checkpoint.headers import TensorInfo, tensor_bytes
from moesaic.common.errors import MoesaicError
from moesaic.common.recipe import Count, load_document

KEYS = ("quantization_config", "compression_config")
"""Where a config.json says how its weights are quantised."""

_ROUTER = re.compile(r"\.(gate|router|gate\.wg)(\.weight)?$")


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
    settings: type
    """What config.json has to say of it."""
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


@dataclass(frozen=True, kw_only=True)
class _Fp8:
    weight_block_size: tuple[Count, Count] | None = None
    modules_to_not_convert: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if 0 in (self.weight_block_size or ()):
            raise MoesaicError("weight_block_size must be two sizes of at least 1")


@dataclass(frozen=True, kw_only=True)
class _Mxfp4:
    modules_to_not_convert: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class _Weights:
    num_bits: Count
    type: str
    symmetric: bool = True
    group_size: int | None = None
    """None or -1: a row is one group."""
    actorder: str | bool | None = None


@dataclass(frozen=True, kw_only=True)
class _Group:
    weights: _Weights


@dataclass(frozen=True, kw_only=True)
class _CompressedTensors:
    config_groups: dict[str, _Group]
    ignore: tuple[str, ...] | None = None


def _fp8(codes: TensorInfo, scales: TensorInfo, shape: Shape, settings: Mapping[str, Any]) -> Codes | str:
    wrong = f"{scales.name} has shape {list(scales.shape)}, which is no grid of blocks over {list(shape)}"
    if len(shape) < 2 or 0 in (*shape, *scales.shape):
        return wrong
    rows, columns = shape[-2:]
    grid = scales.shape[-2:] if len(scales.shape) >= 2 else (1, 1)
    if prod(scales.shape) != prod(shape[:-2]) * prod(grid):
        return wrong
    told: Any = settings.get("weight_block_size")
    if told and (len(scales.shape) >= 2 or prod(scales.shape) > 1):  # else one scale for all
        if grid != tuple(-(-size // one) for size, one in zip((rows, columns), told, strict=True)):
            return f"{wrong} of weight_block_size {list(told)}"
        return Fp8Blocks(codes=codes, scales=scales, shape=shape, block=(told[0], told[1]))
    if rows % grid[0] or columns % grid[1]:
        return wrong
    return Fp8Blocks(codes=codes, scales=scales, shape=shape, block=(rows // grid[0], columns // grid[1]))


def _mxfp4(codes: TensorInfo, scales: TensorInfo, shape: Shape, _: Mapping[str, Any]) -> Codes | str:
    if len(codes.shape) != 4 or scales.shape != codes.shape[:-1]:
        return f"{scales.name} has shape {list(scales.shape)}, not {list(codes.shape[:-1])} as the blocks ask for"
    return Mxfp4(codes=codes, scales=scales, shape=shape)


def _int4(codes: TensorInfo, scales: TensorInfo, shape: Shape, settings: Mapping[str, Any]) -> Codes | str:
    wrong = f"{scales.name} has shape {list(scales.shape)}, which are no groups of {list(shape)}"
    if len(shape) != 2 or len(scales.shape) != 2 or 0 in (*shape, *scales.shape) or scales.shape[0] != shape[0]:
        return wrong
    counts = set[int]()
    for group in settings["config_groups"].values():
        weights = group["weights"]
        if weights.get("num_bits") != BITS or weights.get("type") != "int" or not weights.get("symmetric", True):
            return "no reader for anything but symmetric integers of 4 bits"
        if weights.get("actorder") not in (None, "weight", "static"):
            return f"no reader for actorder {weights['actorder']!r}"
        size = weights.get("group_size") or -1
        counts.add(shape[1] // size if size > 0 and shape[1] % size == 0 else 1)
    if scales.shape[1] not in counts:
        return f"{wrong} of config_groups' group_size"
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
    sizes = (group["weights"].get("group_size") or -1 for group in groups.values())
    size = min((one if one > 0 else shape[-1] for one in sizes), default=shape[-1])
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
        settings=_Fp8,
        make=_fp8,
        sizes=_fp8_bytes,
    ),
    "mxfp4": Scheme(
        title="MXFP4",
        codes="_blocks",
        scales="_scales",
        shape=lambda shape: (*shape[:-3], 2 * prod(shape[-2:]), shape[-3]) if len(shape) >= 3 else shape,
        settings=_Mxfp4,
        make=_mxfp4,
        sizes=_mxfp4_bytes,
    ),
    "compressed-tensors": Scheme(
        title="int4 packed by compressed-tensors",
        codes="_packed",
        scales="_scale",
        unread=("_shape",),
        shape=lambda shape: (*shape[:-1], shape[-1] * PER_WORD),
        settings=_CompressedTensors,
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
        MoesaicError: there is no reader for it, or a setting that it needs is missing or of another kind.
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
    load_document(SCHEMES[known].settings, settings, f"{name}: config.json: {KEYS[0]}", others=True)
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


def _refuse_halves(scheme: Scheme, tensors: Mapping[str, TensorInfo], name: str) -> None:
    """Refuse codes without scales, scales of fp8 without codes, and a tensor that is there in two forms."""
    lonely = scheme.codes or scheme.scales
    for key in tensors:
        own = key.removesuffix(lonely)
        if not key.endswith(lonely):
            continue
        other = own + (scheme.scales if scheme.codes else scheme.codes)
        if other not in tensors:
            raise MoesaicError(f"{name}: has {key!r}, but no {other!r}; the checkpoint is incomplete, fetch it again")
        if scheme.codes and own in tensors:
            raise MoesaicError(f"{name}: has {own!r} as it is and quantised, as {key!r}; take one of them away")


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
    _refuse_halves(scheme, tensors, name)
    found: dict[str, TensorInfo] = {}
    for own, shape in shapes.items():
        codes, scales = tensors.get(own + scheme.codes), tensors.get(own + scheme.scales)
        if codes is None or scales is None:
            found[own] = tensors[own]
            continue
        made = scheme.make(codes, scales, shape, settings)
        if isinstance(made, str):
            raise MoesaicError(f"{name}: tensor {own!r} is quantised ({scheme.title}): {made}{WAY_OUT}")
        told = next((tensors[own + end] for end in scheme.unread if own + end in tensors), None)
        made = made if told is None else replace(made, told=told)
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
