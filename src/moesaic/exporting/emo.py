"""Released EMO checkpoints (`model_type: emo`, github.com/allenai/EMO) as our architecture on a Llama. Torch-free.

An EMO layer is a Llama layer (norms named `pre_attention_layernorm` and `pre_feedforward_layernorm`) with `num_experts`
experts, of which the last `num_shared_experts` are shared: their rows of the router have a softmax of their own, which
is 1 for a single one. The others are chosen by plain top-k with `num_experts_per_tok - num_shared_experts`, weighted by
the softmax over all of them.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moesaic.checkpoint.source import Checkpoint
from moesaic.common.errors import MoesaicError
from moesaic.exporting.view import View, seen
from moesaic.families.config_values import MOE_KINDS, check_values, require
from moesaic.families.moe import read_experts
from moesaic.families.moe_table import EMO
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
    "attention_layernorm.weight": "input_layernorm.weight",
    "feedforward_layernorm.weight": "post_attention_layernorm.weight",
}


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


def emo_view(checkpoint: Checkpoint) -> View:
    """The checkpoint as `moesaic_llama`: Llama's names of the norms, and the last stored expert as the shared one."""
    config = emo_config(checkpoint)
    view = seen(checkpoint, read_experts(checkpoint, EMO), "llama", config)
    routed = config["num_experts"]
    layers = tuple(
        replace(
            layer,
            router=layer.router.rows(0, routed),
            experts=layer.experts[:routed],
            shared=layer.experts[routed] if len(layer.experts) > routed else None,
        )
        for layer in view.layers
    )
    return replace(view, layers=layers, others={_name(name): one for name, one in view.others.items()})


def _name(stored: str) -> str:
    layer, _, rest = stored.rpartition(".pre_")
    return f"{layer}.{_NORMS[rest]}" if rest in _NORMS else stored


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
