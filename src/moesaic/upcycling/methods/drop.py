"""Drop-Upcycling: copies of the base's FFN (or of its shards) with a share of the neurons drawn again."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from moesaic.upcycling.method import BASE, ExpertSpec, LayerSources, Method, Shard

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from moesaic.upcycling.experts import ExpertWeights


def dropped_neurons(spec: ExpertSpec) -> int:
    """Exactly this many of an expert's I neurons are drawn again: r*I, rounded half up."""
    return math.floor(spec.drop_ratio * spec.intermediate + 0.5)


def make(expert: int, sources: LayerSources, spec: ExpertSpec, generator: torch.Generator) -> ExpertWeights:
    """Expert e works on shard e mod M. Of each matrix the chosen neurons' block is drawn again from N(mean, std).

    Mean and standard deviation are those of the replaced block itself, one pair per matrix (section 3 of the paper:
    statistics over the selected indices only). With `per-expert` gate, up and down lose the same neurons, and 1 - r of
    them stay intact; with `per-matrix` each matrix draws its own set, and (1 - r)^3 stay intact. The biases of gate and
    up go with their neurons; the bias of down belongs to no neuron and stays.
    """
    from moesaic.upcycling.randomness import choose

    source = sources.shard(Shard(BASE, expert % spec.shards))
    count = dropped_neurons(spec)
    if count == 0:
        return source
    shared_choice = choose(count, spec.intermediate, generator)

    def chosen() -> Tensor:
        return choose(count, spec.intermediate, generator) if spec.drop_indices == "per-matrix" else shared_choice

    gate, up, down = chosen(), chosen(), chosen()
    return replace(
        source,
        gate_ID=redraw(source.gate_ID, gate, 0, generator),
        up_ID=redraw(source.up_ID, up, 0, generator),
        down_DI=redraw(source.down_DI, down, 1, generator),
        gate_bias_I=None if source.gate_bias_I is None else redraw(source.gate_bias_I, gate, 0, generator),
        up_bias_I=None if source.up_bias_I is None else redraw(source.up_bias_I, up, 0, generator),
    )


def redraw(weights: Tensor, chosen: Tensor, axis: int, generator: torch.Generator) -> Tensor:
    """`weights` with its `chosen` rows (axis 0) or columns (axis 1) drawn from N(mean, std) of what they held."""
    from moesaic.upcycling.randomness import normal

    block = weights.index_select(axis, chosen)
    mean, std = block.mean().item(), block.std(correction=0).item()
    fresh = normal(block.shape, std, generator, mean=mean, dtype=block.dtype)
    return weights.index_copy(axis, chosen, fresh)


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
    reinit=False,
    preserves=False,
    make=make,
)
