"""Mixture-of-experts models made from any dense decoder of transformers that has a gated FFN, or from any MoE family.

This file is complete in itself: it needs torch and transformers only. A copy of it lies next to every checkpoint that
Moesaic writes, so that ``AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)`` works where Moesaic is
not installed.

``Moesaic<Base>Config``, ``Moesaic<Base>Model``, ``Moesaic<Base>ForCausalLM`` and the classes for classification of
sequences and tokens and for question answering are made on first use, as subclasses of the base's own classes:
attention, norms, rope, caching, generation and weight tying are the base's. Only the ``mlp`` of the layers in
``config.moe_layers`` is replaced; of a base that has experts itself only the routers are (``MoesaicGroupRouter``).

Letters in the names of tensors: T tokens, D hidden size, E routed experts, K experts per token, I width of an expert,
G groups of experts, M members of the largest group, A = T * K assignments of a token to an expert, R rows (assignments
sorted by expert, with padding), H = 2 * I.
"""

import copy
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

try:
    from transformers import initialization as init
except ImportError as error:
    raise ImportError("this model needs transformers 5.24 or newer: pip install --upgrade transformers") from error
from transformers.activations import ACT2FN
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.generation.utils import GenerationMixin
from transformers.integrations.moe import grouped_mm_experts_forward, use_experts_implementation
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
)
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.configuration_auto import (
    CONFIG_MAPPING,
    CONFIG_MAPPING_NAMES,  # pyright: ignore[reportPrivateImportUsage]
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING
from transformers.utils import logging
from transformers.utils.output_capturing import OutputRecorder

logger = logging.get_logger(__name__)

ROUTING_RULES = ("topk", "one_per_group")
ROUTING_WEIGHTINGS = ("selected", "all", "sigmoid")


# ---------------------------------------------------------------------------------------------------------------------
# Routing rules: pure functions of the router's logits.


def route_topk(logits_TE: Tensor, top_k: int, weighting: str, bias_E: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Send each token to the ``top_k`` experts with the largest logits; of equal logits the lower expert id wins.

    ``weighting`` "selected" is the softmax over the selected logits (Mixtral), "all" the softmax over all logits
    without renormalisation (OLMoE), "sigmoid" the sigmoids of the selected over their sum (DeepSeek-V3). ``bias_E``
    (loss-free balancing) is added to the probabilities that experts are selected by, and never moves their weights.
    Returns weights (tokens, top_k) in the logits' dtype and expert ids.
    """
    ids_TK = _largest(logits_TE if bias_E is None else biased_scores(logits_TE, bias_E, weighting), top_k)
    return expert_weights(logits_TE, logits_TE.gather(-1, ids_TK), weighting), ids_TK


def route_one_per_group(
    logits_TE: Tensor,
    group_members_GM: Tensor,
    top_k: int,
    weighting: str,
    group_score: str,
    bias_E: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Send each token to the best expert of each of the ``top_k`` best groups (DivMoE, Algorithm 1 and equation 7).

    ``group_members_GM`` holds the expert ids of each group, padded with -1. A group's score is the ``max``, the
    ``mean`` or the ``log_mean_exp`` of its logits; its representative is the expert with the largest logit, whatever
    the score. The weights are the softmax of the scores over the selected groups ("selected"), or their sigmoids over
    the sum of these ("sigmoid"). For "all" they are not renormalised: with ``max`` the representative's share of the
    softmax over all experts, with ``mean`` and ``log_mean_exp`` the group's share of the softmax over the scores of all
    groups.

    Everything is computed on logits, the softmax comes last: an engine that recognises ``topk(softmax(logits))`` and
    replaces it by its own kernel must not take this rule for that one.

    ``bias_E`` moves the choice, never the weights: see `biased_scores` and, where a group's score is no expert's own,
    `_route_biased_groups`.
    """
    if bias_E is not None:
        if group_score != "max":
            return _route_biased_groups(logits_TE, group_members_GM, top_k, weighting, group_score, bias_E)
        scores_TE = biased_scores(logits_TE, bias_E, weighting)
        _, ids_TK = route_one_per_group(scores_TE, group_members_GM, top_k, weighting, group_score)
        return expert_weights(logits_TE, logits_TE.gather(-1, ids_TK), weighting), ids_TK
    present_GM = group_members_GM >= 0
    members_GM = group_members_GM.clamp(min=0)
    logits_TGM = logits_TE[:, members_GM].masked_fill(~present_GM, -torch.inf)
    best_TG, position_TG = logits_TGM.max(dim=-1)
    score_TG, everything = _GROUP_SCORES[group_score](logits_TE, best_TG, logits_TGM, present_GM)
    groups_TK = _largest(score_TG, top_k)
    ids_TK = members_GM[groups_TK, position_TG.gather(-1, groups_TK)]
    return expert_weights(everything, score_TG.gather(-1, groups_TK), weighting), ids_TK


def biased_scores(logits_TE: Tensor, bias_E: Tensor, weighting: str) -> Tensor:
    """Return what experts are selected by under a selection bias: probability plus bias, -inf where the logit is."""
    with torch.no_grad():
        return (probabilities(logits_TE, weighting) + bias_E).masked_fill(logits_TE.isneginf(), -torch.inf)


def probabilities(logits_TE: Tensor, weighting: str) -> Tensor:
    """Return the softmax over all experts; for the weighting "sigmoid" the sigmoids over their sum."""
    return (F.logsigmoid(logits_TE) if weighting == "sigmoid" else logits_TE).softmax(dim=-1)


def _route_biased_groups(
    logits_TE: Tensor, members_GM: Tensor, top_k: int, weighting: str, group_score: str, bias_E: Tensor
) -> tuple[Tensor, Tensor]:
    """The rule of `route_one_per_group` with a selection bias, for group scores that are no expert's own.

    Groups are chosen by their share of the softmax (or of the sigmoids) over all groups plus the mean of their experts'
    biases, the expert within by its share of its group plus its own bias. So copies of an expert that have its logit
    and its bias, as a group, are chosen when it would have been, whatever their number (docs/statements.md, E2).
    """
    present_GM, safe_GM = members_GM >= 0, members_GM.clamp(min=0)
    over = "sigmoid" if weighting == "sigmoid" else "all"  # a choice of all groups then gives the share of each
    share_TG, id_TG = route_one_per_group(logits_TE, members_GM, len(members_GM), over, group_score)
    group_E = torch.zeros_like(bias_E, dtype=torch.int64)
    numbers_GM = torch.arange(len(members_GM), device=logits_TE.device)[:, None].expand_as(members_GM)
    group_E[members_GM[present_GM]] = numbers_GM[present_GM]
    share_TG = torch.zeros_like(share_TG).scatter(1, group_E[id_TG], share_TG)  # they came in any order
    with torch.no_grad():
        bias_GM = bias_E[safe_GM].masked_fill(~present_GM, 0.0)
        groups_TK = _largest(share_TG + bias_GM.sum(1) / present_GM.sum(1), top_k)
        logits_TGM = logits_TE[:, safe_GM].masked_fill(~present_GM, -torch.inf)
        within_TGM = (logits_TGM.softmax(dim=-1) + bias_GM).masked_fill(~present_GM, -torch.inf)
        ids_TK = safe_GM[groups_TK, within_TGM.argmax(dim=-1).gather(1, groups_TK)]
    weights_TK = share_TG.gather(1, groups_TK)
    if weighting != "all":
        weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(weights_TK.dtype).tiny)
    return weights_TK, ids_TK


def _largest(scores: Tensor, k: int) -> Tensor:
    """Return the indices of the ``k`` largest scores in falling order; ties go to the lower index on every device."""
    return scores.detach().sort(dim=-1, descending=True, stable=True).indices[..., :k]


def expert_weights(scores: Tensor, selected_TK: Tensor, weighting: str) -> Tensor:
    """Return the weights of experts (or groups) by all scores and the selected ones; see `route_topk`."""
    if weighting == "selected":
        return selected_TK.softmax(dim=-1)
    if weighting == "sigmoid":
        # sigmoid / sum of sigmoids, on logarithms: all of them may be too small for a number.
        return F.logsigmoid(selected_TK).softmax(dim=-1)
    return (selected_TK - scores.logsumexp(dim=-1, keepdim=True)).exp()


def _score_max(logits_TE: Tensor, best_TG: Tensor, logits_TGM: Tensor, present_GM: Tensor) -> tuple[Tensor, Tensor]:
    del logits_TGM, present_GM
    return best_TG, logits_TE


def _score_mean(logits_TE: Tensor, best_TG: Tensor, logits_TGM: Tensor, present_GM: Tensor) -> tuple[Tensor, Tensor]:
    del logits_TE, best_TG
    score_TG = logits_TGM.masked_fill(~present_GM, 0.0).sum(dim=-1) / present_GM.sum(dim=-1)
    return score_TG, score_TG


def _score_log_mean_exp(
    logits_TE: Tensor, best_TG: Tensor, logits_TGM: Tensor, present_GM: Tensor
) -> tuple[Tensor, Tensor]:
    del logits_TE
    # Of equal logits this is that logit, bit for bit.
    top_TG = best_TG.detach().masked_fill(best_TG.isneginf(), 0.0)
    mean_TG = (logits_TGM - top_TG[..., None]).exp().sum(dim=-1) / present_GM.sum(dim=-1)
    score_TG = top_TG + mean_TG.log()
    return score_TG, score_TG


# name -> (score of each group, the scores that the softmax of the weighting "all" runs over)
_GROUP_SCORES: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "max": _score_max,
    "mean": _score_mean,
    "log_mean_exp": _score_log_mean_exp,
}
GROUP_SCORES = tuple(_GROUP_SCORES)


def group_members(expert_groups: list[int]) -> list[list[int]]:
    """List the experts of each group, padded with -1 to the size of the largest; ``expert_groups[e]`` is e's group."""
    members = [
        [expert for expert, group in enumerate(expert_groups) if group == wanted]
        for wanted in sorted(set(expert_groups))
    ]
    size = max(map(len, members))
    return [ids + [-1] * (size - len(ids)) for ids in members]


# ---------------------------------------------------------------------------------------------------------------------
# Experts on the CPU. The assignments are sorted by expert once. Some experts at a time (a chunk of rows that stays in
# the cache) gather their rows, multiply them expert by expert, and do everything else in one go. Fresh memory is dear
# (its page faults cost more than writing it), so of the forward pass only gate and up are kept, and each weight's
# gradient goes straight to its place in the stacked gradient.

_CHUNK_ROWS = 4096

_Span = tuple[int, int, int]  # expert, first row, row after the last


class _Rows(NamedTuple):
    """Which token is in which row; R rows, sorted by expert, the rows of each expert padded to a multiple."""

    token_R: Tensor  # 0 in the padding
    place_TK: Tensor  # row of each assignment
    chunks: list[list[_Span]]
    used: int  # rows of the experts here; assignments to experts of other ranks come after them

    def weights(self, weights_TK: Tensor) -> Tensor:
        """Return the routing weight of each row, 0 in the padding, so that no gradient comes from there."""
        weights_R = weights_TK.new_zeros(self.token_R.shape)
        weights_R[self.place_TK] = weights_TK
        return weights_R


def _sort_by_expert(ids_TK: Tensor, num_experts: int, multiple: int) -> _Rows:
    ids_A = ids_TK.reshape(-1)
    order_A = ids_A.argsort(stable=True)
    # Under expert parallelism the id `num_experts` marks an assignment to another rank: those come last, not padded.
    counts_E = ids_A.bincount(minlength=num_experts + 1)
    sizes_E = -(-counts_E // multiple) * multiple
    sizes_E[num_experts] = counts_E[num_experts]
    shifts_E = (sizes_E - counts_E).cumsum(0) - (sizes_E - counts_E)
    place_A = torch.empty_like(order_A)
    place_A[order_A] = torch.arange(order_A.numel()) + shifts_E[ids_A[order_A]]
    sizes = sizes_E.tolist()
    token_R = order_A.new_zeros(sum(sizes))
    token_R[place_A] = torch.arange(order_A.numel()) // ids_TK.shape[1]
    return _Rows(token_R, place_A.view_as(ids_TK), _chunks(sizes[:num_experts]), sum(sizes[:num_experts]))


def _chunks(sizes: list[int]) -> list[list[_Span]]:
    chunks: list[list[_Span]] = []
    start = 0
    for expert, size in enumerate(sizes):
        if size:
            if not chunks or start + size - chunks[-1][0][1] > _CHUNK_ROWS:
                chunks.append([])
            chunks[-1].append((expert, start, start + size))
            start += size
    return chunks


def _row_multiple(ids_TK: Tensor, weight_EXX: Tensor) -> int:
    """Return the number that every expert's rows are padded to a multiple of.

    oneDNN multiplies matrices of 16-bit floats and compiles code for each shape it has not seen lately (0.3 ms), so a
    model that routes anew at every step would compile at every step. Other types do without, and so does decoding.
    """
    compiled = weight_EXX.dtype in (torch.bfloat16, torch.float16)
    return 16 if compiled and ids_TK.numel() >= 16 * weight_EXX.shape[0] else 1


def _linear(
    spans: list[_Span], input_RX: Tensor, weight_EYX: Tensor, bias_EY: Tensor | None, output_RY: Tensor
) -> None:
    """Write each expert's linear map of its rows; ``input_RX`` and ``output_RY`` start at the first span's rows."""
    first = spans[0][1]
    for expert, start, stop in spans:
        rows = slice(start - first, stop - first)
        if bias_EY is None:
            torch.mm(input_RX[rows], weight_EYX[expert].t(), out=output_RY[rows])
        else:
            torch.addmm(bias_EY[expert], input_RX[rows], weight_EYX[expert].t(), out=output_RY[rows])


def _linear_parameters(spans: list[_Span], grad_RY: Tensor, input_RX: Tensor, grad_EYX: Tensor | None) -> None:
    """Write the gradient of each expert's parameter; that of a bias is the gradient of a weight on the input 1."""
    if grad_EYX is not None:
        first = spans[0][1]
        for expert, start, stop in spans:
            rows = slice(start - first, stop - first)
            torch.mm(grad_RY[rows].t(), input_RX[rows], out=grad_EYX[expert].view(grad_RY.shape[1], -1))


def _gated(act_fn: Callable[[Tensor], Tensor], gate_up_RH: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return ``act(gate) * up`` and the function that takes its gradient to the gradient of gate and up."""
    gate_RI, up_RI = gate_up_RH.chunk(2, dim=-1)
    with torch.enable_grad():
        gate_RI = gate_RI.detach().requires_grad_()
        active_RI = act_fn(gate_RI)

    def pull_back(grad_RI: Tensor) -> Tensor:
        grad_gate_up_RH = torch.empty_like(gate_up_RH)
        grad_gate_RI, grad_up_RI = grad_gate_up_RH.chunk(2, dim=-1)
        torch.mul(grad_RI, active_RI.detach(), out=grad_up_RI)
        grad_gate_RI.copy_(torch.autograd.grad(active_RI, gate_RI, grad_RI * up_RI)[0])
        return grad_gate_up_RH

    return active_RI.detach() * up_RI, pull_back


class _CpuExperts(torch.autograd.Function):
    """``sum_k w_k * expert_k(x)`` with gradients for the tokens, the routing weights and all expert parameters."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        act_fn: Callable[[Tensor], Tensor],
        keep: bool,
        ids_TK: Tensor,
        hidden_TD: Tensor,
        weights_TK: Tensor,
        gate_up_EHD: Tensor,
        down_EDI: Tensor,
        gate_up_bias_EH: Tensor | None,
        down_bias_ED: Tensor | None,
    ) -> Tensor:
        table = _sort_by_expert(ids_TK, gate_up_EHD.shape[0], _row_multiple(ids_TK, gate_up_EHD))
        output_RD = hidden_TD.new_empty(table.token_R.numel(), hidden_TD.shape[1])
        output_RD[table.used :] = 0
        kept: list[Tensor] = []
        with torch.autocast("cpu", enabled=False):
            for spans in table.chunks:
                rows = slice(spans[0][1], spans[-1][2])
                input_RD = hidden_TD.index_select(0, table.token_R[rows])
                gate_up_RH = input_RD.new_empty(input_RD.shape[0], gate_up_EHD.shape[1])
                _linear(spans, input_RD, gate_up_EHD, gate_up_bias_EH, gate_up_RH)
                gate_RI, up_RI = gate_up_RH.chunk(2, dim=-1)
                _linear(spans, act_fn(gate_RI) * up_RI, down_EDI, down_bias_ED, output_RD[rows])
                if keep:
                    kept.append(gate_up_RH)
        if keep:
            ctx.act_fn, ctx.table = act_fn, table
            ctx.save_for_backward(hidden_TD, weights_TK, gate_up_EHD, down_EDI, gate_up_bias_EH, down_bias_ED, *kept)
        # Gathers, weighs and sums at once; 16-bit floats are summed in fp32 and rounded once.
        return F.embedding_bag(table.place_TK, output_RD, mode="sum", per_sample_weights=weights_TK)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        saved = ctx.saved_tensors  # may be read only once under activation checkpointing
        hidden_TD, weights_TK, gate_up_EHD, down_EDI, *biases = saved[:6]
        table: _Rows = ctx.table
        grads = [
            torch.empty_like(parameter) if wanted else None
            for parameter, wanted in zip((gate_up_EHD, down_EDI, *biases), ctx.needs_input_grad[5:], strict=True)
        ]
        weights_R = table.weights(weights_TK)
        grad_weights_R = torch.zeros_like(weights_R)
        grad_hidden_RD = hidden_TD.new_empty(weights_R.numel(), hidden_TD.shape[1])
        grad_hidden_RD[table.used :] = 0
        with torch.autocast("cpu", enabled=False):
            for spans, gate_up_RH in zip(table.chunks, saved[6:], strict=True):
                rows = slice(spans[0][1], spans[-1][2])
                inner_RI, pull_back = _gated(ctx.act_fn, gate_up_RH)
                grad_RD = grad_TD.index_select(0, table.token_R[rows])
                grad_inner_RI = torch.empty_like(inner_RI)
                _linear(spans, grad_RD, down_EDI.mT, None, grad_inner_RI)
                # d/dw = <grad, W @ inner + b> = <grad @ W, inner> + <grad, b>: the expert's output is not needed.
                grad_weights_R[rows] = torch.linalg.vecdot(grad_inner_RI, inner_RI)
                if biases[1] is not None:
                    for expert, start, stop in spans:
                        grad_weights_R[start:stop] += (
                            grad_RD[start - rows.start : stop - rows.start] @ biases[1][expert]
                        )
                weights_R1 = weights_R[rows].unsqueeze(-1)
                _linear_parameters(spans, grad_RD, inner_RI.mul_(weights_R1), grads[1])
                _linear_parameters(spans, grad_RD, weights_R1, grads[3])
                grad_gate_up_RH = pull_back(grad_inner_RI.mul_(weights_R1))
                _linear_parameters(spans, grad_gate_up_RH, hidden_TD.index_select(0, table.token_R[rows]), grads[0])
                _linear_parameters(spans, grad_gate_up_RH, torch.ones_like(weights_R1), grads[2])
                if ctx.needs_input_grad[3]:
                    _linear(spans, grad_gate_up_RH, gate_up_EHD.mT, None, grad_hidden_RD[rows])
        _zero_unused(grads, table.chunks)
        grad_hidden_TD = None
        if ctx.needs_input_grad[3]:
            grad_hidden_TD = F.embedding_bag(table.place_TK, grad_hidden_RD, mode="sum")
        return None, None, None, grad_hidden_TD, grad_weights_R[table.place_TK], *grads


def _zero_unused(grads: list[Tensor | None], chunks: list[list[_Span]]) -> None:
    used = {expert for spans in chunks for expert, _, _ in spans}
    for grad in grads:
        if grad is not None:
            for expert in set(range(grad.shape[0])) - used:
                grad[expert].zero_()


def cpu_experts_forward(experts: Any, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Return the weighted sum over the chosen experts, (tokens, D); fast on the CPU, forward and backward.

    Under autocast, tokens and parameters are cast as ``F.linear`` would cast them, and so is the result.
    """
    bias = (experts.gate_up_proj_bias, experts.down_proj_bias) if experts.has_bias else (None, None)
    parameters = [experts.gate_up_proj, experts.down_proj, *bias]
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        hidden_TD = hidden_TD.to(dtype)
        parameters = [parameter if parameter is None else parameter.to(dtype) for parameter in parameters]
    weights_TK = weights_TK.to(hidden_TD.dtype)
    return _CpuExperts.apply(experts.act_fn, torch.is_grad_enabled(), ids_TK, hidden_TD, weights_TK, *parameters)


# ---------------------------------------------------------------------------------------------------------------------
# Modules.


class MoesaicRouter(nn.Module):
    """Score all experts for each token and choose; ``position`` counts the MoE layers of the model from 0."""

    e_score_correction_bias: Tensor | None

    def __init__(self, config: Any, position: int):
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.num_experts = config.num_experts
        self.rule = config.routing_rule
        self.weighting = config.routing_weighting
        self.group_score = config.group_score
        self.routed_scaling_factor = config.routed_scaling_factor
        self.members = None
        if self.rule == "one_per_group":
            groups = config.expert_groups
            self.members = group_members(groups[position] if isinstance(groups[0], list) else groups)
        self._members_on: dict[torch.device, Tensor] = {}
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        bias_E = torch.zeros(config.num_experts, dtype=torch.float32) if config.selection_bias else None
        self.register_buffer("e_score_correction_bias", bias_E)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the logits (tokens, experts) in fp32, the weights and the ids of the chosen experts (tokens, K)."""
        hidden_TD = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits_TE = self.logits(hidden_TD)
        weights_TK, ids_TK = self.route(logits_TE)
        return logits_TE, weights_TK.to(hidden_states.dtype), ids_TK

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """Compute the router's logits in fp32 (bf16 would split the tied rows of a virtual group)."""
        dtype = torch.promote_types(hidden_TD.dtype, torch.float32)
        with torch.autocast(device_type=hidden_TD.device.type, enabled=False):
            return F.linear(hidden_TD.to(dtype), self.weight.to(dtype))

    def route(self, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Apply the routing rule: logits (tokens, experts) -> weights and ids (tokens, K).

        The scaling factor is on the weights and in no matrix: an expert puts out what its dense FFN does, which fits
        float16 where the dense model's does.
        """
        bias_E = None if self.e_score_correction_bias is None else self.e_score_correction_bias.to(logits_TE)
        if self.members is None:
            weights_TK, ids_TK = route_topk(logits_TE, self.top_k, self.weighting, bias_E)
        else:
            members_GM = self._members(logits_TE.device)
            weights_TK, ids_TK = route_one_per_group(
                logits_TE, members_GM, self.top_k, self.weighting, self.group_score, bias_E
            )
        return weights_TK * self.routed_scaling_factor, ids_TK

    def _members(self, device: torch.device) -> Tensor:
        # Not a buffer: models are built on the meta device and loaded tensor by tensor, and this is in no checkpoint.
        if torch.compiler.is_compiling():
            return torch.tensor(self.members, device=device)
        if device not in self._members_on:
            with torch.inference_mode(False):  # an inference tensor could not be used in training afterwards
                self._members_on[device] = torch.tensor(self.members, device=device)
        return self._members_on[device]


@use_experts_implementation
class MoesaicExperts(nn.Module):
    """All routed experts of a layer: gated FFNs of the width ``moe_intermediate_size``, stacked."""

    def __init__(self, config: Any):
        super().__init__()
        experts, hidden, width = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.num_experts = experts
        self.hidden_dim = hidden
        self.intermediate_dim = width
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * width, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, width))
        if config.expert_mlp_bias:
            self.gate_up_proj_bias = nn.Parameter(torch.empty(experts, 2 * width))
            self.down_proj_bias = nn.Parameter(torch.empty(experts, hidden))
        self.act_fn = _activation(config)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum over the chosen experts' outputs, (tokens, D)."""
        # This is what transformers calls the "eager" implementation, and our default: by device. Others ("grouped_mm",
        # "batched_mm", ...) can be chosen by `experts_implementation`.
        on_cpu = hidden_states.device.type == "cpu" and not torch.compiler.is_compiling()
        forward = cpu_experts_forward if on_cpu else grouped_mm_experts_forward
        return forward(self, hidden_states, top_k_index, top_k_weights)


class MoesaicSharedExpert(nn.Module):
    """The shared experts of a layer as one FFN of the width S * F; every token passes it with weight 1."""

    def __init__(self, config: Any):
        super().__init__()
        width = config.num_shared_experts * config.intermediate_size
        bias = config.expert_mlp_bias
        self.gate_proj = nn.Linear(config.hidden_size, width, bias=bias)
        self.up_proj = nn.Linear(config.hidden_size, width, bias=bias)
        self.down_proj = nn.Linear(width, config.hidden_size, bias=bias)
        self.act_fn = _activation(config)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Apply the FFN."""
        return self.down_proj(self.act_fn(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))


class MoesaicSparseMoeBlock(nn.Module):
    """The MoE layer in the place of a dense ``mlp``: routed experts, plus the shared ones where there are any."""

    def __init__(self, config: Any, position: int):
        super().__init__()
        self.gate = MoesaicRouter(config, position)
        self.experts = MoesaicExperts(config)
        self.experts.has_bias = config.expert_mlp_bias  # read by transformers' own expert implementations
        self.shared_expert = MoesaicSharedExpert(config) if config.num_shared_experts else None

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return ``sum_k w_k * expert_k(x) + shared(x)`` in the shape of the input."""
        hidden_TD = hidden_states.reshape(-1, hidden_states.shape[-1])
        _, weights_TK, ids_TK = self.gate(hidden_TD)
        output_TD = self.experts(hidden_TD, ids_TK, weights_TK)
        if self.shared_expert is not None:
            output_TD = output_TD + self.shared_expert(hidden_TD)
        return output_TD.reshape(hidden_states.shape)


def _activation(config: Any) -> Callable[[Tensor], Tensor]:
    return ACT2FN[getattr(config, "hidden_activation", None) or config.hidden_act]


# ---------------------------------------------------------------------------------------------------------------------
# Routers of bases that have experts themselves.

_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_ROUTERS = ("gate", "router")


class MoesaicGroupRouter:
    """Let the family's own router choose between groups of experts, and send a token to the best of each chosen group.

    Stands before the class of a family's router (``group_router``), whose parameters have a slot per expert. That
    class's forward is run on one member of each group at a time, for the logits, and then once on the groups: with
    their scores as hidden states and the identity as its matrix. So all that a family does with logits (softmax or
    sigmoid, a bias for the choice, groups of its own, scaling) is done by its own code, and done to each group once.
    A number per expert, such as a bias, counts for a group as the mean of its experts', and within it as their own.
    """

    family: Any
    members: list[list[int]]
    group_score: str

    def forward(self, hidden_states: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        """Return the logits (tokens, experts), the weights and the ids of the chosen experts."""
        members_GM = torch.tensor(self.members, device=hidden_states.device)
        present_GM = members_GM >= 0
        safe_GM = members_GM.where(present_GM, members_GM[:, :1])
        experts = int(present_GM.sum())
        groups = {"num_experts": len(members_GM)}
        outputs = []
        for member_G in safe_GM.unbind(dim=1):
            one = _Slots(
                experts, matrix=functools.partial(torch.index_select, dim=0, index=member_G), vector=_zeros(member_G)
            )
            router = one.module(self, groups | {"training": False})
            outputs.append(self.family.forward(router, hidden_states, *map(one.tensor, given)))
        first_TG = outputs[0][0].reshape(-1, len(members_GM))
        logits_TGM = torch.stack([output[0].reshape(first_TG.shape) for output in outputs], dim=-1)
        score_TG = self._scores(logits_TGM, present_GM)

        means = _Slots(
            experts,
            matrix=lambda _: torch.eye(len(members_GM), dtype=score_TG.dtype, device=score_TG.device),
            vector=lambda vector: _group_mean(vector, safe_GM, present_GM, score_TG.dtype),
        )
        router = means.module(self, groups | ({"hidden_dim": len(members_GM)} if hasattr(self, "hidden_dim") else {}))
        score = score_TG.reshape(*hidden_states.shape[:-1], -1)
        _, weights, chosen, *more = self.family.forward(router, score, *map(means.tensor, given))

        own_GM = sum(vector[safe_GM].detach() for vector in _vectors(self, given, experts))
        best_TG = (logits_TGM.detach() + own_GM).masked_fill(~present_GM, -torch.inf).argmax(dim=-1)
        chosen_TK = chosen.reshape(len(score_TG), -1)
        ids_TK = safe_GM[chosen_TK, best_TG.gather(1, chosen_TK)]
        logits_TE = first_TG.new_empty(len(first_TG), experts)
        logits_TE = logits_TE.index_copy(1, members_GM[present_GM], logits_TGM[:, present_GM])
        return logits_TE, weights.to(outputs[0][1].dtype), ids_TK.reshape(chosen.shape), *more

    def _scores(self, logits_TGM: Tensor, present_GM: Tensor) -> Tensor:
        wide_TGM = logits_TGM.to(torch.promote_types(logits_TGM.dtype, torch.float32))
        wide_TGM = wide_TGM.masked_fill(~present_GM, -torch.inf)
        score = _GROUP_SCORES[self.group_score]
        return score(wide_TGM.flatten(1), wide_TGM.amax(dim=-1), wide_TGM, present_GM)[0].to(logits_TGM.dtype)


class _Slots(NamedTuple):
    """What takes the place of tensors with a slot per expert: of a matrix of E rows, and of E numbers."""

    experts: int
    matrix: Callable[[Tensor], Tensor]
    vector: Callable[[Tensor], Tensor]

    def tensor(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, Tensor) or self.experts not in tensor.shape:
            return tensor
        return self.vector(tensor) if tensor.numel() == self.experts else self.matrix(tensor)

    def module(self, module: Any, attributes: dict[str, Any]) -> Any:
        """Return a module like this one with other slots and attributes; it shares nothing that would be changed."""
        made = copy.copy(module)
        made.__dict__ = {name: self.tensor(value) for name, value in module.__dict__.items()}
        made.__dict__ |= {name: self.tensor(value) for name, value in (module._parameters | module._buffers).items()}
        made._parameters, made._buffers = {}, {}
        made._modules = {name: one and self.module(one, {}) for name, one in module._modules.items()}
        made.__dict__ |= attributes
        return made


def _zeros(like_G: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda vector: vector.new_zeros([len(like_G) if size > 1 else 1 for size in vector.shape])


def _group_mean(vector: Tensor, safe_GM: Tensor, present_GM: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mean of each group's numbers, in the shape of ``vector``; of equal ones exactly that number."""
    own_GM = vector.reshape(-1).to(torch.promote_types(vector.dtype, dtype))[safe_GM]
    away_GM = (own_GM - own_GM[:, :1]).masked_fill(~present_GM, 0.0)
    mean_G = own_GM[:, 0] + away_GM.sum(dim=1) / present_GM.sum(dim=1)
    return mean_G.reshape([len(safe_GM) if size > 1 else 1 for size in vector.shape])


def _vectors(router: Any, given: Sequence[Tensor], experts: int) -> list[Tensor]:
    """Return what a router has, or is given, as a number per expert, each flat."""
    held = [value for module in router.modules() for value in module.__dict__.values()]
    held += [*router.parameters(), *router.buffers(), *given]
    return [one.reshape(-1) for one in held if isinstance(one, Tensor) and one.numel() == experts]


@functools.cache
def group_router(family: type) -> type:
    """Return the class of a family's router that chooses between groups."""
    return _named(type(family.__name__, (MoesaicGroupRouter, family), {"family": family}), f"Moesaic{family.__name__}")


def _group_routers(model: nn.Module, config: Any) -> None:
    """Make the routers of a model that is built choose between groups, where its config says so."""
    if config.routing_rule != "one_per_group":
        return
    routers = [
        next(getattr(block, name) for name in _ROUTERS if isinstance(getattr(block, name, None), nn.Module))
        for block in model.modules()
        if hasattr(getattr(block, "experts", None), "down_proj")
    ]
    groups = config.expert_groups
    per_layer = groups if groups and isinstance(groups[0], list) else [groups or []] * len(routers)
    if len(per_layer) != len(routers):
        raise ValueError(
            f"expert_groups has {len(per_layer)} lists: it must be one list, or one for each of the {len(routers)} "
            "MoE layers"
        )
    for router, ids in zip(routers, per_layer, strict=True):
        experts = max((one for one in router.parameters() if one.ndim == 2), key=Tensor.numel).shape[0]
        if len(ids) != experts:
            raise ValueError(
                f"expert_groups has {len(ids)} entries: it must name a group for each of the {experts} experts"
            )
        router.__class__ = group_router(type(router))
        router.members, router.group_score = group_members(ids), config.group_score


# ---------------------------------------------------------------------------------------------------------------------
# Configuration.

_TP_PLAN = {
    "layers.*.mlp.experts.gate_up_proj": "packed_colwise",
    "layers.*.mlp.experts.down_proj": "rowwise",
    "layers.*.mlp.experts": "moe_tp_experts",
}
_SHARED_TP_PLAN = {
    "layers.*.mlp.shared_expert.gate_proj": "colwise",
    "layers.*.mlp.shared_expert.up_proj": "colwise",
    "layers.*.mlp.shared_expert.down_proj": "rowwise",
}
_EP_PLAN = {
    "layers.*.mlp.experts.gate_up_proj": "grouped_gemm",
    "layers.*.mlp.experts.down_proj": "grouped_gemm",
    "layers.*.mlp.experts": "ep_dispatch_experts",
}
_BIAS_EP_PLAN = {
    "layers.*.mlp.experts.gate_up_proj_bias": "grouped_gemm",
    "layers.*.mlp.experts.down_proj_bias": "grouped_gemm",
}


def _tp_plan(config: Any, dense_plan: dict[str, Any]) -> dict[str, Any]:
    """Rules for what is there: the base's own, of its FFNs where a layer has one, and those of MoE layers.

    Experts with biases stay whole on every rank: each would add the whole bias to its part of the sum.
    """
    keeps_ffn = len(config.moe_layers) < config.num_hidden_layers
    plan = {rule: how for rule, how in dense_plan.items() if keeps_ffn or ".mlp." not in rule}
    if config.moe_layers:
        plan |= {} if config.expert_mlp_bias else _TP_PLAN
        plan |= _SHARED_TP_PLAN if config.num_shared_experts else {}
    return plan


def _ep_plan(config: Any) -> dict[str, Any]:
    return (_EP_PLAN | (_BIAS_EP_PLAN if config.expert_mlp_bias else {})) if config.moe_layers else {}


def _has_experts(base: str) -> bool:
    """Whether a base has experts of its own, so that nothing but its routers is ours."""
    names = dir(CONFIG_MAPPING[base])
    return any(key in names or key in CONFIG_MAPPING[base].attribute_map for key in _EXPERT_COUNTS)


def _make_config_class(base: str, stem: str) -> type:
    make = _make_moe_config_class if _has_experts(base) else _make_dense_config_class
    return _named(make(base, stem), f"Moesaic{stem}Config", _auto_class="AutoConfig")


def _make_moe_config_class(base: str, stem: str) -> type:
    parent: Any = CONFIG_MAPPING[base]

    class Config(parent):
        model_type = f"moesaic_{base}"

        routing_rule: str = "topk"
        expert_groups: list[int] | list[list[int]] | None = None
        group_score: str = "log_mean_exp"

        def __post_init__(self, **kwargs: Any) -> None:
            super().__post_init__(**kwargs)
            self.auto_map = _auto_map(stem)
            _check_choices(self, {"routing_rule": ROUTING_RULES, "group_score": GROUP_SCORES})

    return Config


def _make_dense_config_class(base: str, stem: str) -> type:
    parent: Any = CONFIG_MAPPING[base]

    class Config(parent):
        model_type = f"moesaic_{base}"

        num_experts: int = 8
        num_experts_per_tok: int = 2
        moe_intermediate_size: int | None = None
        num_shared_experts: int = 0
        moe_layers: list[int] | None = None
        routing_rule: str = "topk"
        routing_weighting: str = "selected"
        routed_scaling_factor: float = 1.0
        expert_groups: list[int] | list[list[int]] | None = None
        group_score: str = "max"
        selection_bias: bool = False
        expert_mlp_bias: bool = False
        output_router_logits: bool = False
        router_aux_loss_coef: float = 0.001

        def __post_init__(self, **kwargs: Any) -> None:
            super().__post_init__(**kwargs)
            if self.moe_intermediate_size is None:
                self.moe_intermediate_size = self.intermediate_size
            if self.moe_layers is None:
                self.moe_layers = list(range(self.num_hidden_layers))
            self.auto_map = _auto_map(stem)
            check_moe_config(self)

        @property
        def base_model_tp_plan(self) -> dict[str, Any]:
            return _tp_plan(self, parent.base_model_tp_plan or {})

        @property
        def base_model_ep_plan(self) -> dict[str, Any]:
            return _ep_plan(self)

    return Config


def check_moe_config(config: Any) -> None:
    """Refuse a configuration that names no model; raise ``ValueError`` with one line that says which key and why."""
    experts, top_k = config.num_experts, config.num_experts_per_tok
    for key in ("num_experts", "num_experts_per_tok", "moe_intermediate_size"):
        if getattr(config, key) < 1:
            raise ValueError(f"{key} is {getattr(config, key)}: it must be at least 1")
    if not 0 < config.routed_scaling_factor < float("inf"):
        raise ValueError(f"routed_scaling_factor is {config.routed_scaling_factor}: it must be a positive number")
    if config.num_shared_experts < 0:
        raise ValueError(f"num_shared_experts is {config.num_shared_experts}: it must be 0 (none) or more")
    choices = {"routing_rule": ROUTING_RULES, "routing_weighting": ROUTING_WEIGHTINGS, "group_score": GROUP_SCORES}
    _check_choices(config, choices)
    layers = config.moe_layers
    if sorted(set(layers)) != layers or not all(0 <= layer < config.num_hidden_layers for layer in layers):
        raise ValueError(
            f"moe_layers is {layers}: it must list layers from 0 to {config.num_hidden_layers - 1} in rising order"
        )
    if top_k > experts:
        raise ValueError(f"num_experts_per_tok is {top_k}: there are only {experts} experts (num_experts)")
    if config.routing_rule == "one_per_group":
        _check_groups(config)


def _check_choices(config: Any, choices: dict[str, tuple[str, ...]]) -> None:
    for key, words in choices.items():
        if getattr(config, key) not in words:
            raise ValueError(f"{key} is {getattr(config, key)!r}: it must be one of {', '.join(words)}")


def _check_groups(config: Any) -> None:
    groups = config.expert_groups
    if not groups:
        raise ValueError("routing_rule one_per_group needs expert_groups: the group of each expert")
    per_layer = groups if isinstance(groups[0], list) else [groups]
    if isinstance(groups[0], list) and len(groups) != len(config.moe_layers):
        raise ValueError(
            f"expert_groups has {len(groups)} lists: it must be one list, or one for each of the "
            f"{len(config.moe_layers)} MoE layers"
        )
    for ids in per_layer:
        if len(ids) != config.num_experts:
            raise ValueError(
                f"expert_groups has {len(ids)} entries: it must name a group for each of the "
                f"{config.num_experts} experts"
            )
        if config.num_experts_per_tok > len(set(ids)):
            raise ValueError(
                f"num_experts_per_tok is {config.num_experts_per_tok}: one_per_group takes at most one expert from "
                f"each of the {len(set(ids))} groups"
            )


# ---------------------------------------------------------------------------------------------------------------------
# Models. The constructors of the base classes build dense layers first; under `no_init_weights` these cost nothing, and
# all weights, old and new, are initialised once at the end by `post_init`.


class _MoesaicPreTrained:
    """What the model and its heads share."""

    config: Any
    _keep_in_fp32_modules_strict: Any

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(module, MoesaicRouter):
            init.normal_(module.weight, mean=0.0, std=self.config.initializer_range)
            if module.e_score_correction_bias is not None:
                init.zeros_(module.e_score_correction_bias)
        elif isinstance(module, MoesaicExperts):
            for name, parameter in module.named_parameters(recurse=False):
                if name.endswith("_bias"):
                    init.zeros_(parameter)
                else:
                    init.normal_(parameter, mean=0.0, std=self.config.initializer_range)

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        # transformers looks for the decorator's name in the source, and caches "no" on the dense base class.
        return True

    def get_correct_experts_implementation(self, requested_experts: str | None) -> str:
        """Prefer our own forward ("eager" in transformers' words), which chooses by device."""
        return super().get_correct_experts_implementation(  # pyright: ignore[reportAttributeAccessIssue]
            requested_experts or "eager"
        )


class _MoesaicModel(_MoesaicPreTrained):
    def __init__(self, config: Any):
        with init.no_init_weights():
            super().__init__(config)  # pyright: ignore[reportCallIssue]
            for position, layer in enumerate(config.moe_layers):
                self.layers[layer].mlp = MoesaicSparseMoeBlock(config, position)  # pyright: ignore
        if config.selection_bias:
            self._keep_in_fp32_modules_strict = {*self._keep_in_fp32_modules_strict, "e_score_correction_bias"}
        self.post_init()  # pyright: ignore


class _MoesaicTask(_MoesaicPreTrained):
    """A model with a head: the base's own causal LM, or one of transformers' generic heads, the same for every base."""

    model_class: type

    def __init__(self, config: Any):
        # The dense model that is built in passing changes its config, and would refuse our experts' implementations.
        dense = copy.deepcopy(config)
        dense.__class__ = CONFIG_MAPPING[config.model_type.removeprefix("moesaic_")]
        dense._experts_implementation = None
        with init.no_init_weights():
            super().__init__(dense)  # pyright: ignore[reportCallIssue]
            self.config = config
            self.model = self.model_class(config)
        self.post_init()  # pyright: ignore


class _WithGroupRouters:
    """The model, or the causal LM, of a base that has experts: its own, with other routers."""

    def __init__(self, config: Any):
        super().__init__(config)  # pyright: ignore[reportCallIssue]
        _group_routers(self, config)  # pyright: ignore[reportArgumentType]


def _make_moe_class(base: str, name: str, mapping: Any, config_class: type, *more: type) -> type:
    """Make a model class of a base that has experts; its checkpoints are stored as the base's are."""
    parent: Any = mapping[CONFIG_MAPPING[base]]
    for ours, theirs in ((f"moesaic_{base}", base), (name, parent.__name__)):
        conversion = get_checkpoint_conversion_mapping(theirs)
        if conversion is not None:
            register_checkpoint_conversion_mapping(ours, conversion, overwrite=True)
    body = {"__module__": __name__, "config_class": config_class}
    return type(name, (_WithGroupRouters, parent, *more), body)


def _make_model_class(base: str, stem: str) -> type:
    config_class = _get(f"Moesaic{stem}Config")
    name = f"Moesaic{stem}Model"
    if _has_experts(base):
        made = _make_moe_class(base, name, MODEL_MAPPING, config_class)
        return _named(made, name, _auto_class="AutoModel")
    parent: Any = MODEL_MAPPING[CONFIG_MAPPING[base]]
    body = {
        "config_class": config_class,
        "_can_record_outputs": parent._can_record_outputs
        | {
            "router_logits": OutputRecorder(MoesaicRouter, index=0),
            "expert_ids": OutputRecorder(MoesaicRouter, index=2),
        },
    }
    cls = type(name, (_MoesaicModel, parent), body | {"__module__": __name__})
    return _named(cls, name, _auto_class="AutoModel")


def _make_causal_lm_class(base: str, stem: str) -> type:
    config_class = _get(f"Moesaic{stem}Config")
    parent: Any = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[base]]
    name = f"Moesaic{stem}ForCausalLM"
    if _has_experts(base):
        made = _make_moe_class(base, name, MODEL_FOR_CAUSAL_LM_MAPPING, config_class, GenerationMixin)
        return _named(made, name, _auto_class="AutoModelForCausalLM")
    body = {
        "config_class": config_class,
        "model_class": _get(f"Moesaic{stem}Model"),
        "forward": _with_router_logits(parent.forward),
        "__module__": __name__,
    }
    # GenerationMixin is named so that transformers sees it among the direct bases and leaves the class alone.
    return _named(type(name, (_MoesaicTask, parent, GenerationMixin), body), name, _auto_class="AutoModelForCausalLM")


def _make_head_class(kind: str, generic: type, base: str, stem: str) -> type:
    model_class: Any = _get(f"Moesaic{stem}Model")
    dense: Any = MODEL_MAPPING[CONFIG_MAPPING[base]]
    parent = next(cls for cls in dense.__mro__[1:] if issubclass(cls, PreTrainedModel))
    body = {"config_class": model_class.config_class, "model_class": model_class, "__module__": __name__}
    name = f"Moesaic{stem}{kind}"
    return _named(type(name, (_MoesaicTask, generic, parent), body), name, _auto_class=f"AutoModel{kind}")


def _with_router_logits(parent_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return the forward of a dense causal LM with ``output_router_logits`` and ``aux_loss``, as Qwen3-MoE has them.

    Its signature is the dense one with that argument, because Trainer and generation look there for what a model takes.
    """
    signature = inspect.signature(parent_forward)
    *named, rest = signature.parameters.values()
    names = [parameter.name for parameter in named[1:]]

    def forward(self: Any, *args: Any, output_router_logits: bool | None = None, **kwargs: Any) -> Any:
        config = self.config
        wanted = config.output_router_logits if output_router_logits is None else output_router_logits
        return_dict = kwargs.pop("return_dict", None)
        seen: list[Any] = []
        hook = self.model.register_forward_hook(lambda _, __, output: seen.append(output)) if wanted else None
        try:
            flags = {"output_router_logits": wanted, "output_expert_ids": wanted}
            output = parent_forward(self, *args, return_dict=True, **flags, **kwargs)
        finally:
            if hook is not None:
                hook.remove()
        router_logits = aux_loss = None
        if wanted:
            given = dict(zip(names, args, strict=False)) | kwargs
            router_logits = seen[0].router_logits
            aux_loss = load_balancing_loss(router_logits, seen[0].expert_ids, given.get("attention_mask"))
            if output.loss is not None:
                output.loss = output.loss + config.router_aux_loss_coef * aux_loss.to(output.loss.device)
        elif self.training and output.loss is not None:
            _tell_that_nothing_balances(self.model)
        made = MoeCausalLMOutputWithPast(aux_loss=aux_loss, router_logits=router_logits, **output)
        return made if (config.return_dict if return_dict is None else return_dict) else made.to_tuple()

    functools.update_wrapper(forward, parent_forward)
    extra = inspect.Parameter("output_router_logits", inspect.Parameter.KEYWORD_ONLY, default=None)
    returned = tuple[Any, ...] | MoeCausalLMOutputWithPast
    forward.__annotations__ = parent_forward.__annotations__ | {"return": returned}
    forward.__signature__ = signature.replace(  # pyright: ignore[reportFunctionMemberAccess]
        parameters=[*named, extra, rest], return_annotation=returned
    )
    return forward


def _tell_that_nothing_balances(model: Any) -> None:
    """Say once that training goes on without a balancing loss, unless Moesaic's own callback watches the load."""
    routers = [layer.mlp.gate for layer in model.layers if isinstance(layer.mlp, MoesaicSparseMoeBlock)]
    watched = any(getattr(vars(router).get("_moesaic_router"), "watched", False) for router in routers)
    if routers and not watched and not torch.compiler.is_compiling():
        logger.warning_once(
            "This mixture of experts trains without a balancing loss, so experts may fall out of use. Set "
            "output_router_logits=True in the model's config (its router_aux_loss_coef then counts), or add "
            "moesaic.RoutingCallback(balance=...) to the trainer."
        )


def load_balancing_loss(
    logits: Sequence[Tensor], expert_ids: Sequence[Tensor], attention_mask: Tensor | None
) -> Tensor:
    """Return ``E * sum_e c_e p_e``, the mean over the MoE layers; K where routing is balanced, as in Qwen3-MoE.

    c_e is the number of selections of expert e per token, as it was really routed (groups, bias and all), p_e the mean
    of the softmax over all experts. Tokens that a two-dimensional ``attention_mask`` hides count in neither.
    """
    layers = []
    for logits_TE, ids_TK in zip(logits, expert_ids, strict=True):
        kept_T = _kept_tokens(attention_mask, logits_TE)
        tokens = kept_T.sum().clamp(min=1)
        counts_E = torch.zeros_like(logits_TE[0]).scatter_add_(
            0, ids_TK.flatten(), kept_T.repeat_interleave(ids_TK.shape[-1])
        )
        probability_E = kept_T @ logits_TE.softmax(dim=-1)
        layers.append(logits_TE.shape[-1] * (counts_E / tokens) @ (probability_E / tokens))
    return torch.stack([layer.to(layers[0].device) for layer in layers]).mean()


def _kept_tokens(attention_mask: Tensor | None, logits_TE: Tensor) -> Tensor:
    """1 for the tokens of this call that are no padding, else 0; a mask with a cache covers earlier tokens as well."""
    if not isinstance(attention_mask, Tensor) or attention_mask.dim() != 2:
        return torch.ones_like(logits_TE[:, 0])
    length = logits_TE.shape[0] // attention_mask.shape[0]
    return attention_mask[:, -length:].reshape(-1).to(logits_TE)


# ---------------------------------------------------------------------------------------------------------------------
# The classes are made when they are asked for, so that only the base in use is imported.

_HEADS = {
    "ForSequenceClassification": GenericForSequenceClassification,
    "ForTokenClassification": GenericForTokenClassification,
    "ForQuestionAnswering": GenericForQuestionAnswering,
}
_MAKERS: dict[str, Callable[[str, str], type]] = {
    "Config": _make_config_class,
    "Model": _make_model_class,
    "ForCausalLM": _make_causal_lm_class,
    **{kind: functools.partial(_make_head_class, kind, generic) for kind, generic in _HEADS.items()},
}


def _auto_map(stem: str) -> dict[str, str]:
    autos = {kind if kind in ("Config", "Model") else f"Model{kind}": kind for kind in _MAKERS}
    return {f"Auto{auto}": f"modeling_moesaic.Moesaic{stem}{kind}" for auto, kind in autos.items()}


def _named(cls: type, name: str, **attributes: Any) -> type:
    cls.__name__ = cls.__qualname__ = name
    cls.__module__ = __name__
    for key, value in attributes.items():
        setattr(cls, key, value)
    return cls


def _get(name: str) -> type:
    return globals()[name] if name in globals() else __getattr__(name)


def __getattr__(name: str) -> type:
    for kind, make in _MAKERS.items():
        stem = name.removeprefix("Moesaic").removesuffix(kind)
        if name == f"Moesaic{stem}{kind}":
            for base, config_name in CONFIG_MAPPING_NAMES.items():
                if config_name == f"{stem}Config":
                    return globals().setdefault(name, make(base, stem))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
