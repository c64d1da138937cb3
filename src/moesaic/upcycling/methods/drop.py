"""Drop-Upcycling: copies of the base's FFN (or of its shards) with a share of the neurons drawn again."""

from __future__ import annotations

import math
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
    redraw(source.gate_ID, gate, 0, generator)
    redraw(source.up_ID, up, 0, generator)
    redraw(source.down_DI, down, 1, generator)
    for bias, neurons in ((source.gate_bias_I, gate), (source.up_bias_I, up)):
        if bias is not None:
            redraw(bias, neurons, 0, generator)
    return source


def redraw(weights: Tensor, chosen: Tensor, axis: int, generator: torch.Generator) -> None:
    """Draw the `chosen` rows (axis 0) or columns (axis 1) of `weights` anew, in place, from their own N(mean, std)."""
    from moesaic.upcycling.randomness import normal

    block = weights.index_select(axis, chosen)
    wide = block.float() if block.element_size() < 4 else block
    mean, std = wide.mean().item(), wide.std(correction=0).item()
    del wide
    weights.index_copy_(axis, chosen, normal(block.shape, std, generator, mean=mean, dtype=block.dtype))


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
    make=make,
)
