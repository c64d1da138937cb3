"""Experts from scratch: the baseline that every upcycling method is compared with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moesaic.upcycling.method import ExpertSpec, LayerSources, Method

if TYPE_CHECKING:
    import torch

    from moesaic.upcycling.experts import ExpertWeights


def make(expert: int, sources: LayerSources, spec: ExpertSpec, generator: torch.Generator) -> ExpertWeights:  # noqa: ARG001
    """Matrices from N(0, initializer_range), biases zero, as the base's architecture would initialise them."""
    import torch

    from moesaic.upcycling.experts import ExpertWeights
    from moesaic.upcycling.randomness import normal

    hidden, width, std = spec.hidden, spec.intermediate, spec.initializer_range
    dtype = sources.dtype
    return ExpertWeights(
        gate_ID=normal((width, hidden), std, generator, dtype=dtype),
        up_ID=normal((width, hidden), std, generator, dtype=dtype),
        down_DI=normal((hidden, width), std, generator, dtype=dtype),
        gate_bias_I=torch.zeros(width, dtype=dtype) if spec.biases else None,
        up_bias_I=torch.zeros(width, dtype=dtype) if spec.biases else None,
        down_bias_D=torch.zeros(hidden, dtype=dtype) if spec.biases else None,
    )


SCRATCH = Method(
    name="scratch",
    description="random experts with the base's initial standard deviation",
    paper="a baseline of https://arxiv.org/abs/2610.11317",
    needs_specialists=False,
    cuts=True,
    default_shards=1,
    whole_groups=False,
    default_routing="topk",
    auto_router={"topk": "random", "one_per_group": "random"},
    scaled=False,
    reinit=True,
    preserves=False,
    make=make,
)
