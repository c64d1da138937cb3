"""Where jobs put what they read: conversion to the output's dtype, the writer, progress and the stop sign."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moesaic.checkpoint.reader import TORCH_DTYPES, read_tensor
from moesaic.checkpoint.scan import has_nonfinite
from moesaic.checkpoint.writer import CheckpointWriter
from moesaic.common.errors import MoesaicError
from moesaic.families.dense import RowRange
from moesaic.upcycling.sources import row_blocks


class StoppedError(Exception):
    """Another job failed, or the user interrupted: this one ends without a result."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """The output, as jobs see it; safe to use from several threads."""

    writer: CheckpointWriter
    dtypes: dict[str, str]
    """Output tensor -> safetensors code."""
    allow_nonfinite: bool
    tick: Callable[[float], object]
    """Called with the number of bytes just written."""
    stop: threading.Event = field(default_factory=threading.Event)

    def put(self, name: str, start: int, values: Tensor) -> None:
        """Write contiguous values from element `start` of output tensor `name` on, in the tensor's dtype.

        Sources are finite when a conversion starts, but scaling and narrowing can leave a dtype's range.
        """
        if self.stop.is_set():
            raise StoppedError
        converted = self.convert(values, name)
        bytes_N = converted.view(-1).view(torch.uint8).numpy().data
        if not self.allow_nonfinite and has_nonfinite(bytes_N, self.dtypes[name]):
            raise MoesaicError(
                f"{name}: a value is outside the range of {str(converted.dtype).removeprefix('torch.')}; "
                "use --dtype bfloat16 or float32, another --scale, or --allow-nonfinite"
            )
        self.writer.write(name, converted, start)
        self.tick(converted.nbytes)

    def copy_rows(self, rows: RowRange, name: str, start: int, factor: float = 1.0) -> None:
        """Stream rows of a source to consecutive elements of an output tensor."""
        for first, last in row_blocks(rows):
            block = self.convert(read_tensor(rows.info, first, last), name, factor)
            self.put(name, start, block)
            start += block.numel()

    def convert(self, values: Tensor, name: str, factor: float = 1.0) -> Tensor:
        """The values times a factor in the dtype of output tensor `name`; may change `values` in place.

        Nothing is computed where dtype and factor already fit. The product is rounded once: torch multiplies 16-bit
        floats in float32, so in place is the same as widening, multiplying and narrowing.
        """
        dtype = TORCH_DTYPES[self.dtypes[name]]
        if factor == 1.0 and values.dtype == dtype:
            return values
        if factor != 1.0:
            wide = torch.promote_types(values.dtype, dtype)
            values = values.mul_(factor) if wide == values.dtype else values.to(wide).mul_(factor)
        return values.to(dtype)
