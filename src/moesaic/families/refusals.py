"""Why a config cannot be the dense base of an MoE: one line each, with the way out."""

from collections.abc import Mapping, Sequence
from typing import Any

from moesaic.common.errors import MoesaicError

_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts")

_REASONS: Mapping[str, tuple[str, ...]] = {
    "its FFN has no gate (gate, up and down are needed)": (
        *("gpt2", "gpt_neo", "gpt_neox", "gptj", "gpt_bigcode", "bloom", "opt", "falcon", "mpt", "codegen", "xglm"),
        *("phi", "starcoder2", "nemotron", "persimmon", "arcee", "apertus", "jais2", "biogpt", "ctrl"),
    ),
    "it is a state-space or recurrent model whose layers have no gated FFN of the supported form": (
        *("mamba", "mamba2", "falcon_mamba", "rwkv", "recurrent_gemma", "xlstm", "bamba", "zamba", "zamba2"),
        *("falcon_h1", "nemotron_h", "lfm2"),
    ),
    "it is an encoder or an encoder-decoder, not a decoder-only language model": (
        *("bert", "roberta", "xlm-roberta", "distilbert", "albert", "electra", "deberta", "deberta-v2", "modernbert"),
        *("t5", "mt5", "umt5", "bart", "mbart", "pegasus", "t5gemma", "whisper", "clip", "siglip", "vit"),
    ),
    "it normalises inside the FFN, so its FFN cannot be cut into shards": ("bitnet",),
}


def is_moe(config: Mapping[str, Any]) -> bool:
    """Return whether a config describes a mixture of experts."""
    counts = (config.get(key) for key in _EXPERT_KEYS)
    return any(isinstance(count, int) and count > 1 for count in counts)


def refuse_config(
    config: Mapping[str, Any], text: Mapping[str, Any], name: str, families: Sequence[str]
) -> MoesaicError:
    """Return the error for a config that no row of the table matches: the reason and what works instead."""
    model_type = str(text.get("model_type") or config.get("model_type"))
    if is_moe(text):
        return MoesaicError(
            f"{name}: {model_type} is already a mixture of experts, and upcycling needs a dense model: `moesaic plan` "
            "and `moesaic generate` work on it, or give the dense model it was made from"
        )
    reason = next((why for why, types in _REASONS.items() if model_type in types), None)
    if reason is None:
        reason = "it is not in the table of families" if model_type != "None" else "the config names no model_type"
    return MoesaicError(
        f"{name}: model_type {model_type} cannot be a base: {reason}; families that work: {', '.join(families)}"
    )
