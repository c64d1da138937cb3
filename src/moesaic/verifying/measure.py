"""The naive check: the MoE layers on the dense model's own hidden states, against what the statements say of them.

The dense model runs first, then the MoE; between them only hidden states and logits are kept. What a statement of
docs/statements.md says a layer's routed output is, is computed here in another way than the layer does it.

T tokens, D hidden, E experts, K active, M shards; expert e holds shard e mod M. `share` is the part of the output that
the routed experts have: 1, or 1/2 beside shared experts.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers.activations import ACT2FN

from moesaic.families.dense import DenseModel
from moesaic.families.experts import ExpertWeights, widened
from moesaic.modeling.finite import is_finite
from moesaic.probe import run_logits
from moesaic.upcycling.choices import Factors
from moesaic.verifying.recipe import LayerMeasure

Identity = Callable[["LayerView"], Tensor | None]
"""What a statement says the routed part of a layer's output is, (tokens, D); None where it can't be computed."""

_TINY = 1e-3
"""Tokens whose FFN output is below this share of the mean are compared with that share: 0/0 says nothing."""


@dataclass(frozen=True, kw_only=True)
class DenseRun:
    """What is kept of the dense model: per measured layer the FFN's input and output, and all logits, in fp32."""

    hidden_TD: dict[int, Float[Tensor, "tokens hidden"]]
    ffn_TD: dict[int, Float[Tensor, "tokens hidden"]]
    logits_BLV: Float[Tensor, "sequences length vocab"]


@dataclass(frozen=True, kw_only=True)
class LayerView:
    """One MoE layer's behaviour on the dense model's hidden states; float32 on the CPU."""

    layer: int
    hidden_TD: Float[Tensor, "tokens hidden"]
    ffn_TD: Float[Tensor, "tokens hidden"]
    logits_TE: Float[Tensor, "tokens experts"]
    weights_TK: Float[Tensor, "tokens top_k"]
    ids_TK: Int[Tensor, "tokens top_k"]
    routed_TD: Float[Tensor, "tokens hidden"]
    output_TD: Float[Tensor, "tokens hidden"]


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """Return the decoder layers of a causal language model, also inside a multimodal wrapper."""
    decoder: Any = model.get_decoder()  # pyright: ignore[reportCallIssue]
    return getattr(decoder, "language_model", decoder).layers


@torch.no_grad()
def run_dense(
    model: nn.Module, tokens_BL: Tensor, layers: Sequence[int], batch_size: int, tick: Callable[[float], None]
) -> DenseRun:
    """Run the dense model and keep what the comparison needs."""
    inputs: dict[int, list[Tensor]] = {layer: [] for layer in layers}
    outputs: dict[int, list[Tensor]] = {layer: [] for layer in layers}

    def keep(layer: int) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            inputs[layer].append(_rows(args[0]))
            outputs[layer].append(_rows(output))

        return hook

    blocks = decoder_layers(model)
    handles = [blocks[layer].mlp.register_forward_hook(keep(layer)) for layer in layers]  # pyright: ignore
    try:
        logits = torch.cat(list(run_logits(model, tokens_BL, batch_size, tick)))
    finally:
        for handle in handles:
            handle.remove()
    return DenseRun(
        hidden_TD={layer: torch.cat(rows) for layer, rows in inputs.items()},
        ffn_TD={layer: torch.cat(rows) for layer, rows in outputs.items()},
        logits_BLV=logits,
    )


@torch.no_grad()
def compare_logits(
    model: nn.Module, tokens_BL: Tensor, dense: DenseRun, batch_size: int, tick: Callable[[float], None]
) -> tuple[float, float, float]:
    """Return the largest absolute logit difference and the perplexities of the dense model and of `model`."""
    difference, ours, theirs, start = 0.0, [], [], 0
    for logits_BLV in run_logits(model, tokens_BL, batch_size, tick):
        stop = start + len(logits_BLV)
        reference_BLV, tokens = dense.logits_BLV[start:stop], tokens_BL[start:stop]
        difference = max(difference, _nan_is_infinite((logits_BLV - reference_BLV).abs().max()))
        ours.append(_cross_entropy(logits_BLV, tokens))
        theirs.append(_cross_entropy(reference_BLV, tokens))
        start = stop
    return difference, torch.cat(theirs).mean().exp().item(), torch.cat(ours).mean().exp().item()


@torch.no_grad()
def view_layer(block: Any, layer: int, dense: DenseRun) -> LayerView:
    """Send the dense model's hidden states of one layer, zeros left out, through the MoE block in its FFN's place."""
    weight = block.gate.weight
    states_TD = dense.hidden_TD[layer]
    kept_T = states_TD.any(-1)  # zeros tie all router logits, and relative errors of FFN(0) = 0 say nothing
    states_TD, ffn_TD = states_TD[kept_T], dense.ffn_TD[layer][kept_T]
    hidden_TD = states_TD.to(weight.device, weight.dtype)
    logits_TE, weights_TK, ids_TK = block.gate(hidden_TD)
    output_TD = block(hidden_TD[None])
    routed_TD = output_TD if block.shared_expert is None else block.experts(hidden_TD, ids_TK, weights_TK)
    return LayerView(
        layer=layer,
        hidden_TD=states_TD,
        ffn_TD=ffn_TD,
        logits_TE=_rows(logits_TE),
        weights_TK=_rows(weights_TK),
        ids_TK=ids_TK.cpu(),
        routed_TD=_rows(routed_TD),
        output_TD=_rows(output_TD),
    )


def measure_layer(
    view: LayerView,
    *,
    shards: int,
    scaling: float,
    groups_E: Tensor | None,
    identity: Identity | None,
    rho: Identity | None,
) -> LayerMeasure:
    """Reduce one layer's view to the figures of the report.

    Args:
        view: the layer's behaviour.
        shards: M; expert e holds shard e mod M.
        scaling: the factor that the routing weights have in them.
        groups_E: group of each expert, None for plain top-k.
        identity: what the routed part should be, where a statement says something else than y = FFN(x).
        rho: the factor of statement N2, (tokens, 1), where it applies.
    """
    expected_TD = identity(view) if identity else None
    factor = rho(view) if rho else None
    measure = LayerMeasure(
        layer=view.layer,
        error=_relative(view.output_TD - view.ffn_TD, view.ffn_TD).mean().item(),
        norm_ratio=_relative(view.output_TD, view.ffn_TD).mean().item(),
        coverage=_coverage(view.ids_TK, shards),
        identity_error=None
        if expected_TD is None
        else _relative(view.routed_TD - expected_TD, expected_TD).mean().item(),
        rho=None if factor is None else factor.mean().item(),
        weight_sum_error=(view.weights_TK.sum(-1) / scaling - 1).abs().max().item(),
        distinct=None if groups_E is None else _all_different(groups_E[view.ids_TK]).float().mean().item(),
    )
    if all(map(is_finite, (view.hidden_TD, view.ffn_TD, view.output_TD))):
        return measure
    # What is counted would be a number also where nothing is: which experts a NaN goes to says nothing.
    counted = ("coverage", "weight_sum_error", "distinct")
    return replace(measure, **{key: math.nan for key in counted if getattr(measure, key) is not None})


def _coverage(ids_TK: Tensor, shards: int) -> float | None:
    """Return the share of tokens whose experts hold every shard at least once."""
    if shards == 1:
        return None
    present_TM = torch.zeros(len(ids_TK), shards, dtype=torch.bool).scatter_(1, ids_TK % shards, True)
    return present_TM.all(-1).float().mean().item()


def _all_different(values_TK: Tensor) -> Tensor:
    ordered_TK = values_TK.sort(-1).values
    return (ordered_TK[:, 1:] != ordered_TK[:, :-1]).all(-1)


def _relative(value_TD: Tensor, reference_TD: Tensor) -> Tensor:
    """Return |value| / |reference| per token."""
    size_T = reference_TD.norm(dim=-1)
    return value_TD.norm(dim=-1) / size_T.clamp(min=_TINY * size_T.mean().item()).clamp(min=torch.finfo().tiny)


def _rows(value: Tensor) -> Tensor:
    return value.detach().reshape(-1, value.shape[-1]).float().cpu()


def _cross_entropy(logits_BLV: Tensor, tokens_BL: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits_BLV[:, :-1].flatten(0, 1), tokens_BL[:, 1:].flatten(), reduction="none")


def _nan_is_infinite(value: Tensor) -> float:
    return value.item() if value.isfinite() else float("inf")


# --- what the statements say ------------------------------------------------------------------------------------------


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
        factors: what the shards' matrices were scaled by; each then counts its weight. None for D3 with K = M, where
            every shard as it was counts `share`, whatever the router's weights are.
    """
    if models is None:
        return None

    def expected(view: LayerView) -> Tensor:
        activation = ACT2FN[models[0].activation]
        result_TD = torch.zeros_like(view.hidden_TD)
        for expert in view.ids_TK.unique().tolist():
            token, slot = (view.ids_TK == expert).nonzero(as_tuple=True)
            ffn = models[1 + expert // shards].ffns[view.layer]
            shard = widened(ffn, "F32").shard(expert % shards, shards).read()
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
