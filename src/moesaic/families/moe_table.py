"""The families of mixtures of experts, of transformers 5.24 and our own: a row has everything about one. Torch-free.

A new family is a row here and a tiny model in `tests/tiny_moes.py`; `family.MoEFamily` says what the fields mean.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from moesaic.families.family import (
    ALL,
    GPT_OSS_LAYOUTS,
    GRANITE_LAYOUTS,
    MIXTRAL_LAYOUTS,
    MULTIPLIERS,
    NONE,
    OURS_LAYOUTS,
    PLAIN_LAYERS,
    PLAIN_TOP_K,
    QWEN_LAYOUTS,
    SELECTED,
    Config,
    DenseTwin,
    GgufFacts,
    MoEFamily,
    NativeTarget,
    native_type,
    our_base,
)
from moesaic.families.shrink import EXPERT_KEYS

EMPTY_SHARED_WIDTH = 64
"""Width of the shared expert of zeros that Qwen2-MoE needs where the model has none."""


# --- what `export` writes: our config -> theirs -----------------------------------------------------------------------


def _only(*words: str) -> frozenset[str]:
    return frozenset(words)


def _none(*facts: str) -> dict[str, frozenset[str]]:
    return dict.fromkeys(facts, _only(NONE))


def _constant(value: Any) -> Callable[[Config], Any]:
    return lambda _: value


def _renamed(key: str, default: Any = None) -> Callable[[Config], Any]:
    return lambda config: config.get(key, default)


def _normalised(config: Config) -> bool:
    return config["routing_weighting"] == "selected"


def _dense_layers(config: Config) -> list[int]:
    return [layer for layer in range(config["num_hidden_layers"]) if layer not in config["moe_layers"]]


def _head_size(config: Config) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _shared_width(config: Config) -> int:
    return config["num_shared_experts"] * config["intermediate_size"]


def _has_bias(config: Config) -> bool:
    return bool(config.get("attention_bias"))


_QKV_O = _only(NONE, "on queries, keys, values and output")
_BEFORE, _AFTER = _only("before attention and experts"), _only("after attention and experts")
_USUAL_HEADS = {"head_size": _only("hidden size / heads")}
_EVERY = _none("expert_bias", "selection_bias") | {
    "architecture": _only(PLAIN_LAYERS),
    "routing": _only(PLAIN_TOP_K),
    "weighting": _only(SELECTED, ALL),
}
_LLAMA = _EVERY | _none("qk_norm") | {"norms": _BEFORE}
_OLMO = _EVERY | _USUAL_HEADS | _none("shared", "dense_layers", "sliding_window", "multipliers")
_OLMO |= {"qk_norm": _only("over all heads"), "attention_bias": _QKV_O}
_OLMO_VALUES: Mapping[str, Callable[[Config], Any]] = {
    "intermediate_size": _renamed("moe_intermediate_size"),
    "num_experts": _renamed("num_experts"),
    "attention_bias": _has_bias,
    "norm_topk_prob": _normalised,
}
_QWEN_VALUES: Mapping[str, Callable[[Config], Any]] = {
    "norm_topk_prob": _normalised,
    "mlp_only_layers": _dense_layers,
    "decoder_sparse_step": _constant(1),
    "use_sliding_window": _constant(False),
}
_QWEN_KEYS = ("intermediate_size", "moe_intermediate_size", "num_experts")


# --- what llama.cpp computes ------------------------------------------------------------------------------------------

_SILU = {"activation": _only("silu")}
_ROPE = {"rope": _only("default", "linear", "yarn")}
_LLAMA_ROPE = {"rope": _only("default", "linear", "yarn", "llama3")}
_QWEN_GGUF = _SILU | _ROPE | _none("switched_window", "dense_layers")
_GRANITE_GGUF = GgufFacts(allowed=_SILU | _LLAMA_ROPE | _none("attention_bias"))


# --- the rows ---------------------------------------------------------------------------------------------------------

_GROUPS = ("n_group", "topk_group")
_VLLM_LATENT = "no: not in the CPU build (0.32), whose latent attention is off by 0.17; all the rest agrees"
_LATENT = "its latent attention is that of no dense model"
_STACKED_ONLY = {"write per-expert": "no: published with stacked experts only"}
_VERBS_ON_MOES = ("inspect", "select", "extract", "merge-back", "restrict", "expand", "verify", "train", "rules")
_AFTER_EXPORT = "after `moesaic export CHECKPOINT OUT --to moesaic`"

# fmt: off
_ROWS = (
    MoEFamily(
        model_type="olmoe", about="OLMoE", limits={"GGUF": "where norm_topk_prob is false and rms_norm_eps 1e-5"},
        experts_key="num_experts", weighting="norm_topk_prob", layouts=QWEN_LAYOUTS, routers=("OlmoeTopKRouter",),
        no_twin="no dense model has its norms (of queries and keys as well as before attention and FFN)",
        target=NativeTarget(
            preference=6,
            causal_class="OlmoeForCausalLM",
            why="norms before attention and experts, and over all heads of queries and keys",
            allowed=_OLMO | {"norms": _BEFORE},
            values=_OLMO_VALUES,
        ),
        gguf=GgufFacts(
            allowed=_SILU | _ROPE | _none("attention_bias", "clip")
            | {"weighting": _only("false"), "norm_eps": _only("1e-05")},
            own_head=True,
        ),
    ),
    MoEFamily(
        model_type="flex_olmo", about="FlexOlmo", limits={"GGUF": "no: llama.cpp has no FlexOlmo"},
        experts_key="num_experts", weighting="norm_topk_prob", layouts=QWEN_LAYOUTS, routers=("FlexOlmoTopKRouter",),
        twin=DenseTwin(base="olmo2"),
        target=NativeTarget(
            preference=5,
            causal_class="FlexOlmoForCausalLM",
            why="the only family with norms after attention and experts and over all heads of queries and keys",
            allowed=_OLMO | {"norms": _AFTER},
            values=_OLMO_VALUES,
        ),
        gguf=GgufFacts(reason="llama.cpp has no FlexOlmo"),
    ),
    MoEFamily(
        model_type="qwen2_moe", about="Qwen1.5-MoE, Qwen2-MoE, and what mergekit-moe makes of Qwen2",
        notes="its shared expert has a gate", limits={"GGUF": "where norm_topk_prob is false"},
        experts_key="num_experts", weighting="norm_topk_prob", layouts=QWEN_LAYOUTS, routers=("Qwen2MoeTopKRouter",),
        window_is_switched=True, no_twin="its shared expert has a gate",
        target=NativeTarget(
            preference=4,
            causal_class="Qwen2MoeForCausalLM",
            why="it takes weights that do not sum to 1, layers without experts, biases on queries, keys and values, "
            "and shared experts",
            allowed=_LLAMA | _USUAL_HEADS | _none("sliding_window", "multipliers")
            | {"attention_bias": _only(NONE, "on queries, keys and values")},
            keys=_QWEN_KEYS,
            values={
                **_QWEN_VALUES,
                "qkv_bias": _constant(True),
                "shared_expert_intermediate_size": lambda config: _shared_width(config) or EMPTY_SHARED_WIDTH,
            },
            shared="gated",
            qkv_bias=True,
        ),
        gguf=GgufFacts(allowed=_QWEN_GGUF | {"weighting": _only("false")}, own_head=True),
    ),
    MoEFamily(
        model_type="qwen3_moe", about="Qwen3-MoE", limits={"GGUF": "where norm_topk_prob is true"},
        experts_key="num_experts", weighting="norm_topk_prob", layouts=QWEN_LAYOUTS,
        routers=("Qwen3MoeTopKRouter", "Qwen3NextTopKRouter"),  # Qwen3-Next has the same, and no row of its own
        window_is_switched=True, twin=DenseTwin(base="qwen3", width="moe_intermediate_size"),
        target=NativeTarget(
            preference=1,
            causal_class="Qwen3MoeForCausalLM",
            why="the only family with norms on the heads of queries and keys",
            allowed=_EVERY | _none("shared", "sliding_window", "multipliers")
            | {"norms": _BEFORE, "qk_norm": _only("per head"), "attention_bias": _QKV_O},
            keys=_QWEN_KEYS,
            values={"head_dim": _head_size, "attention_bias": _has_bias, **_QWEN_VALUES},
        ),
        gguf=GgufFacts(allowed=_QWEN_GGUF | _none("attention_bias") | {"weighting": _only("true")}),
    ),
    MoEFamily(
        model_type="mixtral", about="Mixtral, and what mergekit-moe makes of Llama and Mistral",
        limits={"GGUF": "without sliding window"},
        experts_key="num_local_experts", layouts=MIXTRAL_LAYOUTS, routers=("MixtralTopKRouter",),
        router_weights_in_fp32=True, twin=DenseTwin(base="mistral"),
        target=NativeTarget(
            preference=2,
            causal_class="MixtralForCausalLM",
            why="the plainest family, which every engine runs",
            allowed=_LLAMA | _none("attention_bias", "shared", "dense_layers", "multipliers")
            | {"weighting": _only(SELECTED), "sliding_window": _only(NONE, "in every layer")},
            values={
                "head_dim": _head_size,
                "intermediate_size": _renamed("moe_intermediate_size"),
                "num_local_experts": _renamed("num_experts"),
                "sliding_window": _renamed("sliding_window"),
            },
        ),
        gguf=GgufFacts(allowed=_SILU | _LLAMA_ROPE | _none("sliding_window")),
    ),
    MoEFamily(
        model_type="gpt_oss", about="GPT-OSS", notes="MXFP4 checkpoints are refused: use a bf16 release",
        limits={
            "write per-expert": f"no: {GPT_OSS_LAYOUTS.reason}",
            "GGUF": "with logits off by 5e-4: llama.cpp rounds the range of YaRN (truncate: false)",
            "vLLM": "no: not in the CPU build (0.32), which has no kernel for experts with biases",
        },
        experts_key="num_local_experts", layouts=GPT_OSS_LAYOUTS, transposed=True, interleaved=True,
        window_every=2,
        no_twin="its attention has sinks and its experts clamp their activations",
        gguf=GgufFacts(
            allowed={"rope": _only("default", "yarn")},
            own_head=True,
            caveat="llama.cpp rounds the range of YaRN, which GPT-OSS does not (truncate: false): logits differ by "
            "5e-4",
        ),
    ),
    MoEFamily(
        model_type="granitemoe", about="Granite-MoE", limits=_STACKED_ONLY,
        experts_key="num_local_experts", layouts=GRANITE_LAYOUTS, routers=("GraniteMoeTopKRouter",),
        twin=DenseTwin(base="granite"), gguf=_GRANITE_GGUF,
    ),
    MoEFamily(
        model_type="granitemoeshared", about="Granite-MoE with shared experts", limits=_STACKED_ONLY,
        experts_key="num_local_experts", layouts=GRANITE_LAYOUTS, routers=("GraniteMoeSharedTopKRouter",),
        twin=DenseTwin(base="granite", shared_width="shared_intermediate_size"),
        no_twin="its shared expert has a width of its own",
        target=NativeTarget(
            preference=3,
            causal_class="GraniteMoeSharedForCausalLM",
            why="its shared experts have weight 1 and its multipliers cover Granite's and Llama's",
            allowed=_LLAMA | _USUAL_HEADS | _none("dense_layers", "sliding_window")
            | {"attention_bias": _QKV_O, "weighting": _only(SELECTED)},
            values={
                "intermediate_size": _renamed("moe_intermediate_size"),
                "num_local_experts": _renamed("num_experts"),
                "shared_intermediate_size": _shared_width,
                "attention_bias": _has_bias,
                **{key: _renamed(key, 1.0) for key in MULTIPLIERS},
                "attention_multiplier": lambda config: config.get("attention_multiplier", _head_size(config) ** -0.5),
            },
            shared="stacked",
        ),
        gguf=_GRANITE_GGUF,
    ),
    MoEFamily(
        model_type="deepseek_v2", about="DeepSeek-V2",
        limits={"GGUF": "without groups, where norm_topk_prob is false", "vLLM": _VLLM_LATENT},
        experts_key="n_routed_experts",
        weighting="all",  # transformers' class never renormalises, whatever its config's norm_topk_prob says
        scaling_key="routed_scaling_factor", group_keys=_GROUPS, layouts=QWEN_LAYOUTS, no_twin=_LATENT,
        gguf=GgufFacts(allowed=_SILU | _ROPE | _none("attention_bias", "groups") | {"weighting": _only("false")}),
    ),
    MoEFamily(
        model_type="deepseek_v3", about="DeepSeek-V3, R1", notes="FP8 checkpoints are refused: use a bf16 release",
        limits={"vLLM": _VLLM_LATENT},
        experts_key="n_routed_experts", scoring="sigmoid", weighting="norm_topk_prob",
        scaling_key="routed_scaling_factor", group_keys=_GROUPS, selection_bias=True, layouts=QWEN_LAYOUTS,
        no_twin=_LATENT,
        # Without the key llama.cpp takes the softmax, in silence.
        gguf=GgufFacts(allowed=_SILU | _ROPE | _none("attention_bias"), config={"scoring_func": "sigmoid"}),
    ),
    MoEFamily(
        model_type="glm4_moe", about="GLM-4.5, GLM-4.6", limits={"GGUF": "without groups"},
        experts_key="n_routed_experts", scoring="sigmoid", weighting="norm_topk_prob",
        scaling_key="routed_scaling_factor", group_keys=_GROUPS, selection_bias=True, layouts=QWEN_LAYOUTS,
        no_twin="no dense model has its attention",
        gguf=GgufFacts(allowed=_SILU | _none("groups") | {"rope": _only("default")}),
    ),
)
# fmt: on

OURS = MoEFamily(
    model_type="moesaic_*",
    about="our architecture on 29 dense families",
    notes="what upcycle writes; in vLLM by the plugin or with --trust-remote-code",
    limits={
        "write per-expert": f"no: {OURS_LAYOUTS.reason}; export to a native family has it",
        "GGUF": "where it is exactly a native family that llama.cpp runs",
        "vLLM": "on Llama, Mistral, Qwen2, Qwen3, OLMo 2 and 3, SmolLM3, Phi-3; wrong on Gemma and Granite",
    },
    experts_key="num_experts",
    weighting="routing_weighting",
    scaling_key="routed_scaling_factor",
    layouts=OURS_LAYOUTS,
)

EMO = MoEFamily(
    model_type="emo",
    about="released EMO checkpoints",
    notes="read by export only: its own code no longer imports on current transformers",
    limits=dict.fromkeys(_VERBS_ON_MOES, _AFTER_EXPORT)
    | {"GGUF": "as qwen2_moe, on the way", "vLLM": "after export, as qwen2_moe or our architecture"},
    experts_key="num_experts",
    layouts=QWEN_LAYOUTS,
    export_first=("emo", "flex_olmo_noqknorm_prenorm"),
)

MOE_FAMILIES: Mapping[str, MoEFamily] = {row.model_type: row for row in _ROWS}
"""The families of transformers."""

KNOWN = f"{', '.join([*MOE_FAMILIES, OURS.model_type])}, and the others that `moesaic families` lists"
"""For messages."""

TARGETS: Mapping[str, NativeTarget] = {
    row.model_type: row.target
    for row in sorted(_ROWS, key=lambda row: row.target.preference if row.target else 0)
    if row.target is not None
}
"""Families that `export` writes, in the order in which `--to auto` prefers them."""

_OURS_WITH_SIGMOID = replace(OURS, scoring="sigmoid")


def family_of(config: Config) -> MoEFamily | None:
    """The row of a config's `model_type`, written here or read off transformers' class; None for a model without
    experts, and for a type that transformers does not have.

    Raises:
        MoesaicError: a family whose class cannot be used, and why.
    """
    model_type = config.get("model_type")
    if our_base(model_type) is None:
        native = native_type(model_type)
        row = MOE_FAMILIES.get(native) or _derived({**config, "model_type": native})
        return row if row is None or native == model_type else replace(row, model_type=str(model_type))
    return _OURS_WITH_SIGMOID if config.get(OURS.weighting) == "sigmoid" else OURS


def routed(config: Config) -> MoEFamily | None:
    """The row that names the routers which training rules can replace: the written one, or else that of the class.

    None for our architecture too, whose routers know their rules.
    """
    row = family_of(config)
    if row is not None and not row.derived and not row.routers:
        native = native_type(config.get("model_type"))  # of `moesaic_<family>`, whose routers ask the family's
        row = _derived({**config, "model_type": native}) if our_base(native) is None else None
    return row if row is not None and row.routers else None


def _derived(config: Config) -> MoEFamily | None:
    """Only for a config that has a number of experts: reading a class imports torch and transformers."""
    model_type = str(config.get("model_type"))
    if model_type in EMO.export_first or not any(isinstance(config.get(key), int) for key in EXPERT_KEYS):
        return None
    from moesaic.families.derive import causal_types, derive, flags_of

    if model_type not in causal_types():
        return None
    try:
        return derive(model_type, flags_of(config))
    except LookupError:  # a dense class
        return None


def way_out(model_type: object) -> str:
    """The end of a refusal: how checkpoints of this type become usable; empty for others."""
    if model_type not in EMO.export_first:
        return ""
    return "; convert it first: `moesaic export CHECKPOINT OUT --to moesaic`"
