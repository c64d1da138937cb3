"""What routers are trained by: load-balancing loss, router z-loss, and the selection bias of loss-free balancing.

The losses are taken per layer from the routing decisions and averaged over the MoE layers.

transformers' own auxiliary loss derives the selection again by plain top-k, pools layers and counts padding, so it is
wrong for pools, groups and biases; these read what the rule really did.

Every term is this rank's *contribution*: the terms of all ranks (and the z-loss of all micro-steps) add up to the
value, so gradients have to be summed over ranks. Where a wrapper averages them (FSDP, DDP), multiply by the number of
ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from moesaic.routing.config import BalanceScope
from moesaic.routing.rules import RoutingDecision


@dataclass(frozen=True, kw_only=True, eq=False)
class Load:
    """How often each expert of each MoE layer was selected, over a number of tokens that are not padding."""

    counts_LE: Int64[Tensor, "layers experts"]
    tokens: Int64[Tensor, ""]

    def __add__(self, other: "Load") -> "Load":
        return Load(counts_LE=self.counts_LE + other.counts_LE, tokens=self.tokens + other.tokens)


def measure_load(decisions: Sequence[RoutingDecision], token_mask_T: Bool[Tensor, " tokens"]) -> Load:
    """Count the selections of each expert in each layer, without padding; integers, so any order gives the same."""
    return Load(
        counts_LE=torch.stack([count_selections(decision, token_mask_T) for decision in decisions]),
        tokens=token_mask_T.sum(),
    )


def count_selections(decision: RoutingDecision, token_mask_T: Bool[Tensor, " tokens"]) -> Int64[Tensor, " experts"]:
    """Count the tokens, padding excluded, that selected each expert (bincount would wait for the device)."""
    ids_TK = decision.expert_ids_TK
    counts_E = torch.zeros(decision.logits_TE.shape[-1], dtype=torch.int64, device=ids_TK.device)
    ones_TK = token_mask_T.to(torch.int64)[:, None].expand_as(ids_TK)
    return counts_E.scatter_add_(0, ids_TK.flatten(), ones_TK.flatten())


def reduce_load(load: Load, group: dist.ProcessGroup | None = None) -> Load:
    """Sum a load over the ranks of `group` (None: all) in one message; the same load where nothing is distributed."""
    if not dist.is_initialized():
        return load
    message = torch.cat([load.counts_LE.flatten(), load.tokens[None]])
    dist.all_reduce(message, group=group)
    return Load(counts_LE=message[:-1].view_as(load.counts_LE), tokens=message[-1])


def balance_loss(
    decisions: Sequence[RoutingDecision],
    token_mask_T: Bool[Tensor, " tokens"],
    local: Load,
    *,
    scope: BalanceScope = "global",
    group: dist.ProcessGroup | None = None,
    carried: Load | None = None,
) -> tuple[Float[Tensor, ""], Load]:
    """Return this rank's part of `E * sum_i f_i P_i` of one micro-step, and the load that f was taken from.

    `local` is `measure_load` of the same decisions. f is the fraction of selections (counts over tokens * K, so that
    balanced routing gives 1 at every E and K), P the mean of the router's probabilities after the pool mask; padding
    counts in neither (EMO, equation of section 3.1 and appendix A.1).
    `local`: f and P of this rank's micro-batch, the mean over ranks. `global`: f over all ranks of the micro-step.
    `batch`: also over the earlier micro-steps of the step; pass the returned load of the micro-step before as `carried`
    (None at the first). Average these over the micro-steps of a step.
    `step`: f and P over all ranks and micro-steps; pass the load of all micro-steps, which is known before the first of
    them, as `carried` (None where there is only one). Add these up: the sum is the loss of one micro-step of them all.
    """
    if scope == "step" and carried is not None:
        load, probability_tokens = carried, carried.tokens
    else:
        load = local if scope == "local" else reduce_load(local, group)
        probability_tokens = load.tokens * (_ranks(group) if scope == "local" else 1)
    if scope == "batch" and carried is not None:
        load = carried + load
    weight_T = token_mask_T.to(decisions[0].logits_TE.dtype)
    layers = []
    for counts_E, decision in zip(load.counts_LE, decisions, strict=True):
        probability_E = weight_T @ decision.probabilities_TE()
        selections = (load.tokens * decision.expert_ids_TK.shape[-1]).clamp_min(1)
        fraction_E = counts_E.to(probability_E.dtype) / selections
        layers.append(counts_E.numel() * (fraction_E @ probability_E) / probability_tokens.clamp_min(1))
    return torch.stack(layers).mean(), load


def _ranks(group: dist.ProcessGroup | None) -> int:
    return dist.get_world_size(group) if dist.is_initialized() else 1


def router_z_loss(
    decisions: Sequence[RoutingDecision], token_mask_T: Bool[Tensor, " tokens"], *, batch_tokens: int | Tensor
) -> Float[Tensor, ""]:
    """Return this micro-batch's part of the mean of `logsumexp(logits)^2` over the allowed experts (ST-MoE, eq. 5).

    `batch_tokens` is the number of tokens of the whole step (all ranks, all micro-steps) that are not padding, so the
    sum of the parts does not depend on how the batch is cut.
    """
    weight_T = token_mask_T.to(decisions[0].logits_TE.dtype)
    layers = [weight_T @ decision.masked_logits_TE.logsumexp(dim=-1).square() for decision in decisions]
    return torch.stack(layers).mean() / batch_tokens


def balanced_bias(
    bias_LE: Float[Tensor, "layers experts"], load: Load, *, rate: float
) -> Float[Tensor, "layers experts"]:
    """Loss-free balancing (Wang et al. 2024, arXiv 2408.15664): a selection bias per expert instead of a gradient.

    Return the bias after one step: plus `rate` for experts below the mean load of their layer, minus above.

    `load` covers the whole step on all ranks (algorithm 1 of the paper); update before the optimizer step. The bias is
    added to the probabilities that experts are selected by and never to the weights of the selected ones.
    """
    counts_LE = load.counts_LE.to(torch.float64)  # exact for integers, so that equal loads have no sign
    return bias_LE + rate * (counts_LE.mean(dim=-1, keepdim=True) - counts_LE).sign().to(bias_LE.dtype)
