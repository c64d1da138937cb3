"""From a config to the tensors that a dense checkpoint must have, without opening any file (no torch)."""

from collections.abc import Mapping
from typing import Any

from moesaic.common.errors import MoesaicError
from moesaic.families.config_values import check_activation, check_rope, check_values
from moesaic.families.dense_table import FAMILIES, WRAPPER_TEXT_TYPES, DenseFamily
from moesaic.families.refusals import refuse_config

EMBEDDINGS = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


def text_config(config: Mapping[str, Any], name: str = "config.json") -> tuple[DenseFamily, dict[str, Any]]:
    """Return the family and the text model's config of a (possibly multimodal) config, defaults filled in.

    Raises:
        MoesaicError: the model type cannot be a base (the message says why and which can), or a value is of the wrong
            kind.
    """
    inner = config.get("text_config")
    if isinstance(inner, Mapping):
        text = dict(inner)
        text.setdefault("model_type", WRAPPER_TEXT_TYPES.get(str(config.get("model_type")), None))
        for key in ("tie_word_embeddings", "dtype", "torch_dtype"):
            if key in config:
                text.setdefault(key, config[key])
    else:
        text = dict(config)
    family = FAMILIES.get(str(text.get("model_type")))
    if family is None:
        raise refuse_config(config, text, name, sorted(FAMILIES))
    for key, reason in family.notes.items():
        if text.get(key):
            raise MoesaicError(f"{name}: {family.model_type} with {key}={text[key]!r} is not supported: {reason}")
    flags = [part.key for part in family.optional] + ([family.ffn_bias_key] if family.ffn_bias_key else [])
    check_values(text, name, sizes=family.defaults, flags=flags)
    check_activation(text, family.activation_key, name)
    check_rope(text, name, aliases=family.rope_aliases)
    return family, {**family.defaults, **text}


def sizes(family: DenseFamily, config: Mapping[str, Any]) -> dict[str, int]:
    """Return the numbers behind the letters of the table for one config (see `dense_table`)."""
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_dim = hidden // heads if family.fixed_head_dim else int(config.get("head_dim") or hidden // heads)
    width = int(config["intermediate_size"])
    q, k = heads * head_dim, kv_heads * head_dim
    letters = {"d": hidden, "f": width, "v": int(config["vocab_size"]), "h": heads, "g": kv_heads, "e": head_dim}
    return {**letters, "q": q, "k": k, "2f": 2 * width, "q+2k": q + 2 * k}


def is_tied(family: DenseFamily, config: Mapping[str, Any]) -> bool:
    """Return whether the config ties the output head to the embedding (a missing key means the class's default)."""
    flag = config.get("tie_word_embeddings")
    return family.tied if flag is None else bool(flag)


def has_ffn_bias(family: DenseFamily, config: Mapping[str, Any]) -> bool:
    """Return whether gate, up and down have biases."""
    return family.ffn_bias_key is not None and bool(config.get(family.ffn_bias_key, False))


def ffn_shapes(family: DenseFamily, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the stored FFN tensors of one layer: name below `model.layers.N.` -> shape."""
    number = sizes(family, config)
    d, f = number["d"], number["f"]
    inputs = {family.fused_gate_up: 2 * f} if family.fused_gate_up else {family.gate: f, family.up: f}
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (rows, d) for name, rows in inputs.items()}
    shapes[f"{family.down}.weight"] = (d, f)
    if has_ffn_bias(family, config):
        shapes |= {f"{name}.bias": (rows,) for name, rows in inputs.items()}
        shapes[f"{family.down}.bias"] = (d,)
    return shapes


def other_shapes(family: DenseFamily, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return every tensor outside the FFNs: canonical name -> shape, without `lm_head.weight` when it is tied."""
    number = sizes(family, config)
    layer = dict(family.layer)
    for part in family.optional:
        if config.get(part.key, part.default):
            layer |= part.tensors
    shapes = {EMBEDDINGS: (number["v"], number["d"])}
    for index in range(int(config["num_hidden_layers"])):
        shapes |= {f"model.layers.{index}.{name}": _shape(dims, number) for name, dims in layer.items()}
    shapes |= {name: _shape(dims, number) for name, dims in family.top.items()}
    if not is_tied(family, config):
        shapes[HEAD] = (number["v"], number["d"])
    return shapes


def _shape(dims: str, number: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(number[letter] for letter in dims.split())
