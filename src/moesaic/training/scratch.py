"""The configuration of a model that starts from random weights. Torch-free, because `plan` reads it too."""

from typing import Any

from moesaic.common.errors import MoesaicError
from moesaic.common.layer_ranges import parse_layers
from moesaic.modeling.names import class_names
from moesaic.training.recipe import MoEShape, ScratchModel


def scratch_config(model: ScratchModel) -> dict[str, Any]:
    """The content of config.json: the family's fields, and those of our MoE architecture where `moe` is given."""
    if model.moe is None:
        return {**model.config, "model_type": model.family}
    depth = model.config.get("num_hidden_layers")
    if not isinstance(depth, int):
        raise MoesaicError("model.config.num_hidden_layers is missing: MoE layers are chosen by their number")
    return {
        **model.config,
        **class_names(model.family),
        "num_experts": model.moe.experts,
        "num_experts_per_tok": model.moe.top_k,
        "moe_intermediate_size": model.moe.intermediate_size,
        "num_shared_experts": model.moe.shared_experts,
        "moe_layers": list(parse_layers(model.moe.layers, depth)),
        "routing_rule": model.moe.routing,
        "routing_weighting": model.moe.weighting,
        "expert_groups": _groups(model.moe),
        "group_score": "max",
        "expert_mlp_bias": bool(model.config.get("mlp_bias", False)),
    }


def _groups(moe: MoEShape) -> list[int] | None:
    """Group of each expert: consecutive experts, equally many in each."""
    if moe.groups is None:
        return None
    return [expert // (moe.experts // moe.groups) for expert in range(moe.experts)]
