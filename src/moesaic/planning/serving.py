"""What serving a model takes on devices of one kind: how many hold it, and what reading a prompt costs. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from moesaic.families.costs import size
from moesaic.training.planning import PEAK_FLOPS

Gpu = Literal["A100", "B200", "H100", "H20", "H200", "L40S"]

MEMORY: Mapping[str, float] = {"A100": 80e9, "B200": 180e9, "H100": 80e9, "H20": 96e9, "H200": 141e9, "L40S": 48e9}
"""Bytes of a device, from the makers' data sheets."""

USABLE = 0.9
"""Share of it for weights and cache; the rest is for activations and the libraries' own."""


@dataclass(frozen=True, kw_only=True)
class Serving:
    """Devices that hold weights and cache, and the cost of a prompt, which is bound by arithmetic."""

    gpu: str
    gpu_memory_bytes: int
    usable: float
    devices: int
    mfu: float
    price: float
    tokens_per_second_per_device: float
    price_per_million_tokens: float

    def rows(self) -> list[tuple[str, str]]:
        """Names and figures for people."""
        one = f"{self.gpu} of {size(self.gpu_memory_bytes)}, {self.usable:.0%} of it usable"
        fits = f"fits on one {one}" if self.devices == 1 else f"does not fit on one {one}: needs {self.devices}"
        return [
            ("memory to serve", fits),
            (
                "reading a prompt",
                f"{self.tokens_per_second_per_device:,.0f} tokens/s per device at {self.mfu:.0%} of its bf16 peak, "
                f"{self.price_per_million_tokens:.3g} per million tokens at {self.price:g} per device and hour",
            ),
        ]


@dataclass(frozen=True, kw_only=True)
class Device:
    """A kind of device, the share of its peak that is reached, and its price for an hour."""

    name: str
    mfu: float
    price: float

    def serve(self, memory: int, flops_per_token: int) -> Serving:
        """What a model of so many bytes and FLOPs takes."""
        speed = PEAK_FLOPS[self.name] * self.mfu / max(flops_per_token, 1)
        return Serving(
            gpu=self.name,
            gpu_memory_bytes=round(MEMORY[self.name]),
            usable=USABLE,
            devices=max(math.ceil(memory / (USABLE * MEMORY[self.name])), 1),
            mfu=self.mfu,
            price=self.price,
            tokens_per_second_per_device=speed,
            price_per_million_tokens=self.price / 3600 / speed * 1e6,
        )
