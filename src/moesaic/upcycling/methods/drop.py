"""Drop-Upcycling: copies of the base's FFN (or of its shards) with a share of the neurons drawn again."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

from moesaic.common import seeds
from moesaic.families.experts import ExpertWeights, T, redraw
from moesaic.upcycling.method import DenseLayer, ExpertSpec, Method

if TYPE_CHECKING:
    from torch import Tensor


def dropped_neurons(spec: ExpertSpec) -> int:
    """Exactly this many of an expert's I neurons are drawn again: r*I, rounded half up."""
    return math.floor(spec.drop_ratio * spec.intermediate + 0.5)


def experts(layer: DenseLayer[T]) -> list[ExpertWeights[T]]:
    """Expert e is shard e mod M of the base, with some of its neurons drawn again."""
    sources = [layer.base.shard(expert % layer.shards, layer.shards) for expert in range(layer.experts)]
    if dropped_neurons(layer.spec) == 0:
        return sources
    return [source.made(partial(redrawn, layer, expert, source)) for expert, source in enumerate(sources)]


def redrawn(layer: DenseLayer[T], expert: int, source: ExpertWeights[T]) -> ExpertWeights[Tensor]:
    """Of each matrix the chosen neurons' block is drawn again from N(mean, std).

    Mean and standard deviation are those of the replaced block itself, one pair per matrix (section 3 of the paper:
    statistics over the selected indices only). With `per-expert` gate, up and down lose the same neurons, and 1 - r of
    them stay intact; with `per-matrix` each matrix draws its own set, and (1 - r)^3 stay intact. The biases of gate and
    up go with their neurons; the bias of down belongs to no neuron and stays.
    """
    generator, spec, made = layer.draw(expert), layer.spec, source.read()
    count = dropped_neurons(spec)
    same = seeds.subset(count, spec.intermediate, generator)

    def chosen() -> Tensor:
        return seeds.subset(count, spec.intermediate, generator) if spec.drop_indices == "per-matrix" else same

    gate, up, down = chosen(), chosen(), chosen()
    redraw(made.gate_ID, gate, 0, generator)
    redraw(made.up_ID, up, 0, generator)
    redraw(made.down_DI, down, 1, generator)
    for bias, neurons in ((made.gate_bias_I, gate), (made.up_bias_I, up)):
        if bias is not None:
            redraw(bias, neurons, 0, generator)
    return made


DROP = Method(
    name="drop",
    description="copies of the base's FFN (or of its M shards) with a share of the neurons drawn again",
    paper="https://arxiv.org/abs/2502.19261",
    needs_specialists=False,
    cuts=True,
    default_shards=1,
    whole_groups=False,
    default_routing="topk",
    auto_router={"topk": "random", "one_per_group": "random"},
    scaled=True,
    reinit=False,
    preserves=False,
    settings=("drop_ratio", "drop_indices"),
    experts=experts,
)
