"""Experts from scratch: the baseline that every upcycling method is compared with."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from moesaic.common import seeds
from moesaic.families.experts import ExpertWeights, T
from moesaic.upcycling.method import DenseLayer, Method

if TYPE_CHECKING:
    from torch import Tensor


def experts(layer: DenseLayer[T]) -> list[ExpertWeights[T]]:
    """Matrices from N(0, initializer_range), biases zero, as the base's architecture would initialise them."""
    like = layer.base.shard(0, layer.shards)
    return [like.made(partial(drawn, layer, expert, like)) for expert in range(layer.experts)]


def drawn(layer: DenseLayer[T], expert: int, like: ExpertWeights[T]) -> ExpertWeights[Tensor]:
    """One expert of the shapes of `like`, whose numbers are not read."""
    import torch

    generator, dtype = layer.draw(expert), like.dtype

    def fresh(_: str, value: Any) -> Tensor:
        if len(value.shape) == 1:  # a bias
            return torch.zeros(tuple(value.shape), dtype=dtype)
        return seeds.normal(value.shape, layer.spec.initializer_range, generator, dtype=dtype)

    made: Any = like.map(fresh)
    return made


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
    experts=experts,
)
