"""config.json of a grown model. No torch."""

from collections.abc import Mapping, Sequence
from typing import Any

from moesaic.common.errors import MoesaicError
from moesaic.expansion.resolve import ExpandPlan
from moesaic.families.conversions import converted_config
from moesaic.families.moe_table import EXPERT_COUNT_KEYS

_TOP_K_ALIASES = ("experts_per_token",)
"""Further keys of the number of active experts (GPT-OSS as published)."""


def grown_config(plan: ExpandPlan, sources: Mapping[int, Sequence[int]]) -> dict[str, Any]:
    """config.json of the result; `sources` are those of the experts of each MoE layer.

    Raises:
        MoesaicError: a key that has to change is not there.
    """
    family, old = plan.model.family, plan.checkpoint.config
    if plan.conversion is not None:
        layers = [layer.layer for layer in plan.model.layers]
        config = converted_config(plan.conversion, old, moe_layers=layers, num_experts=plan.experts)
        config["num_experts_per_tok"] = plan.top_k
    else:
        keys = {key for key in EXPERT_COUNT_KEYS if old.get(key) == plan.model.num_experts} or {family.experts_key}
        top_k_keys = {family.top_k_key, *(key for key in _TOP_K_ALIASES if key in old)}
        config = dict(old) | dict.fromkeys(keys, plan.experts) | dict.fromkeys(top_k_keys, plan.top_k)
    if plan.exclusive:
        groups = list(sources.values())
        config |= {
            "routing_rule": "one_per_group",
            "group_score": "log_mean_exp",
            "expert_groups": _shortest([list(ids) for ids in groups]),
        }
    elif plan.grouped:
        config["expert_groups"] = _joined_groups(old["expert_groups"], list(sources.values()))
    if plan.whole_groups:
        assert family.group_keys is not None
        config |= {key: old[key] * plan.multiple for key in family.group_keys}
    if plan.divides_scaling:
        config[str(family.scaling_key)] = _scaling(plan) / (plan.multiple or 1)
    return config


def _joined_groups(old: list[Any], sources: Sequence[Sequence[int]]) -> list[Any]:
    """Copies are in the group of their source."""
    per_layer = old if isinstance(old[0], list) else [old] * len(sources)
    return _shortest([[ids[source] for source in of_layer] for ids, of_layer in zip(per_layer, sources, strict=True)])


def _shortest(groups: list[list[int]]) -> list[Any]:
    """One list where all layers have the same."""
    return groups[0] if all(ids == groups[0] for ids in groups) else groups


def _scaling(plan: ExpandPlan) -> float:
    key = str(plan.model.family.scaling_key)
    value = plan.checkpoint.config.get(key)
    if not isinstance(value, (int, float)):
        raise MoesaicError(
            f"{plan.checkpoint.name}: config.json has no {key}, which must be divided by {plan.multiple}"
        )
    return value
