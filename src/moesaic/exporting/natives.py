"""Native families that `export` writes: what each computes, and its config. One row per family, data only. No torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from moesaic.exporting.rules import PLAIN_LAYERS, PLAIN_TOP_K, Facts, failed_rules

Config = Mapping[str, Any]
Value = Callable[[Config], Any]


def _only(*words: str) -> frozenset[str]:
    return frozenset(words)


@dataclass(frozen=True, kw_only=True)
class NativeFamily:
    """One row: `allowed` per fact of `rules.LABELS` (left out: anything), and how the config is written.

    `keys` are taken over from our config as they are, `values` computed from it. `shared` says how shared experts are
    stored: `gated` (half weight by a gate of nearly zero, Qwen2-MoE), `stacked` (gate and up in one matrix, Granite).
    `why` is what `--to auto` says of its choice.
    """

    model_type: str
    causal_class: str
    why: str
    allowed: Mapping[str, frozenset[str]]
    keys: tuple[str, ...] = ()
    values: Mapping[str, Value] = field(default_factory=dict)
    shared: str | None = None
    qkv_bias: bool = False
    """Queries, keys and values always have biases: zeros where the model has none."""

    def failures(self, facts: Facts) -> dict[str, str]:
        """The rules that a model breaks: fact -> what the family has instead."""
        return failed_rules(facts, self.allowed)


COMMON_KEYS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "use_cache",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "tie_word_embeddings",
    "attention_dropout",
    "rope_parameters",
    "num_experts_per_tok",
    "dtype",
)

_SELECTED, _ALL = "softmax over selected", "softmax over all"
_EVERY = {
    "architecture": _only(PLAIN_LAYERS),
    "routing": _only(PLAIN_TOP_K),
    "expert_bias": _only("none"),
    "weighting": _only(_SELECTED, _ALL),
}
_LLAMA = _EVERY | {"norms": _only("before attention and experts"), "qk_norm": _only("none")}
_USUAL = _only("hidden size / heads")
_NONE = _only("none")
_QKV_O = "on queries, keys, values and output"


def _normalised(config: Config) -> bool:
    return config["routing_weighting"] == "selected"


def _dense_layers(config: Config) -> list[int]:
    return [layer for layer in range(config["num_hidden_layers"]) if layer not in config["moe_layers"]]


def _head_size(config: Config) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _constant(value: Any) -> Value:
    return lambda _: value


def _shared_width(config: Config) -> int:
    return config["num_shared_experts"] * config["intermediate_size"]


def _multiplier(key: str) -> Value:
    return lambda config: config.get(key, 1.0)


def _has_bias(config: Config) -> bool:
    return bool(config.get("attention_bias"))


EMPTY_SHARED_WIDTH = 64
"""Width of the shared expert of zeros that Qwen2-MoE needs where the model has none."""

_OLMO = _EVERY | {
    "qk_norm": _only("over all heads"),
    "attention_bias": _only("none", _QKV_O),
    "head_size": _USUAL,
    "shared": _NONE,
    "dense_layers": _NONE,
    "sliding_window": _NONE,
    "multipliers": _NONE,
}
_OLMO_VALUES: Mapping[str, Value] = {
    "intermediate_size": lambda config: config["moe_intermediate_size"],
    "num_experts": lambda config: config["num_experts"],
    "attention_bias": _has_bias,
    "norm_topk_prob": _normalised,
}

_ROWS = (
    NativeFamily(
        model_type="qwen3_moe",
        causal_class="Qwen3MoeForCausalLM",
        why="the only family with norms on the heads of queries and keys",
        allowed=_EVERY
        | {
            "norms": _only("before attention and experts"),
            "qk_norm": _only("per head"),
            "attention_bias": _only("none", _QKV_O),
            "shared": _NONE,
            "sliding_window": _NONE,
            "multipliers": _NONE,
        },
        keys=("intermediate_size", "moe_intermediate_size", "num_experts"),
        values={
            "head_dim": _head_size,
            "attention_bias": _has_bias,
            "norm_topk_prob": _normalised,
            "mlp_only_layers": _dense_layers,
            "decoder_sparse_step": _constant(1),
            "use_sliding_window": _constant(False),
        },
    ),
    NativeFamily(
        model_type="mixtral",
        causal_class="MixtralForCausalLM",
        why="the plainest family, which every engine runs",
        allowed=_LLAMA
        | {
            "attention_bias": _NONE,
            "weighting": _only(_SELECTED),
            "shared": _NONE,
            "dense_layers": _NONE,
            "sliding_window": _only("none", "in every layer"),
            "multipliers": _NONE,
        },
        values={
            "head_dim": _head_size,
            "intermediate_size": lambda config: config["moe_intermediate_size"],
            "num_local_experts": lambda config: config["num_experts"],
            "sliding_window": lambda config: config.get("sliding_window"),
        },
    ),
    NativeFamily(
        model_type="granitemoeshared",
        causal_class="GraniteMoeSharedForCausalLM",
        why="its shared experts have weight 1 and its multipliers cover Granite's and Llama's",
        allowed=_LLAMA
        | {
            "attention_bias": _only("none", _QKV_O),
            "head_size": _USUAL,
            "weighting": _only(_SELECTED),
            "dense_layers": _NONE,
            "sliding_window": _NONE,
        },
        values={
            "intermediate_size": lambda config: config["moe_intermediate_size"],
            "num_local_experts": lambda config: config["num_experts"],
            "shared_intermediate_size": _shared_width,
            "attention_bias": _has_bias,
            "embedding_multiplier": _multiplier("embedding_multiplier"),
            "residual_multiplier": _multiplier("residual_multiplier"),
            "logits_scaling": _multiplier("logits_scaling"),
            "attention_multiplier": lambda config: config.get("attention_multiplier", _head_size(config) ** -0.5),
        },
        shared="stacked",
    ),
    NativeFamily(
        model_type="qwen2_moe",
        causal_class="Qwen2MoeForCausalLM",
        why="it takes weights that do not sum to 1, layers without experts, biases on queries, keys and values, and "
        "shared experts",
        allowed=_LLAMA
        | {
            "attention_bias": _only("none", "on queries, keys and values"),
            "head_size": _USUAL,
            "sliding_window": _NONE,
            "multipliers": _NONE,
        },
        keys=("intermediate_size", "moe_intermediate_size", "num_experts"),
        values={
            "norm_topk_prob": _normalised,
            "mlp_only_layers": _dense_layers,
            "decoder_sparse_step": _constant(1),
            "use_sliding_window": _constant(False),
            "qkv_bias": _constant(True),
            "shared_expert_intermediate_size": lambda config: _shared_width(config) or EMPTY_SHARED_WIDTH,
        },
        shared="gated",
        qkv_bias=True,
    ),
    NativeFamily(
        model_type="flex_olmo",
        causal_class="FlexOlmoForCausalLM",
        why="the only family with norms after attention and experts and over all heads of queries and keys",
        allowed=_OLMO | {"norms": _only("after attention and experts")},
        values=_OLMO_VALUES,
    ),
    NativeFamily(
        model_type="olmoe",
        causal_class="OlmoeForCausalLM",
        why="norms before attention and experts, and over all heads of queries and keys",
        allowed=_OLMO | {"norms": _only("before attention and experts")},
        values=_OLMO_VALUES,
    ),
)

NATIVE = {row.model_type: row for row in _ROWS}
"""In the order in which `--to auto` prefers them."""


def native_config(row: NativeFamily, config: Config) -> dict[str, Any]:
    """config.json of the family.

    `rope_theta` and `rope_scaling` repeat `rope_parameters` for engines on transformers 4, which would take the
    family's default without a word.
    """
    made = {key: config.get(key) for key in (*COMMON_KEYS, *row.keys)}
    made |= {key: value(config) for key, value in row.values.items()}
    rope = made["rope_parameters"] = dict(config.get("rope_parameters") or {})
    if "rope_theta" in rope:
        scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
        made["rope_theta"] = rope["rope_theta"]
        made["rope_scaling"] = None if rope.get("rope_type", "default") == "default" else scaling
    return made | {"model_type": row.model_type, "architectures": [row.causal_class]}
