"""Optimizer states of copies as the paper's public code scales them (amazon-science/expert-upcycling d42f7c6).

N experts of the grown layer.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from moesaic.checkpoint.lazy import Lazy, computed, stored
from moesaic.checkpoint.source import Checkpoint
from moesaic.training.utilities import EXPERT_MATRIX

_HALF, _LEAST, _EPSILON = 0.5, 0.1, 1e-8


def adaptive_shares(weights_N: Float[Tensor, "N ..."], sources: Sequence[int]) -> Float[Tensor, " N"]:
    """What the moments of one matrix of each expert are multiplied by: 1 for originals.

    For a copy `0.5 * min(1, max(0.1, 1 - mean|w - w'| / (mean|w'| + 1e-8)))`, w being its weights and w' its source's:
    half where they are equal, and less where an operator has moved them.

    Args:
        weights_N: the matrices of the grown layer.
        sources: the source of each expert; the first with a source is the original.
    """
    shares_N = torch.ones(len(sources), dtype=torch.float64)
    for number, source in enumerate(sources):
        original = sources.index(source)
        if number != original:
            before, after = weights_N[original].double(), weights_N[number].double()
            change = (after - before).abs().mean() / (before.abs().mean() + _EPSILON)
            shares_N[number] = _HALF * (1 - change).clamp(_LEAST, 1)
    return shares_N


def adapted(moments: Mapping[str, Lazy], weights: Checkpoint, sources: Mapping[int, Sequence[int]]) -> dict[str, Lazy]:
    """Moments of the grown model, those of expert matrices times `adaptive_shares`.

    Args:
        moments: each copy has its source's; names as in `weights`, experts stacked in front.
        weights: the grown model.
        sources: MoE layer -> the source of each expert.
    """
    made = dict(moments)
    for name, moment in moments.items():
        if len(moment.shape) == 3 and (match := EXPERT_MATRIX.search(name)):
            grown = stored(weights.tensors[name])
            function = partial(_adapt, moment, grown, sources[int(match["layer"])])
            made[name] = computed(moment.shape, moment.dtype, function, [moment, grown])
    return made


def _adapt(moment: Lazy, weights: Lazy, sources: Sequence[int]) -> Tensor:
    values = moment.read()
    shares_N = adaptive_shares(weights.read(), sources).to(values.dtype)
    return values * shares_N.reshape(-1, *[1] * (values.ndim - 1))
