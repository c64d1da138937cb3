"""What the statements of methods.md say a layer's routed output is, computed in another way than the layer does it.

T tokens, D hidden, E experts, K active, M shards; expert e holds shard e mod M. `share` is the part of the output that
the routed experts have: 1, or 1/2 beside shared experts.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers.activations import ACT2FN

from moesaic.families.dense import DenseModel
from moesaic.families.experts import ExpertWeights, widened
from moesaic.upcycling.choices import Factors
from moesaic.verifying.measure import Identity, LayerView


def rho(*, shards: int) -> Callable[[LayerView], Tensor]:
    """Return N2's factor per token, (T, 1): E/G * sum over the G selected groups of one member's probability.

    G = K/M is the number of whole groups that a token uses. The probabilities are taken from the router's logits, by a
    softmax over all experts in float64.
    """

    def factor(view: LayerView) -> Tensor:
        probability_TE = view.logits_TE.double().softmax(-1)
        experts, top_k = view.logits_TE.shape[-1], view.ids_TK.shape[-1]
        # Members of a group tie, so a group's sum over its M selected members is M times one member's probability.
        selected_T1 = probability_TE.gather(-1, view.ids_TK).sum(-1, keepdim=True) / shards
        return (experts * shards / top_k * selected_T1).float()

    return factor


def scaled_dense(*, shards: int, share: float) -> Identity:
    """Return N2: the routed part is `share * rho(x) * FFN(x)`."""
    factor = rho(shards=shards)
    return lambda view: share * factor(view) * view.ffn_TD


def from_specialists(
    models: Sequence[DenseModel] | None, *, shards: int, share: float, factors: Factors | None
) -> Identity | None:
    """Return D1 and D3: the routed part is a sum of the selected specialists' shards, read from their own files.

    Args:
        models: the base, then the specialists; None where they are not there any more.
        shards: M.
        share: part of the output that the routed experts have where `factors` is None.
        factors: what the shards were scaled by; each then counts its weight. None for D3 with K = M, where every shard
            as it was counts `share`, whatever the router's weights are.
    """
    if models is None:
        return None

    def expected(view: LayerView) -> Tensor:
        activation = ACT2FN[models[0].activation]
        result_TD = torch.zeros_like(view.hidden_TD)
        for expert in view.ids_TK.unique().tolist():
            token, slot = (view.ids_TK == expert).nonzero(as_tuple=True)
            specialist = widened(models[1 + expert // shards].ffns[view.layer], "F32")
            shard = specialist.shard(expert % shards, shards).read()
            if factors is None:
                part_TD = share * _ffn(shard, view.hidden_TD[token], activation)
            else:
                scaled = shard.scale(gate_up=factors.gate_up, down=factors.down)
                part_TD = view.weights_TK[token, slot, None] * _ffn(scaled, view.hidden_TD[token], activation)
            result_TD.index_add_(0, token, part_TD)
        return result_TD

    return expected


def _ffn(weights: ExpertWeights[Tensor], x_TD: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    linear, float32 = torch.nn.functional.linear, weights.map(lambda _, value: value.float())
    gate_TI = linear(x_TD, float32.gate_ID, float32.gate_bias_I)
    up_TI = linear(x_TD, float32.up_ID, float32.up_bias_I)
    return linear(activation(gate_TI) * up_TI, float32.down_DI, float32.down_bias_D)
