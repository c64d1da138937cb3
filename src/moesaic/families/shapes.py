"""The tensors of a model that exists only as a config: dense families and our MoE architecture on them."""

from collections.abc import Mapping
from typing import Any

from moesaic.families.config_values import check_values, require
from moesaic.families.dense_shapes import ffn_shapes, has_ffn_bias, other_shapes, text_config

MOE_PREFIX = "moesaic_"


_MOE_KEYS = ("moe_layers", "num_experts", "num_experts_per_tok", "moe_intermediate_size")


def config_shapes(config: Mapping[str, Any], name: str = "config.json") -> dict[str, tuple[int, ...]]:
    """Return name -> shape of every tensor of a dense family, or of `moesaic_<family>`; `name` is for messages.

    Raises:
        MoesaicError: the family is not in the table of dense families, or a value is missing or of the wrong kind.
    """
    model_type = str(config.get("model_type"))
    if model_type.startswith(MOE_PREFIX):
        require(config, _MOE_KEYS, name)
        check_values(config, name)
    moe_layers = set(config["moe_layers"]) if model_type.startswith(MOE_PREFIX) else set()
    base = {**config, "model_type": model_type.removeprefix(MOE_PREFIX)}
    if moe_layers:
        base.pop("num_experts", None)
    family, text = text_config(base, name)
    shapes = other_shapes(family, text)
    dense, moe = ffn_shapes(family, text), {}
    if moe_layers:
        moe = moe_shapes(config, hidden=int(text["hidden_size"]), ffn_bias=has_ffn_bias(family, text))
    for index in range(int(text["num_hidden_layers"])):
        block = moe if index in moe_layers else dense
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in block.items()}
    return shapes


def moe_shapes(config: Mapping[str, Any], *, hidden: int, ffn_bias: bool) -> dict[str, tuple[int, ...]]:
    """Return the tensors of one MoE layer of our architecture: name below `model.layers.N.` -> shape."""
    experts, width = int(config["num_experts"]), int(config["moe_intermediate_size"])
    shapes: dict[str, tuple[int, ...]] = {
        "mlp.gate.weight": (experts, hidden),
        "mlp.experts.gate_up_proj": (experts, 2 * width, hidden),
        "mlp.experts.down_proj": (experts, hidden, width),
    }
    if config.get("expert_mlp_bias", ffn_bias):
        shapes["mlp.experts.gate_up_proj_bias"] = (experts, 2 * width)
        shapes["mlp.experts.down_proj_bias"] = (experts, hidden)
    shared = int(config.get("num_shared_experts") or 0) * int(config["intermediate_size"])
    if shared:
        sizes = {"gate_proj": (shared, hidden), "up_proj": (shared, hidden), "down_proj": (hidden, shared)}
        shapes |= {f"mlp.shared_expert.{name}.weight": shape for name, shape in sizes.items()}
        if config.get("expert_mlp_bias", ffn_bias):
            shapes |= {f"mlp.shared_expert.{name}.bias": shape[:1] for name, shape in sizes.items()}
    return shapes
