"""Released EMO checkpoints (`model_type: emo`, github.com/allenai/EMO) as our architecture on a Llama. Torch-free.

An EMO layer is a Llama layer (norms named `pre_attention_layernorm` and `pre_feedforward_layernorm`) with `num_experts`
experts, of which the last `num_shared_experts` are shared: their rows of the router have a softmax of their own, which
is 1 for a single one. The others are chosen by plain top-k with `num_experts_per_tok - num_shared_experts`, weighted by
the softmax over all of them.
"""

import re
from collections.abc import Mapping
from typing import Any

from moesaic.checkpoint.headers import TensorInfo
from moesaic.checkpoint.lazy import Lazy, stored
from moesaic.checkpoint.source import Checkpoint
from moesaic.common.errors import MoesaicError
from moesaic.exporting.view import Expert, LayerParts
from moesaic.families.config_values import MOE_KINDS, check_values, require
from moesaic.modeling.names import class_names

TRAINED_LENGTH = 4096
"""Tokens; conversion scripts left -1 in some configs."""

_DEFAULTS: Mapping[str, Any] = {
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "use_cache": True,
    "pad_token_id": 100277,
    "bos_token_id": None,
    "eos_token_id": 100257,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
}
_NEEDED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_experts",
    "num_experts_per_tok",
)  # fmt: skip

_NORMS = {
    "pre_attention_layernorm.weight": "input_layernorm.weight",
    "pre_feedforward_layernorm.weight": "post_attention_layernorm.weight",
}
_LAYER = re.compile(r"model\.layers\.(?P<layer>\d+)\.(?P<rest>.+)")
_EXPERT = re.compile(r"mlp\.experts\.(?P<expert>\d+)\.(?P<role>gate|up|down)_proj\.weight")
_PLAIN = re.compile(r"(self_attn\.[qkvo]_proj\.(weight|bias))|(mlp\.gate\.weight)")
_TOP = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")


def emo_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """config.json of the same model as `moesaic_llama`.

    Raises:
        MoesaicError: a setting that our architecture does not have; names the key.
    """
    config = checkpoint.config
    name = f"{checkpoint.name}: config.json"
    require(config, _NEEDED, name)
    check_values(config, name, kinds=MOE_KINDS, sizes=_NEEDED)
    shared = _shared_experts(checkpoint)
    layers, experts = config["num_hidden_layers"], config["num_experts"]
    heads, length = config["num_attention_heads"], config.get("max_position_embeddings")
    return {
        **{key: config.get(key, default) for key, default in _DEFAULTS.items()},
        **{key: config[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")},
        "num_attention_heads": heads,
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "max_position_embeddings": length if isinstance(length, int) and length > 0 else TRAINED_LENGTH,
        "rope_parameters": _rope(config),
        "mlp_bias": False,
        "dtype": config.get("dtype") or config.get("torch_dtype"),
        "num_experts": experts - shared,
        "num_experts_per_tok": config["num_experts_per_tok"] - shared,
        "moe_intermediate_size": config["intermediate_size"],
        "num_shared_experts": shared,
        "moe_layers": list(range(layers)),
        "routing_rule": "topk",
        "routing_weighting": "selected" if config.get("norm_topk_prob") else "all",
        "expert_groups": None,
        "group_score": "max",
        "expert_mlp_bias": False,
        **class_names("llama"),
    }


def emo_layers(checkpoint: Checkpoint, config: Mapping[str, Any]) -> tuple[list[LayerParts], dict[str, Lazy]]:
    """The MoE layers and all other tensors under Llama's names; `config` is that of `emo_config`.

    Raises:
        MoesaicError: a tensor that is missing, unknown, or of another shape than the config says.
    """
    total = config["num_experts"] + config["num_shared_experts"]
    others: dict[str, Lazy] = {}
    routers: dict[int, TensorInfo] = {}
    experts: dict[tuple[int, int, str], TensorInfo] = {}
    for name, info in checkpoint.tensors.items():
        match = _LAYER.fullmatch(name)
        rest = match["rest"] if match else ""
        if match and (own := _EXPERT.fullmatch(rest)):
            experts[int(match["layer"]), int(own["expert"]), own["role"]] = info
        elif match and rest == "mlp.gate.weight":
            routers[int(match["layer"])] = info
        elif match and (rest in _NORMS or _PLAIN.fullmatch(rest)):
            others[f"model.layers.{match['layer']}.{_NORMS.get(rest, rest)}"] = stored(info)
        elif name in _TOP:
            others[name] = stored(info)
        else:
            raise MoesaicError(f"{checkpoint.name}: unknown tensor {name} in an EMO checkpoint")
    layers = [_layer(checkpoint, config, index, total, routers, experts) for index in config["moe_layers"]]
    if len(experts) != 3 * total * len(layers):
        extra = next(key for key in experts if key[0] >= len(layers) or key[1] >= total)
        raise MoesaicError(f"{checkpoint.name}: {experts[extra].name} is one more than config.json says")
    return layers, others


def _layer(
    checkpoint: Checkpoint,
    config: Mapping[str, Any],
    index: int,
    total: int,
    routers: Mapping[int, TensorInfo],
    experts: Mapping[tuple[int, int, str], TensorInfo],
) -> LayerParts:
    width, hidden, routed = config["moe_intermediate_size"], config["hidden_size"], config["num_experts"]
    shapes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    router = routers.get(index)
    if router is None:
        raise MoesaicError(f"{checkpoint.name}: model.layers.{index}.mlp.gate.weight is missing")
    if router.shape != (total, hidden):
        raise MoesaicError(
            f"{checkpoint.name}: {router.name} has shape {list(router.shape)}, expected {[total, hidden]}"
        )

    def matrix(expert: int, role: str) -> Lazy:
        info = experts.get((index, expert, role))
        if info is None:
            missing = f"model.layers.{index}.mlp.experts.{expert}.{role}_proj.weight"
            raise MoesaicError(f"{checkpoint.name}: {missing} is missing")
        if info.shape != shapes[role]:
            raise MoesaicError(
                f"{checkpoint.name}: {info.name} has shape {list(info.shape)}, expected {list(shapes[role])}"
            )
        return stored(info)

    made = [Expert(gate=matrix(e, "gate"), up=matrix(e, "up"), down=matrix(e, "down")) for e in range(total)]
    return LayerParts(
        layer=index,
        router=stored(router).rows(0, routed),
        experts=tuple(made[:routed]),
        shared=made[routed] if total > routed else None,
    )


def _shared_experts(checkpoint: Checkpoint) -> int:
    """The number of shared experts, 0 or 1; everything that our architecture cannot say is refused."""
    config = checkpoint.config
    shared = config.get("num_shared_experts") or 0
    refusals = {
        "always_active_experts": "experts that are always active and share a softmax with the others",
        "always_active_experts_per_layer": "experts that are always active and share a softmax with the others",
    }
    for key, what in refusals.items():
        if config.get(key):
            raise MoesaicError(f"{checkpoint.name}: {key} = {config[key]}: {what} cannot be expressed here")
    for key, one in (("num_experts_per_layer", config["num_experts"]), ("num_shared_experts_per_layer", shared)):
        counts = config.get(key)
        if counts and (not isinstance(counts, list) or any(count != one for count in counts)):
            raise MoesaicError(f"{checkpoint.name}: {key} = {counts}: layers that differ cannot be expressed here")
    if shared not in (0, 1):
        raise MoesaicError(
            f"{checkpoint.name}: num_shared_experts = {shared}: the weights of several shared experts depend on the "
            "token, which cannot be expressed here"
        )
    if shared and config.get("norm_topk_prob"):
        raise MoesaicError(f"{checkpoint.name}: norm_topk_prob = true with shared experts, which EMO itself refuses")
    if not shared < config["num_experts_per_tok"] <= config["num_experts"]:
        raise MoesaicError(
            f"{checkpoint.name}: num_experts_per_tok = {config['num_experts_per_tok']} does not fit "
            f"{config['num_experts']} experts, {shared} of them shared"
        )
    return shared


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    found.setdefault("rope_type", found.pop("type", "default"))
    found.setdefault("rope_theta", config.get("rope_theta") or 500000.0)
    return found
