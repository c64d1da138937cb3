"""Routing statistics that add up: int64 counts and float64 sums over tokens that are not padding."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from moesaic.routing.losses import count_selections
from moesaic.routing.rules import RoutingDecision


@dataclass(frozen=True, kw_only=True, eq=False)
class RoutingStats:
    """Sums over tokens, for each MoE layer (L) and routed expert (E); `a + b` is what counting both at once gives."""

    tokens: Int64[Tensor, ""]
    counts_LE: Int64[Tensor, "layers experts"]
    """Tokens that selected the expert."""
    probability_LE: Float[Tensor, "layers experts"]
    """Sum of the router's probabilities over the allowed experts."""
    weight_LE: Float[Tensor, "layers experts"]
    """Sum of the weights with which the expert was used."""
    entropy_L: Float[Tensor, " layers"]
    """Sum of the entropies of the tokens' probabilities, in nats."""
    pairs_LEE: Int64[Tensor, "layers experts experts"] | None = None
    """Tokens that selected both experts; the diagonal equals `counts_LE`. None where it was not asked for."""

    def __add__(self, other: "RoutingStats") -> "RoutingStats":
        assert (self.pairs_LEE is None) == (other.pairs_LEE is None), "pairs counted in one of the two only"
        pairs = None if self.pairs_LEE is None or other.pairs_LEE is None else self.pairs_LEE + other.pairs_LEE
        return RoutingStats(
            tokens=self.tokens + other.tokens,
            counts_LE=self.counts_LE + other.counts_LE,
            probability_LE=self.probability_LE + other.probability_LE,
            weight_LE=self.weight_LE + other.weight_LE,
            entropy_L=self.entropy_L + other.entropy_L,
            pairs_LEE=pairs,
        )


@torch.no_grad()
def measure_stats(
    decisions: Sequence[RoutingDecision], token_mask_T: Bool[Tensor, " tokens"], *, pairs: bool = False
) -> RoutingStats:
    """Count one micro-batch. `pairs` also counts co-selection, E * E numbers per layer."""
    weight_T = token_mask_T.to(torch.float64)
    probabilities = [decision.probabilities_TE(torch.float64) for decision in decisions]
    return RoutingStats(
        tokens=token_mask_T.sum(),
        counts_LE=torch.stack([count_selections(decision, token_mask_T) for decision in decisions]),
        probability_LE=torch.stack([weight_T @ probability_TE for probability_TE in probabilities]),
        weight_LE=torch.stack([_sum_weights(decision, weight_T) for decision in decisions]),
        entropy_L=torch.stack([weight_T @ torch.special.entr(p_TE).sum(dim=-1) for p_TE in probabilities]),
        pairs_LEE=torch.stack([_count_pairs(decision, weight_T) for decision in decisions]) if pairs else None,
    )


def _sum_weights(decision: RoutingDecision, weight_T: Tensor) -> Tensor:
    sums_E = weight_T.new_zeros(decision.logits_TE.shape[-1])
    weights_TK = decision.weights_TK.to(torch.float64) * weight_T[:, None]
    return sums_E.index_add_(0, decision.expert_ids_TK.flatten(), weights_TK.flatten())


def _count_pairs(decision: RoutingDecision, weight_T: Tensor) -> Tensor:
    selected_TE = torch.zeros_like(decision.logits_TE, dtype=torch.float64).scatter_(1, decision.expert_ids_TK, 1.0)
    return ((selected_TE * weight_T[:, None]).T @ selected_TE).to(torch.int64)  # float64 counts exactly below 2**53


def load_shares(counts_LE: Int64[Tensor, "layers experts"]) -> Float[Tensor, "layers experts"]:
    """Share of a layer's selections that each expert took."""
    shares_LE = counts_LE.to(torch.float64)
    return shares_LE / shares_LE.sum(dim=-1, keepdim=True).clamp_min(1)


def load_entropy(counts_LE: Int64[Tensor, "layers experts"]) -> Float[Tensor, " layers"]:
    """Entropy of the load over log E: 1 when every expert is used equally often, 0 when one takes everything."""
    return torch.special.entr(load_shares(counts_LE)).sum(dim=-1) / math.log(max(2, counts_LE.shape[-1]))


def busiest_share(counts_LE: Int64[Tensor, "layers experts"], number: int = 1) -> Float[Tensor, " layers"]:
    """Share of the selections that the `number` busiest experts took: 1 is the largest share, 2 DivMoE's figure."""
    return load_shares(counts_LE).topk(min(number, counts_LE.shape[-1]), dim=-1).values.sum(dim=-1)


def dead_experts(counts_LE: Int64[Tensor, "layers experts"]) -> Int64[Tensor, " layers"]:
    """Number of experts that no token selected."""
    return (counts_LE == 0).sum(dim=-1)


def within_group_coselection(stats: RoutingStats, groups: Sequence[int]) -> Float[Tensor, " layers"]:
    """Share of the pairs of experts that a token selected together which lie in one group; 0 for `one_per_group`.

    `groups` is the group of each expert. NaN where no token selected two experts.
    """
    assert stats.pairs_LEE is not None, "measure with pairs=True"
    group_E = torch.tensor(groups, device=stats.pairs_LEE.device)
    different_EE = ~torch.eye(len(groups), dtype=torch.bool, device=group_E.device)
    inside_EE = different_EE & (group_E[:, None] == group_E[None, :])
    pairs_LEE = stats.pairs_LEE.to(torch.float64)
    return (pairs_LEE * inside_EE).sum(dim=(-2, -1)) / (pairs_LEE * different_EE).sum(dim=(-2, -1))


def summarise_load(counts_LE: Int64[Tensor, "layers experts"]) -> dict[str, list[float]]:
    """Return the collapse metrics of each layer as plain numbers, for a log or a report."""
    return {
        "load_entropy": load_entropy(counts_LE).tolist(),
        "largest_share": busiest_share(counts_LE).tolist(),
        "two_busiest_share": busiest_share(counts_LE, 2).tolist(),
        "dead_experts": dead_experts(counts_LE).tolist(),
    }
