"""The rules as pure functions: fp32 logits -> allowed experts -> selected experts -> weights.

A rule has two parts. `allow` (only `document_pool` has one) chooses the experts that each token may use; `select`
chooses among them, by the model's own inference rule. Evaluation drops the first part, and a second run under
activation checkpointing reuses its result.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from moesaic.common.errors import MoesaicError
from moesaic.modeling.modeling_moesaic import group_members, route_one_per_group, route_topk
from moesaic.routing.config import RuleConfig
from moesaic.routing.draws import draw_integers, fold_key
from moesaic.routing.routers import RouterSettings, Weighting
from moesaic.routing.types import RoutingContext, RoutingDecision, mask_logits

Allow = Callable[[Tensor, RoutingContext, int, Tensor | None], Tensor]
"""(logits_TE, context, layer, bias_E) -> allowed_TE."""
Select = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]
"""(masked logits_TE, bias_E) -> (weights_TK, expert_ids_TK)."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A rule for one router."""

    select: Select
    allow: Allow | None = None


def build_rule(config: RuleConfig, settings: RouterSettings) -> Rule:
    """Return the rule that `config` asks for on a router with these settings, or a one-line `MoesaicError`."""
    own_rule = "topk" if settings.groups is None else "one_per_group"
    return _RULES[config.rule or own_rule](config, settings)


def decide(
    rule: Rule,
    logits_TE: Float[Tensor, "tokens experts"],
    *,
    bias_E: Float[Tensor, " experts"] | None = None,
    context: RoutingContext | None = None,
    layer: int = 0,
    allowed_TE: Bool[Tensor, "tokens experts"] | None = None,
) -> RoutingDecision:
    """Apply a rule to the logits of one MoE layer (`layer` counts MoE layers).

    Without a context no pool constrains the tokens. `allowed_TE` repeats an earlier choice of pools. `bias_E`
    (loss-free balancing) changes which experts are chosen, never their weights.
    """
    if allowed_TE is None and context is not None and rule.allow is not None:
        allowed_TE = rule.allow(logits_TE, context, layer, bias_E)
    masked_TE = logits_TE if allowed_TE is None else mask_logits(logits_TE, allowed_TE)
    weights_TK, expert_ids_TK = rule.select(masked_TE, bias_E)
    return RoutingDecision(
        logits_TE=logits_TE, expert_ids_TK=expert_ids_TK, weights_TK=weights_TK, allowed_TE=allowed_TE
    )


def draw_pool_sizes(context: RoutingContext, low: int, high: int, *, layer: int | None) -> Int64[Tensor, " documents"]:
    """Draw the pool size of each document uniformly from {low..high} (EMO, section 3.3).

    A function of (seed, step, layer, document's key) and nothing else; `layer` None shares the draw across layers.
    """
    if low == high:
        return torch.full_like(context.document_keys_N, low)
    stream = fold_key(context.seed, context.step, -1 if layer is None else layer)
    return draw_integers(context.document_keys_N, low, high, stream=stream)


@torch.no_grad()
def document_pools(
    logits_TE: Float[Tensor, "tokens experts"],
    context: RoutingContext,
    sizes_N: Int64[Tensor, " documents"],
    bias_E: Float[Tensor, " experts"] | None = None,
    weighting: Weighting = "selected",
) -> Bool[Tensor, "documents experts"]:
    """Return the experts of each document's pool (EMO, equation of section 3.2).

    The mean over the document's tokens of the router's probabilities (softmax over all routed experts; of sigmoid
    weights the sigmoids over their sum); the `sizes_N` best, the lower id first
    among equals. Padding is in no document. The whole document decides, so routing in training is not causal; no
    gradient flows through the choice. A selection bias counts here as it does in the selection: an expert outside every
    pool could not be helped by it otherwise.
    """
    probability_TE = _PROBABILITIES[weighting](logits_TE)
    sums_NE = probability_TE.new_zeros(context.num_documents + 1, logits_TE.shape[-1])
    sums_NE.index_add_(0, context.segments_T, probability_TE)
    mean_NE = sums_NE[:-1] / context.lengths_N[:, None]
    if bias_E is not None:
        mean_NE = mean_NE + bias_E
    order_NE = mean_NE.argsort(dim=-1, descending=True, stable=True)
    kept_NE = torch.arange(logits_TE.shape[-1], device=logits_TE.device) < sizes_N[:, None]
    return torch.zeros_like(kept_NE).scatter_(1, order_NE, kept_NE)


def token_pools(pools_NE: Bool[Tensor, "documents experts"], context: RoutingContext) -> Bool[Tensor, "tokens experts"]:
    """Return the pool of each token's document; padding may use every expert (it is routed, and counted nowhere)."""
    all_experts_1E = pools_NE.new_ones(1, pools_NE.shape[-1])
    return torch.cat([pools_NE, all_experts_1E])[context.segments_T]


def weights_of(
    logits_TE: Float[Tensor, "tokens experts"], expert_ids_TK: Int64[Tensor, "tokens active"], *, weighting: str
) -> Float[Tensor, "tokens active"]:
    """Return the weights that a router gives to experts chosen by something else than its own scores."""
    return _WEIGHTINGS[weighting](logits_TE, expert_ids_TK)


_WEIGHTINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "selected": lambda logits_TE, ids_TK: logits_TE.gather(1, ids_TK).softmax(dim=-1),
    "all": lambda logits_TE, ids_TK: logits_TE.softmax(dim=-1).gather(1, ids_TK),
    "sigmoid": lambda logits_TE, ids_TK: F.logsigmoid(logits_TE.gather(1, ids_TK)).softmax(dim=-1),
}

_PROBABILITIES: dict[str, Callable[[Tensor], Tensor]] = {
    "selected": lambda logits_TE: logits_TE.softmax(dim=-1),
    "all": lambda logits_TE: logits_TE.softmax(dim=-1),
    "sigmoid": lambda logits_TE: F.logsigmoid(logits_TE).softmax(dim=-1),
}

_GROUP_SHARES = {"selected": "all", "all": "all", "sigmoid": "sigmoid"}
"""The weighting under which a choice of all groups gives the probability of each."""


def _with_bias(choose: Callable[[Tensor], tuple[Tensor, Tensor]], settings: RouterSettings) -> Select:
    """Add a selection bias to what `choose` selects by.

    The scores it is added to are probabilities, as in the paper; experts outside the pool stay outside.
    """

    probability = _PROBABILITIES[settings.weighting]

    def select(logits_TE: Tensor, bias_E: Tensor | None) -> tuple[Tensor, Tensor]:
        if bias_E is None:
            return choose(logits_TE)
        with torch.no_grad():
            score_TE = (probability(logits_TE) + bias_E).masked_fill(logits_TE.isneginf(), float("-inf"))
            _, expert_ids_TK = choose(score_TE)
        return weights_of(logits_TE, expert_ids_TK, weighting=settings.weighting), expert_ids_TK

    return select


def _topk(config: RuleConfig, settings: RouterSettings) -> Rule:
    del config
    return Rule(select=_with_bias(lambda scores: route_topk(scores, settings.top_k, settings.weighting), settings))


def _document_pool(config: RuleConfig, settings: RouterSettings) -> Rule:
    if settings.groups is not None:
        raise MoesaicError(
            "routing.rule: document_pool trains a model that routes by plain top-k at inference, but this one has "
            "routing_rule one_per_group; set routing_rule to topk in its config.json first"
        )
    low, high = config.pool_range(top_k=settings.top_k, num_experts=settings.num_experts)

    def allow(logits_TE: Tensor, context: RoutingContext, layer: int, bias_E: Tensor | None) -> Tensor:
        sizes_N = draw_pool_sizes(context, low, high, layer=_DRAW_LAYERS[config.pool_draw](layer))
        return token_pools(document_pools(logits_TE, context, sizes_N, bias_E, settings.weighting), context)

    return Rule(select=_topk(config, settings).select, allow=allow)


_DRAW_LAYERS: dict[str, Callable[[int], int | None]] = {
    "document_and_layer": lambda layer: layer,
    "document": lambda _: None,
}


def _one_per_group(config: RuleConfig, settings: RouterSettings) -> Rule:
    groups = config.expert_groups or settings.groups
    if groups is None:
        raise MoesaicError(
            "routing.rule: one_per_group needs to know the group of each expert, and this model's config.json has no "
            "expert_groups; give them as routing.expert_groups"
        )
    _check_groups(groups, settings)
    score = config.group_score or settings.group_score
    members_on: dict[torch.device, Tensor] = {}

    def members(device: torch.device) -> Tensor:
        if device not in members_on:  # a copy from the host in every layer would wait for the device
            members_on[device] = torch.tensor(group_members(list(groups)), device=device)
        return members_on[device]

    def choose(scores_TE: Tensor) -> tuple[Tensor, Tensor]:
        return route_one_per_group(scores_TE, members(scores_TE.device), settings.top_k, settings.weighting, score)

    if score == "max":  # the score of a group is an expert's own
        return Rule(select=_with_bias(choose, settings))

    def select(logits_TE: Tensor, bias_E: Tensor | None) -> tuple[Tensor, Tensor]:
        if bias_E is None:
            return choose(logits_TE)
        return _one_per_biased_group(logits_TE, bias_E, members(logits_TE.device), settings, score)

    return Rule(select=select)


def _one_per_biased_group(
    logits_TE: Tensor, bias_E: Tensor, members_GM: Tensor, settings: RouterSettings, score: str
) -> tuple[Tensor, Tensor]:
    """The rule of `route_one_per_group` with a selection bias, for group scores that are no expert's own.

    Groups are chosen by their share of the softmax (or of the sigmoids) over all groups plus the mean of their experts'
    biases, the expert within by its share of its group plus its own bias. So copies of an expert that have its logit
    and its bias, as a group, are chosen when it would have been, whatever their number (methods.md, section 3 b).
    """
    present_GM, safe_GM = members_GM >= 0, members_GM.clamp(min=0)
    over = _GROUP_SHARES[settings.weighting]
    share_TG, id_TG = route_one_per_group(logits_TE, members_GM, len(members_GM), over, score)  # groups in any order
    group_E = torch.zeros_like(bias_E, dtype=torch.int64)
    numbers_GM = torch.arange(len(members_GM), device=logits_TE.device)[:, None].expand_as(members_GM)
    group_E[members_GM[present_GM]] = numbers_GM[present_GM]
    share_TG = torch.zeros_like(share_TG).scatter(1, group_E[id_TG], share_TG)
    with torch.no_grad():
        bias_GM = bias_E[safe_GM].masked_fill(~present_GM, 0.0)
        _, groups_TK = route_topk(share_TG + bias_GM.sum(1) / present_GM.sum(1), settings.top_k, settings.weighting)
        logits_TGM = logits_TE[:, safe_GM].masked_fill(~present_GM, -torch.inf)
        within_TGM = (logits_TGM.softmax(dim=-1) + bias_GM).masked_fill(~present_GM, -torch.inf)
        ids_TK = safe_GM[groups_TK, within_TGM.argmax(dim=-1).gather(1, groups_TK)]
    weights_TK = share_TG.gather(1, groups_TK)
    if settings.weighting != "all":
        weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(weights_TK.dtype).tiny)
    return weights_TK, ids_TK


def _check_groups(groups: tuple[int, ...], settings: RouterSettings) -> None:
    if len(groups) != settings.num_experts:
        raise MoesaicError(
            f"routing.expert_groups: {len(groups)} entries for {settings.num_experts} experts; name a group for each"
        )
    if len(set(groups)) < settings.top_k:
        raise MoesaicError(
            f"routing.expert_groups: {len(set(groups))} groups, but {settings.top_k} experts per token must come from "
            "different groups; name more groups"
        )


_RULES: dict[str, Callable[[RuleConfig, RouterSettings], Rule]] = {
    "topk": _topk,
    "one_per_group": _one_per_group,
    "document_pool": _document_pool,
}
