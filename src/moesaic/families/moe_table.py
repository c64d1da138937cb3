"""MoE families as data: config keys and what their router does. One row per family of transformers 5.24.

Tensor names need no row per family: on disk all of them use one of the few spellings in `moesaic.families.moe`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class MoEFamily:
    """What a config of one family says about its experts.

    `experts_key` and `top_k_key` are the config keys of E and K; a config may also write E under another of
    `EXPERT_COUNT_KEYS`. `scoring` turns logits into scores; `weighting` says what the weights of the selected experts
    are: `selected` (they sum to 1, before scaling), `all` (the scores as they are), or the config key that decides
    between the two. `scaling_key` multiplies the weights, `group_keys` are the number of groups and of groups chosen in
    group-limited selection, `selection_bias` says that a bias is added to the scores for the selection alone.
    `interleaved`: stacked matrices are (input, output), and the outputs of gate and up alternate.
    """

    model_type: str
    experts_key: str
    top_k_key: str = "num_experts_per_tok"
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    weighting: str = "selected"
    scaling_key: str | None = None
    group_keys: tuple[str, str] | None = None
    selection_bias: bool = False
    interleaved: bool = False


EXPERT_COUNT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")

_GROUPS = ("n_group", "topk_group")

_ROWS = (
    MoEFamily(model_type="olmoe", experts_key="num_experts", weighting="norm_topk_prob"),
    MoEFamily(model_type="flex_olmo", experts_key="num_experts", weighting="norm_topk_prob"),
    MoEFamily(model_type="qwen2_moe", experts_key="num_experts", weighting="norm_topk_prob"),
    MoEFamily(model_type="qwen3_moe", experts_key="num_experts", weighting="norm_topk_prob"),
    MoEFamily(model_type="mixtral", experts_key="num_local_experts"),
    MoEFamily(model_type="gpt_oss", experts_key="num_local_experts", interleaved=True),
    MoEFamily(model_type="granitemoe", experts_key="num_local_experts"),
    MoEFamily(model_type="granitemoeshared", experts_key="num_local_experts"),
    # transformers' DeepSeek-V2 never renormalises, whatever its config's norm_topk_prob says.
    MoEFamily(
        model_type="deepseek_v2",
        experts_key="n_routed_experts",
        weighting="all",
        scaling_key="routed_scaling_factor",
        group_keys=_GROUPS,
    ),
    MoEFamily(
        model_type="deepseek_v3",
        experts_key="n_routed_experts",
        scoring="sigmoid",
        weighting="norm_topk_prob",
        scaling_key="routed_scaling_factor",
        group_keys=_GROUPS,
        selection_bias=True,
    ),
    MoEFamily(
        model_type="glm4_moe",
        experts_key="n_routed_experts",
        scoring="sigmoid",
        weighting="norm_topk_prob",
        scaling_key="routed_scaling_factor",
        group_keys=_GROUPS,
        selection_bias=True,
    ),
)

OURS = MoEFamily(model_type="moesaic", experts_key="num_experts", weighting="routing_weighting")
_OURS_WITH_SIGMOID = replace(OURS, scoring="sigmoid")

MOE_FAMILIES = {row.model_type: row for row in _ROWS}


def family_of(config: Mapping[str, Any]) -> MoEFamily | None:
    """The row of a config's `model_type`; None for a type without experts or without a row."""
    model_type = str(config.get("model_type"))
    if not model_type.startswith("moesaic_"):
        return MOE_FAMILIES.get(model_type)
    return _OURS_WITH_SIGMOID if config.get(OURS.weighting) == "sigmoid" else OURS


CONVERTED_FIRST = ("emo", "flex_olmo_noqknorm_prenorm")
"""Model types of released EMO checkpoints, whose own code no longer imports: `export` reads them."""


def way_out(model_type: object) -> str:
    """The end of a refusal: how checkpoints of this type become usable; empty for others."""
    if model_type not in CONVERTED_FIRST:
        return ""
    return "; convert it first: `moesaic export CHECKPOINT OUT --to moesaic`"
