"""Does a recipe fit its model: experts, pools, groups, losses. The same check for `train`, `--dry-run` and `plan`.

No torch: a config says it all. Every refusal names the key and the way out.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from moesaic.common.errors import MoesaicError
from moesaic.families.family import our_base
from moesaic.families.moe import EXPERT_COUNT_KEYS
from moesaic.families.moe_table import family_of, routed
from moesaic.routing.config import RULES_WORK_ON, check_groups
from moesaic.training.recipe import TrainRecipe


def refuse_misfit(recipe: TrainRecipe, config: Mapping[str, Any]) -> None:
    """Refuse (MoesaicError) what a model with this (text) config cannot do, or the ranks cannot share."""
    model_type, experts = str(config.get("model_type")), _experts(config)
    wanted = needs_routers(recipe)
    if wanted and not _has_routers(config):
        raise MoesaicError(
            f"{wanted[0]}: {model_type} has no router that training rules work on; leave it out, or take a model of "
            f"{RULES_WORK_ON}"
        )
    ranks = recipe.parallel.expert
    if ranks > 1 and experts is None:
        raise MoesaicError(f"parallel.expert ({ranks}): {model_type} has no experts to divide; set it to 1")
    if ranks > 1 and experts is not None and experts % ranks:
        raise MoesaicError(
            f"parallel.expert ({ranks}) must divide the model's {experts} experts; use {_divisors(experts)}"
        )
    if wanted and experts is not None:
        _check_rule(recipe, config, experts)


def needs_routers(recipe: TrainRecipe) -> list[str]:
    """The keys of a recipe that work on the routers of a model."""
    losses = recipe.losses
    keys = {
        "routing.rule": recipe.routing.rule is not None,
        "losses.balance": losses.balance is not None,
        "losses.router_z": losses.router_z > 0,
        "losses.bias_balancing": losses.bias_balancing is not None,
    }
    return [key for key, is_set in keys.items() if is_set]


def _experts(config: Mapping[str, Any]) -> int | None:
    """Routed experts of a layer; None for a dense model."""
    family = family_of(config)
    keys = EXPERT_COUNT_KEYS if family is None else (family.experts_key, *EXPERT_COUNT_KEYS)
    return next((config[key] for key in keys if isinstance(config.get(key), int) and config[key] > 0), None)


def _has_routers(config: Mapping[str, Any]) -> bool:
    """Whether our rules can take the place of the model's routers."""
    if our_base(config.get("model_type")) is not None:
        return bool(config.get("moe_layers"))
    return routed(config) is not None


def _check_rule(recipe: TrainRecipe, config: Mapping[str, Any], experts: int) -> None:
    """The rule against the experts that there are, and the groups that they are in."""
    family, rule = family_of(config), recipe.routing
    assert family is not None, "it has routers"
    top_k, groups = int(config[family.top_k_key]), _own_groups(config)
    if rule.rule == "document_pool":
        rule.refuse_groups(groups)
        rule.pool_range(top_k=top_k, num_experts=experts)
    if rule.rule == "one_per_group":
        row = routed(config)
        rule.refuse_decision(None if row is None else row.decision)
        for of_layer in [list(rule.expert_groups)] if rule.expert_groups is not None else groups or [None]:
            check_groups(of_layer, num_experts=experts, top_k=top_k)


def _own_groups(config: Mapping[str, Any]) -> list[Sequence[int]] | None:
    """The group of each expert by the model's own rule, one list or one for each MoE layer; None without groups."""
    groups = config.get("expert_groups")
    if config.get("routing_rule") != "one_per_group" or not groups:
        return None
    return groups if isinstance(groups[0], list) else [groups]


def _divisors(number: int) -> str:
    return ", ".join(str(one) for one in range(1, number + 1) if number % one == 0)
