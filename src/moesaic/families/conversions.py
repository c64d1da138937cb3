"""Our architecture as the target of `expand --routing one_per_copy_group`: which families convert, and how. No torch.

A native family converts where it is one of transformers' dense models with an MoE block in place of the FFN: then the
dense model's class, with our block, computes the same. Each row is proved by a test that compares both models' logits.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moesaic.common.errors import MoesaicError
from moesaic.modeling.names import class_names


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """How a native family becomes ours.

    `base` is the dense model type, `weighting` our `routing_weighting` for a config, `width` the config key of the
    experts' width, `shared_width` that of the shared experts together (None: the family has none).
    """

    base: str
    weighting: Callable[[Mapping[str, Any]], str]
    width: str = "intermediate_size"
    shared_width: str | None = None


def _always_selected(_config: Mapping[str, Any]) -> str:
    return "selected"


def _by_norm_topk_prob(config: Mapping[str, Any]) -> str:
    return "selected" if config.get("norm_topk_prob") else "all"


_ROUTER_KEYS = (
    "norm_topk_prob", "num_local_experts", "output_router_logits", "router_aux_loss_coef", "router_jitter_noise",
    "decoder_sparse_step", "mlp_only_layers", "architectures", "auto_map", "model_type",
)  # fmt: skip

CONVERSIONS: dict[str, Conversion] = {
    "qwen3_moe": Conversion(base="qwen3", weighting=_by_norm_topk_prob, width="moe_intermediate_size"),
    "mixtral": Conversion(base="mistral", weighting=_always_selected),
    "granitemoe": Conversion(base="granite", weighting=_always_selected),
    "flex_olmo": Conversion(base="olmo2", weighting=_by_norm_topk_prob),
}

WITH_SHARED: dict[str, Conversion] = {
    "granitemoeshared": Conversion(base="granite", weighting=_always_selected, shared_width="shared_intermediate_size"),
}
"""Families whose shared experts, one FFN of a width of its own, become our one shared expert of that width. Every layer
of theirs is a MoE layer, so that our `intermediate_size` is free to say it."""

REASONS: dict[str, str] = {
    "olmoe": "no dense model has its norms (of queries and keys as well as before attention and FFN)",
    "qwen2_moe": "its shared expert has a gate",
    "gpt_oss": "its attention has sinks and its experts clamp their activations",
    "granitemoeshared": "its shared expert has a width of its own",
    "deepseek_v2": "its latent attention is that of no dense model",
    "deepseek_v3": "its latent attention is that of no dense model",
    "glm4_moe": "no dense model has its attention",
}


def conversion_of(model_type: str, name: str) -> Conversion:
    """The conversion of a family; a MoesaicError says why there is none."""
    conversion = WITH_SHARED.get(model_type) or CONVERSIONS.get(model_type)
    if conversion is None:
        reason = REASONS[model_type]
        raise MoesaicError(
            f"--routing one_per_copy_group: {name}: {model_type} cannot become our architecture, because {reason}; "
            f"use --routing plain (families that convert: moesaic_*, {', '.join([*CONVERSIONS, *WITH_SHARED])})"
        )
    return conversion


def converted_config(
    conversion: Conversion, config: Mapping[str, Any], *, moe_layers: Sequence[int], num_experts: int
) -> dict[str, Any]:
    """config.json in our architecture, with plain top-k routing; the caller puts in the expert groups.

    Settings that `config` leaves to the family's defaults are written out: the dense model's defaults are others.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    full = CONFIG_MAPPING[config["model_type"]].from_dict(dict(config)).to_dict()
    if (
        full.get("sliding_window")
        and "layer_types" not in full
        and hasattr(CONFIG_MAPPING[conversion.base](), "layer_types")
    ):
        # The family has its window in every layer; the dense model asks for the kind of each.
        full["layer_types"] = ["sliding_attention"] * full["num_hidden_layers"]
    own = {
        "num_experts": num_experts,
        "moe_intermediate_size": full[conversion.width],
        "num_shared_experts": 0,
        "moe_layers": list(moe_layers),
        "routing_rule": "topk",
        "routing_weighting": conversion.weighting(full),
        "expert_groups": None,
        "group_score": "max",
        "expert_mlp_bias": False,
    }
    if conversion.shared_width is not None and full[conversion.shared_width]:
        own |= {"num_shared_experts": 1, "intermediate_size": full[conversion.shared_width]}
    kept = {key: value for key, value in full.items() if key not in _ROUTER_KEYS}
    return {**kept, **own, **class_names(conversion.base)}
