"""A config.json where it comes in: the dense family it is of, or why not, and its values, checked once for all.

A config is written by others: a number may be text, null, NaN or a list. One table says what each key may hold; the
names that transformers knows (activations, kinds of rope) are literal here, because importing it takes seconds.
`tests/unit/families/test_config_values.py` compares them with transformers' own. No torch.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import Any, NamedTuple

from moesaic.common.errors import MoesaicError, suggest
from moesaic.families.dense_table import FAMILIES, WRAPPER_TEXT_TYPES, DenseFamily

ACTIVATIONS = frozenset(
    {
        "gelu", "gelu_10", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python", "gelu_python_tanh",
        "gelu_pytorch_tanh", "hardswish", "laplace", "leaky_relu", "linear", "mish", "quick_gelu", "relu", "relu2",
        "relu6", "sigmoid", "silu", "sqrtsoftplus", "swish", "tanh",
    }
)  # fmt: skip
"""The activations of transformers that have no weights of their own."""

ROPE_NEEDS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "proportional": (),
}
"""Kind of rope -> the keys that it cannot do without and transformers does not fill in."""

_ATTENTION = ("full_attention", "sliding_attention", "chunked_attention")
_ROPE_KEYS = ("rope_parameters", "rope_scaling")


class _Kind(NamedTuple):
    text: str
    accepts: Callable[[Any], bool]


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_int(value) or (isinstance(value, float) and math.isfinite(value))


def _list_of(accepts: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(accepts, value))


def _or_null(kind: _Kind) -> _Kind:
    return _Kind(f"{kind.text}, or null", lambda value: value is None or kind.accepts(value))


_SIZE = _Kind("a whole number of at least 1", lambda value: _is_int(value) and value >= 1)
_COUNT = _Kind("a whole number of at least 0", lambda value: _is_int(value) and value >= 0)
_NUMBER = _Kind("a finite number of at least 0", lambda value: _is_number(value) and value >= 0)
_NUMBERS = _Kind("a list of finite numbers", _list_of(_is_number))
_THETA = _or_null(_NUMBER)
_FLOAT = _Kind("a number with a decimal point", lambda value: isinstance(value, float) and _NUMBER.accepts(value))
_FRACTION = _Kind("a number between 0.0 and 1.0", lambda value: _FLOAT.accepts(value) and value <= 1)
_SHARE = _Kind("a number between 0 and 1", lambda value: _NUMBER.accepts(value) and value <= 1)
_FLAG = _Kind("true or false", lambda value: isinstance(value, bool))
_NAMES = _or_null(_Kind("a list of names", _list_of(lambda item: isinstance(item, str))))
_COUNTS = _Kind("a list of whole numbers", _list_of(_COUNT.accepts))
_TOKENS = _or_null(
    _Kind(
        "a token id or a list of token ids", lambda value: _is_int(value) or (value != [] and _list_of(_is_int)(value))
    )
)

TOKEN_KINDS: Mapping[str, _Kind] = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), _TOKENS)
"""Special tokens, in config.json and in generation_config.json."""

DEPTH_KINDS: Mapping[str, _Kind] = {
    "num_hidden_layers": _SIZE,
    "layer_types": _NAMES,
    "sliding_window": _or_null(_Kind("a whole number", _is_int)),
    "sliding_window_pattern": _or_null(
        _Kind("a whole number or a pattern such as LLLG", lambda value: _SIZE.accepts(value) or isinstance(value, str))
    ),
    "ffn_config": _or_null(_Kind("keys and values", lambda value: isinstance(value, Mapping))),
}
"""What any model's layers are counted by, whatever its family."""

MOE_KINDS: Mapping[str, _Kind] = {
    **DEPTH_KINDS,
    **TOKEN_KINDS,
    **dict.fromkeys(("hidden_size", "vocab_size", "num_attention_heads"), _SIZE),
    **dict.fromkeys(("num_key_value_heads", "head_dim", "n_group", "topk_group"), _or_null(_COUNT)),
    **dict.fromkeys(_ROPE_KEYS, _or_null(_Kind("keys and values", lambda value: isinstance(value, Mapping)))),
}
"""What is relied on in every native MoE family; the rest transformers checks where the model is loaded."""

_BY_KIND = (
    (_SIZE, "hidden_size intermediate_size num_attention_heads vocab_size max_position_embeddings"),
    (_SIZE, "original_max_position_embeddings no_rope_layer_interval query_pre_attn_scalar"),
    (_or_null(_SIZE), "num_key_value_heads head_dim pretraining_tp moe_intermediate_size"),
    (_COUNT, "max_window_layers"),
    (_or_null(_COUNT), "num_experts num_experts_per_tok num_shared_experts"),
    (_COUNTS, "moe_layers"),
    (_or_null(_COUNTS), "no_rope_layers"),
    (_FRACTION, "initializer_range rms_norm_eps"),
    (_SHARE, "attention_dropout resid_pdrop embd_pdrop"),
    (_NUMBER, "embedding_multiplier attention_multiplier residual_multiplier logits_scaling"),
    (_or_null(_FLOAT), "attn_logit_softcapping final_logit_softcapping"),
    (_FLAG, "use_sliding_window use_cache"),
    (_or_null(_FLAG), "use_bidirectional_attention tie_word_embeddings"),
    (_THETA, "rope_theta"),
)

_KINDS: Mapping[str, _Kind] = {
    **DEPTH_KINDS,
    **TOKEN_KINDS,
    **{key: kind for kind, keys in _BY_KIND for key in keys.split()},
    "layer_types": _or_null(_Kind(f"a list of {', '.join(_ATTENTION)}", _list_of(lambda item: item in _ATTENTION))),
}
"""Of the dense families and our own architecture."""

MOST: Mapping[str, int] = {
    "num_hidden_layers": 10_000,
    "vocab_size": 1 << 28,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 24,
    "moe_intermediate_size": 1 << 24,
    "num_attention_heads": 1 << 14,
    "num_key_value_heads": 1 << 14,
    "head_dim": 1 << 16,
    "max_position_embeddings": 1 << 40,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 1 << 16),
}
"""A hundred times what the largest models have: no machine holds more, and even to count it would take for ever."""

_PER_LAYER = frozenset({"layer_types", "no_rope_layers"})


def check_values(
    config: Mapping[str, Any],
    name: str,
    *,
    kinds: Mapping[str, _Kind] = _KINDS,
    sizes: Iterable[str] = (),
    flags: Iterable[str] = (),
) -> None:
    """Refuse a value that is of another kind than its key says; keys that are not there are fine.

    Args:
        config: the (text) config.
        name: how messages call the file.
        kinds: what keys may hold; `DEPTH_KINDS` for families that are in no table.
        sizes: keys that must be a size here although they may be null elsewhere.
        flags: further keys that are true or false.

    Raises:
        MoesaicError: names file, key, value and what it may be.
    """
    for key, kind in {**kinds, **dict.fromkeys(sizes, _SIZE), **dict.fromkeys(flags, _FLAG)}.items():
        if key in config and not kind.accepts(config[key]):
            raise MoesaicError(f"{name}: {key} is {show(config[key])}, but must be {kind.text}")
    refuse_giant(config, name)
    _check_heads(config, name)
    depth = config.get("num_hidden_layers")
    for key in _PER_LAYER & kinds.keys():
        if config.get(key) is not None and depth is not None and len(config[key]) != depth:
            raise MoesaicError(f"{name}: {key} has {len(config[key])} entries, but num_hidden_layers is {depth}")


def refuse_giant(config: Mapping[str, Any], name: str) -> None:
    """Refuse, by arithmetic, sizes that no machine holds: what is built or counted layer by layer would not end."""
    for key, most in MOST.items():
        value: Any = config.get(key)
        if _is_number(value) and value > most:
            raise MoesaicError(f"{name}: {key} is {show(value)}; no machine holds more than {most:,}")


def check_fits(config: Mapping[str, Any], tensors: Mapping[str, Any], name: str) -> None:
    """Refuse layers or a vocabulary that a checkpoint's tensors cannot hold, before a model is built for them.

    `tensors` are `TensorInfo` by name.
    """
    vocabulary: Any = config.get("vocab_size")
    hidden: Any = config.get("hidden_size")
    if _is_int(config.get("num_hidden_layers")):
        check_depth(config, tensors, name)
    held = sum(math.prod(info.shape) for info in tensors.values())
    if _is_int(vocabulary) and _is_int(hidden) and vocabulary * hidden > held:
        raise MoesaicError(
            f"{name}: vocab_size {vocabulary} times hidden_size {hidden} is more than all {held:,} numbers of the "
            "checkpoint: the two do not belong together"
        )


def _check_heads(config: Mapping[str, Any], name: str) -> None:
    """Heads divide what is dealt to them, where no key says their size and they are not latent (DeepSeek)."""
    keys = ("hidden_size", "num_attention_heads", "num_key_value_heads")
    hidden, heads, groups = (value if _SIZE.accepts(value := config.get(key)) else None for key in keys)
    if heads is None or "kv_lora_rank" in config:
        return
    if hidden and not config.get("head_dim") and hidden % heads:
        raise MoesaicError(f"{name}: hidden_size is {hidden}, which num_attention_heads {heads} does not divide")
    if groups and heads % groups:
        raise MoesaicError(
            f"{name}: num_attention_heads is {heads}, which num_key_value_heads {groups} does not divide"
        )


def require(config: Mapping[str, Any], keys: Iterable[str], name: str) -> None:
    """Refuse a config that lacks one of the keys."""
    for key in keys:
        if config.get(key) is None:
            raise MoesaicError(f"{name}: has no {key}; the config is incomplete")


def check_depth(config: Mapping[str, Any], tensors: Sized, name: str) -> None:
    """Refuse more layers than tensors, before anything is counted layer by layer."""
    depth = config["num_hidden_layers"]
    if depth > len(tensors):
        raise MoesaicError(
            f"{name}: num_hidden_layers is {depth}, but the checkpoint has only {len(tensors)} tensors: the two do not "
            "belong together"
        )


def check_activation(config: Mapping[str, Any], key: str, name: str) -> None:
    """Refuse an activation that transformers does not know."""
    if key in config and not (isinstance(config[key], str) and config[key] in ACTIVATIONS):
        hint = suggest(str(config[key]), sorted(ACTIVATIONS))
        raise MoesaicError(f"{name}: {key} is {show(config[key])}, which is no activation of transformers; {hint}")


def check_rope(config: Mapping[str, Any], name: str, *, aliases: Iterable[str] = ()) -> None:
    """Refuse rotary position settings that transformers cannot compute.

    Args:
        config: the (text) config, in the spelling of transformers 4 (`rope_scaling`) or 5 (`rope_parameters`).
        name: how messages call the file.
        aliases: old names of kinds of rope that this family's class understands.
    """
    for key in _ROPE_KEYS:
        value = config.get(key)
        if value is None:
            continue
        if not isinstance(value, Mapping):
            raise MoesaicError(f"{name}: {key} is {show(value)}, but must be keys and values, or null")
        # One set of values, or one per type of layer.
        nested = {f"{key}.{part}": inner for part, inner in value.items() if isinstance(inner, Mapping)}
        for place, values in (nested or {key: value}).items():
            _check_rope_values(values, f"{name}: {place}", aliases)


def _check_rope_values(values: Mapping[str, Any], place: str, aliases: Iterable[str]) -> None:
    kind = values.get("rope_type", values.get("type", "default"))
    if kind in aliases:
        return
    if not isinstance(kind, str) or kind not in ROPE_NEEDS:
        hint = suggest(str(kind), ROPE_NEEDS)
        raise MoesaicError(f"{place}.rope_type is {show(kind)}, which transformers does not know; {hint}")
    for key in ROPE_NEEDS[kind]:
        if key not in values:
            raise MoesaicError(f"{place} has rope_type {kind} but no {key}")
    for key in ROPE_NEEDS[kind]:
        expected = _NUMBERS if key.startswith(("short", "long")) else _NUMBER
        if not expected.accepts(values[key]):
            raise MoesaicError(f"{place}.{key} is {show(values[key])}, but must be {expected.text}")
    if not _THETA.accepts(values.get("rope_theta")):
        raise MoesaicError(f"{place}.rope_theta is {show(values['rope_theta'])}, but must be {_THETA.text}")


def show(value: Any) -> str:
    """A value as JSON has it, short."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


# --- the dense family of a config, or why it is none ----------------------------------------------------------------

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
    for key, reason in family.refused.items():
        if text.get(key):
            raise MoesaicError(f"{name}: {family.model_type} with {key}={text[key]!r} is not supported: {reason}")
    flags = [part.key for part in family.optional] + ([family.ffn_bias_key] if family.ffn_bias_key else [])
    check_values(text, name, sizes=family.defaults, flags=flags)
    check_activation(text, family.activation_key, name)
    check_rope(text, name, aliases=family.rope_aliases)
    return family, {**family.defaults, **text}
