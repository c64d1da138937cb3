"""How growing stays exact: what the new config.json says for it, and the statement that then holds. No torch.

docs/statements.md states E1 to E3, with proofs: E1 is uniform m-fold copies with m times as many active experts, E2 at
most one of the copies of an expert (`one_per_copy_group`), E3 one active expert whose weight is constant.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from moesaic.common.errors import MoesaicError
from moesaic.common.statement import Statement
from moesaic.expansion.resolve import ExpandPlan
from moesaic.families.moe import EXPERT_COUNT_KEYS, TOP_K_ALIASES
from moesaic.modeling.names import class_names

# --- config.json ------------------------------------------------------------------------------------------------------


def grown_config(plan: ExpandPlan, sources: Mapping[int, Sequence[int]]) -> dict[str, Any]:
    """config.json of the result; `sources` are those of the experts of each MoE layer.

    Raises:
        MoesaicError: a key that has to change is not there.
    """
    family, old = plan.model.family, plan.checkpoint.config
    keys = {key for key in EXPERT_COUNT_KEYS if old.get(key) == plan.model.num_experts} or {family.experts_key}
    top_k_keys = {family.top_k_key, *(key for key in TOP_K_ALIASES if old.get(key) == plan.model.top_k)}
    config = dict(old) | dict.fromkeys(keys, plan.experts) | dict.fromkeys(top_k_keys, plan.top_k)
    if plan.exclusive:
        if plan.gets_our_routers:
            config |= class_names(old["model_type"])
        groups = _shortest([list(ids) for ids in sources.values()])
        config |= {"routing_rule": "one_per_group", "group_score": "log_mean_exp", "expert_groups": groups}
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


# --- the statement ----------------------------------------------------------------------------------------------------


def statement(plan: ExpandPlan) -> Statement:
    """The strongest statement that holds for a plan."""
    recipe = plan.recipe
    changed = [
        f"--{name} {value}"
        for name, value in (("expert-op", recipe.expert_op), ("router-op", recipe.router_op))
        if value not in ("copy", "bias_only")
    ]
    if changed:
        return _nothing(f"nothing is preserved exactly: {' and '.join(changed)} makes duplicates that are no copies")
    if plan.exclusive:
        return Statement(code="E2", text=_exclusive(plan))
    if plan.multiplied and not plan.grouped and not plan.model.family.adds_up:
        return _nothing(
            "nothing is preserved exactly: in this family m active copies of an expert have together another weight "
            "than the expert had"
        )
    if plan.multiplied and not plan.grouped:
        return Statement(code="E1", text=_multiplied(plan))
    if plan.own_bias or any(any(row) for row in plan.recorded_bias or ()):
        return _nothing(_biased(plan))
    if plan.grouped:
        return _grouped(plan)
    if plan.top_k == plan.model.top_k == 1 and plan.normalised and plan.groups == 1:
        text = "exact: one expert per token, with a constant weight, and whichever copy wins is the same expert"
        return Statement(code="E3", text=text + _noise(plan))
    return _nothing(_jump(plan))


def _nothing(text: str) -> Statement:
    return Statement(code="none", text=text)


def _same_top_k(plan: ExpandPlan) -> str:
    if plan.top_k == plan.model.top_k:
        return "at the same number of active experts"
    return f"with the source at {plan.top_k} active experts instead of {plan.model.top_k}"


def _exclusive(plan: ExpandPlan) -> str:
    text = f"exact {_same_top_k(plan)}: the copies of an expert are one group, whose score is its source's logit"
    if not plan.recipe.delta:
        return f"{text} (--delta 0: of equal copies the first is always used)"
    return (
        f"{text}; the noise of --delta {plan.recipe.delta:g} on router rows adds up to zero over a group, so scores "
        "deviate in second order"
    )


def _grouped(plan: ExpandPlan) -> Statement:
    config = plan.checkpoint.config
    if config.get("group_score") == "max" and plan.normalised:
        text = f"exact {_same_top_k(plan)}: copies join the group of their source, whose largest logit stays"
        return Statement(code="E2", text=text + _noise(plan))
    return _nothing(
        f"nothing is preserved exactly: group score {config.get('group_score')} and weighting "
        f"{config.get('routing_weighting')} change when a group gets copies of some of its experts"
    )


def _biased(plan: ExpandPlan) -> str:
    return (
        "nothing is preserved exactly: training left a selection bias, which is added to probabilities, and those "
        f"that copies of an expert share become smaller; exact are --routing one_per_copy_group, or uniform copies "
        f"with --top-k times {_times(plan)}"
    )


def _multiplied(plan: ExpandPlan) -> str:
    text = (
        f"exact: every expert is there {plan.multiple} times and {plan.top_k} instead of {plan.model.top_k} experts "
        "are active, so all copies of an expert are used together"
    )
    if plan.whole_groups:
        text += f"; groups of experts are duplicated as a whole, {plan.groups * (plan.multiple or 1)} of them"
    if plan.divides_scaling:
        text += f"; {plan.model.family.scaling_key} is divided by {plan.multiple}"
    return text + _noise(plan)


def _noise(plan: ExpandPlan) -> str:
    if not plan.recipe.delta:
        return ""
    where = "selection bias" if plan.bias_takes_noise else "router rows"
    return f"; not exact by the noise of --delta {plan.recipe.delta:g} on the duplicates' {where} (--delta 0 is)"


def _jump(plan: ExpandPlan) -> str:
    return (
        f"nothing is preserved exactly: plain top-{plan.top_k} uses several copies of the same expert, so the model "
        "starts as the source with fewer different experts per token, and its loss jumps (measure it); exact are "
        f"--routing one_per_copy_group, or uniform copies with --top-k times {_times(plan)}"
    )


def _times(plan: ExpandPlan) -> str:
    times, rest = divmod(plan.experts, plan.model.num_experts)
    return "as many as the copies" if rest else str(times)
