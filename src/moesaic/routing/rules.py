"""Rules: fp32 logits -> allowed experts -> selected experts -> weights.

A rule `allow`s each token some experts (only a document pool narrows them, see `pools`) and `select`s among these, by
the model's own inference rule. Evaluation drops the first part, and a second run under activation checkpointing reuses
its result. Suffixes: T tokens of the micro-batch (sequences flattened row by row), E routed experts, K active, G groups
of at most M experts.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from moesaic.families.family import Decision
from moesaic.modeling.modeling_moesaic import (
    biased_scores,
    expert_weights,
    group_members,
    probabilities,
    route_one_per_group,
    route_topk,
)
from moesaic.routing.config import RULES, GroupScore, RuleConfig, check_groups

if TYPE_CHECKING:
    from moesaic.routing.pools import RoutingContext

Weighting = Literal["selected", "all", "sigmoid"]


@dataclass(frozen=True, kw_only=True)
class OwnChoice:
    """How a family's routers choose and weigh, where that is more than a softmax of plain logits."""

    decision: Decision
    groups: int = 1
    """Groups of equally many experts, in order, of group-limited selection."""
    chosen: int = 1
    """Groups that a token may use."""

    @property
    def weighting(self) -> Weighting:
        """What the router's probabilities are (`probabilities`)."""
        if self.decision.scoring == "sigmoid":
            return "sigmoid"
        return "selected" if self.decision.weighting == "selected" else "all"

    def values(self, logits_TE: Tensor, bias_E: Tensor | None) -> Tensor:
        """What a token chooses experts by, between 0 and 1 without bias; -inf where the logit is."""
        score = torch.sigmoid if self.decision.scoring == "sigmoid" else lambda logits: logits.softmax(dim=-1)
        bias_E = logits_TE.new_zeros(()) if bias_E is None else bias_E
        on_logits = self.decision.bias_on == "logits"
        values_TE = score(logits_TE + bias_E) if on_logits else score(logits_TE) + bias_E
        return values_TE.masked_fill(logits_TE.isneginf(), -torch.inf)

    @torch.no_grad()
    def select(self, logits_TE: Tensor, bias_E: Tensor | None, top_k: int) -> Int64[Tensor, "tokens active"]:
        """The experts of each token: of its best groups first, and then, where a pool leaves too few there, of others.

        A group counts its best expert, or its two best, among those that the token may use.
        """
        values_TE = self.values(logits_TE, bias_E)
        if self.decision.group_rank == "none":
            return values_TE.topk(top_k, dim=-1).indices
        values_TGM = values_TE.unflatten(-1, (self.groups, -1))
        counted = min(2, values_TGM.shape[-1]) if self.decision.group_rank == "two best" else 1
        # Experts that are not allowed count less than any other; a finite number keeps their groups in order.
        least_T11 = values_TGM.masked_fill(values_TGM.isinf(), torch.inf).amin(dim=(1, 2), keepdim=True) - 1
        ranks_TG = values_TGM.maximum(least_T11).topk(counted, dim=-1).values.sum(dim=-1)
        best_TG = ranks_TG.topk(self.chosen, dim=-1).indices
        inside_TG = torch.zeros_like(ranks_TG, dtype=torch.bool).scatter(1, best_TG, True)
        inside_TE = inside_TG[..., None].expand_as(values_TGM).flatten(1) & ~values_TE.isneginf()
        order_TE = values_TE.argsort(dim=-1, descending=True, stable=True)
        first_TE = inside_TE.gather(1, order_TE).int().argsort(dim=-1, descending=True, stable=True)
        return order_TE.gather(1, first_TE[:, :top_k])

    def weigh(self, logits_TE: Tensor, ids_TK: Tensor) -> Tensor:
        """The weights of selected experts, without factors."""
        selected_TK = logits_TE.gather(-1, ids_TK)
        if (self.decision.scoring, self.decision.weighting) == ("sigmoid", "all"):
            return selected_TK.sigmoid()
        return expert_weights(logits_TE, selected_TK, self.weighting)


@dataclass(frozen=True, kw_only=True)
class RouterSettings:
    """What a router does by itself."""

    num_experts: int
    top_k: int
    weighting: Weighting
    """Softmax over the selected experts, over all without renormalisation, or sigmoids over the sum of the selected."""
    cast_weights: bool
    """Whether weights come in the hidden states' dtype, or stay in fp32."""
    groups: tuple[int, ...] | None = None
    """Group of each expert where the model's own rule is `one_per_group`."""
    group_score: GroupScore = "max"
    routed_scaling_factor: float = 1.0
    """Factor on the weights."""
    own: OwnChoice | None = None
    """Of a family whose routers are more than a softmax of plain logits: they run, a rule chooses by their logits."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RoutingDecision:
    """What one MoE layer decided for the tokens of one micro-batch."""

    logits_TE: Float[Tensor, "tokens experts"]
    """Router logits before any mask, fp32 (or fp64 in an fp64 model)."""
    expert_ids_TK: Int64[Tensor, "tokens active"]
    weights_TK: Float[Tensor, "tokens active"]
    """Weights of the selected experts, from scores without any selection bias; the model's scaling factor included."""
    allowed_TE: Bool[Tensor, "tokens experts"] | None = None
    """Experts that the token's document may use; None where all are allowed."""
    weighting: Weighting = "all"
    """The router's, which says what its probabilities are."""

    @property
    def masked_logits_TE(self) -> Float[Tensor, "tokens experts"]:
        """Logits with -inf outside the pool: what probabilities and the z-loss are computed from."""
        return self.logits_TE if self.allowed_TE is None else mask_logits(self.logits_TE, self.allowed_TE)

    def probabilities_TE(self, dtype: torch.dtype | None = None) -> Float[Tensor, "tokens experts"]:
        """The router's probabilities over the allowed experts: softmax, or of sigmoid weights sigmoids over their sum.

        Computed in `dtype`, by default that of the logits.
        """
        logits_TE = self.masked_logits_TE
        return probabilities(logits_TE if dtype is None else logits_TE.to(dtype), self.weighting)


def mask_logits(
    logits_TE: Float[Tensor, "tokens experts"], allowed_TE: Bool[Tensor, "tokens experts"]
) -> Float[Tensor, "tokens experts"]:
    """Return logits with -inf for experts that are not allowed (0 would still let them win)."""
    return logits_TE.masked_fill(~allowed_TE, float("-inf"))


class Rule(ABC):
    """A rule on one router. A new one is a subclass with `choose`, and a line in `config.RULES`."""

    needs_documents = False
    """Whether `allow` narrows the choice in training, so that the documents of a micro-batch must be known."""

    def __init__(self, config: RuleConfig, settings: RouterSettings) -> None:
        """Take the recipe's settings; raise a one-line `MoesaicError` where they do not fit the router."""
        self.config = config
        self.settings = settings

    def allow(
        self, logits_TE: Tensor, context: "RoutingContext", layer: int, bias_E: Tensor | None
    ) -> Bool[Tensor, "tokens experts"] | None:
        """The experts that each token may use; None: all."""
        del logits_TE, context, layer, bias_E

    @abstractmethod
    def choose(self, scores_TE: Tensor) -> tuple[Tensor, Tensor]:
        """The K experts of each token by scores that are -inf where it may not go: weights_TK, expert_ids_TK."""

    def select(self, logits_TE: Tensor, bias_E: Tensor | None) -> tuple[Tensor, Tensor]:
        """The same from masked logits, with the bias of loss-free balancing: it moves the choice, never the weights.

        The scores that it is added to are probabilities, as in the paper; experts outside the pool stay outside.
        """
        if bias_E is None:
            return self.choose(logits_TE)
        weighting = self.settings.weighting
        _, expert_ids_TK = self.choose(biased_scores(logits_TE, bias_E, weighting))
        return expert_weights(logits_TE, logits_TE.gather(-1, expert_ids_TK), weighting), expert_ids_TK


class TopK(Rule):
    """The K experts with the highest scores, as most models route at inference."""

    def choose(self, scores_TE: Tensor) -> tuple[Tensor, Tensor]:
        """The K best."""
        return route_topk(scores_TE, self.settings.top_k, self.settings.weighting)

    def select(self, logits_TE: Tensor, bias_E: Tensor | None) -> tuple[Tensor, Tensor]:
        """The K best as the family's own router chooses, where that is more than a softmax."""
        own = self.settings.own
        if own is None:
            return super().select(logits_TE, bias_E)
        expert_ids_TK = own.select(logits_TE, bias_E, self.settings.top_k)
        return own.weigh(logits_TE, expert_ids_TK), expert_ids_TK


class OnePerGroup(Rule):
    """The best expert of each of the K best groups (DivMoE, algorithm 1).

    The score of a group is the largest of its experts' logits, or their mean or log-mean-exp, as `group_score` says.
    """

    def __init__(self, config: RuleConfig, settings: RouterSettings) -> None:
        super().__init__(config, settings)
        if settings.groups is None:
            config.refuse_decision(settings.own)
        groups = config.expert_groups or settings.groups
        groups = check_groups(groups, num_experts=settings.num_experts, top_k=settings.top_k)
        self.score = config.group_score or settings.group_score
        self._members = group_members(list(groups))
        self._members_on: dict[torch.device, Tensor] = {}

    def members(self, device: torch.device) -> Int64[Tensor, "groups members"]:
        """The experts of each group, -1 where a group has fewer than the largest."""
        if device not in self._members_on:  # a copy from the host in every layer would wait for the device
            self._members_on[device] = torch.tensor(self._members, device=device)
        return self._members_on[device]

    def choose(self, scores_TE: Tensor) -> tuple[Tensor, Tensor]:
        """The best of each of the K best groups."""
        settings = self.settings
        return route_one_per_group(
            scores_TE, self.members(scores_TE.device), settings.top_k, settings.weighting, self.score
        )

    def select(self, logits_TE: Tensor, bias_E: Tensor | None) -> tuple[Tensor, Tensor]:
        """With a bias: of an expert where the score of a group is an expert's own, else of groups and experts."""
        settings, members_GM = self.settings, self.members(logits_TE.device)
        return route_one_per_group(logits_TE, members_GM, settings.top_k, settings.weighting, self.score, bias_E)


def build_rule(config: RuleConfig, settings: RouterSettings) -> Rule:
    """Return the rule that `config` asks for on a router with these settings, or a one-line `MoesaicError`."""
    own_rule = "topk" if settings.groups is None else "one_per_group"
    if settings.groups is not None and settings.own is not None:
        config.refuse_other_groups(own_rule)
    return resolve_name(RULES[config.rule or own_rule])(config, settings)


def decide(
    rule: Rule,
    logits_TE: Float[Tensor, "tokens experts"],
    *,
    bias_E: Float[Tensor, " experts"] | None = None,
    context: "RoutingContext | None" = None,
    layer: int = 0,
    allowed_TE: Bool[Tensor, "tokens experts"] | None = None,
    itself: tuple[Tensor, Tensor] | None = None,
) -> RoutingDecision:
    """Apply a rule to the logits of one MoE layer (`layer` counts MoE layers).

    Without a context no pool constrains the tokens. `allowed_TE` repeats an earlier choice of pools. `bias_E`
    (loss-free balancing) changes which experts are chosen, never their weights. `itself`: the weights and experts that
    the router chose with this bias; they hold where no pool does.
    """
    if allowed_TE is None and context is not None:
        allowed_TE = rule.allow(logits_TE, context, layer, bias_E)
    if allowed_TE is None and itself is not None:
        weights_TK, expert_ids_TK = itself
        return RoutingDecision(
            logits_TE=logits_TE, expert_ids_TK=expert_ids_TK, weights_TK=weights_TK, weighting=rule.settings.weighting
        )
    masked_TE = logits_TE if allowed_TE is None else mask_logits(logits_TE, allowed_TE)
    weights_TK, expert_ids_TK = rule.select(masked_TE, bias_E)
    return RoutingDecision(
        logits_TE=logits_TE,
        expert_ids_TK=expert_ids_TK,
        weights_TK=weights_TK * rule.settings.routed_scaling_factor,
        allowed_TE=allowed_TE,
        weighting=rule.settings.weighting,
    )
