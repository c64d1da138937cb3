"""What llama.cpp computes for each native family: rows to refuse what its converter would accept and get wrong.

Each row was read from the converter and the graph of llama.cpp (as in llama-cpp-python 0.3.36) and run against
transformers by `make interop`. No torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Config = Mapping[str, Any]

LABELS: Mapping[str, str] = {
    "weighting": "norm_topk_prob",
    "rope": "rope",
    "activation": "activation",
    "dense_layers": "layers without experts",
    "sliding_window": "sliding window",
    "switched_window": "sliding window",
    "norm_eps": "rms_norm_eps",
    "clip": "clip_qkv",
    "groups": "group-limited selection",
    "attention_bias": "attention biases",
    "scoring": "scoring",
}

_LINEAR = ("default", "linear", "yarn")


def _rope(config: Config) -> str:
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return str(parameters.get("rope_type") or parameters.get("type") or "default")


def _weighting(config: Config) -> str:
    return "true" if config.get("norm_topk_prob", False) else "false"


def _dense_layers(config: Config) -> str:
    step = config.get("decoder_sparse_step", 1)
    return "some" if config.get("mlp_only_layers") or step != 1 else "none"


def _groups(config: Config) -> str:
    if config.get("topk_method") == "greedy" or (config.get("n_group") or 1) <= 1:
        return "none"
    return f"{config['n_group']} groups"


FACTS: Mapping[str, Callable[[Config], str]] = {
    "weighting": _weighting,
    "rope": _rope,
    "activation": lambda config: str(config.get("hidden_act", "silu")),
    "dense_layers": _dense_layers,
    "sliding_window": lambda config: "yes" if config.get("sliding_window") else "none",
    "switched_window": lambda config: (
        "yes" if config.get("use_sliding_window") and config.get("sliding_window") else "none"
    ),
    "norm_eps": lambda config: f"{config.get('rms_norm_eps', 1e-5):g}",
    "clip": lambda config: "none" if config.get("clip_qkv") is None else str(config["clip_qkv"]),
    "groups": _groups,
    "attention_bias": lambda config: "yes" if config.get("attention_bias") else "none",
}


def _only(*words: str) -> frozenset[str]:
    return frozenset(words)


@dataclass(frozen=True, kw_only=True)
class GgufFamily:
    """A family that the converter knows: what is right, per fact (left out: anything), and whether it needs a head.

    `own_head`: llama.cpp wants an output matrix of its own, so a tied one is written out. `reason`: why the family is
    refused altogether. `caveat`: what llama.cpp computes a little differently in every model; said, not refused.
    """

    allowed: Mapping[str, frozenset[str]] = field(default_factory=dict)
    own_head: bool = False
    reason: str = ""
    caveat: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Keys that the converter reads and transformers does not write."""

    def failures(self, config: Config) -> list[str]:
        """One line per rule that a config breaks."""
        if self.reason:
            return [self.reason]
        values = {fact: FACTS[fact](config) for fact in self.allowed}
        return [
            f"{LABELS[fact]}: {value}, where llama.cpp computes {' or '.join(sorted(self.allowed[fact]))}"
            for fact, value in values.items()
            if value not in self.allowed[fact]
        ]


_SILU = {"activation": _only("silu")}
_ROPE = {"rope": _only(*_LINEAR)}
_NO_WINDOW = {"switched_window": _only("none")}
_LLAMA_ROPE = {"rope": _only(*_LINEAR, "llama3")}

GGUF: Mapping[str, GgufFamily] = {
    "mixtral": GgufFamily(allowed=_SILU | _LLAMA_ROPE | {"sliding_window": _only("none")}),
    "qwen3_moe": GgufFamily(
        allowed=_SILU
        | _ROPE
        | _NO_WINDOW
        | {"weighting": _only("true"), "dense_layers": _only("none"), "attention_bias": _only("none")}
    ),
    "granitemoe": GgufFamily(allowed=_SILU | _LLAMA_ROPE | {"attention_bias": _only("none")}),
    "granitemoeshared": GgufFamily(allowed=_SILU | _LLAMA_ROPE | {"attention_bias": _only("none")}),
    "qwen2_moe": GgufFamily(
        allowed=_SILU | _ROPE | _NO_WINDOW | {"weighting": _only("false"), "dense_layers": _only("none")}, own_head=True
    ),
    "olmoe": GgufFamily(
        allowed=_SILU
        | _ROPE
        | {
            "weighting": _only("false"),
            "norm_eps": _only("1e-05"),
            "clip": _only("none"),
            "attention_bias": _only("none"),
        },
        own_head=True,
    ),
    "gpt_oss": GgufFamily(
        allowed={"rope": _only("default", "yarn")},
        own_head=True,
        caveat="llama.cpp rounds the range of YaRN, which GPT-OSS does not (truncate: false): logits differ by 5e-4",
    ),
    "deepseek_v2": GgufFamily(
        allowed=_SILU | _ROPE | {"weighting": _only("false"), "groups": _only("none"), "attention_bias": _only("none")}
    ),
    # Without the key llama.cpp takes the softmax, in silence.
    "deepseek_v3": GgufFamily(
        allowed=_SILU | _ROPE | {"attention_bias": _only("none")}, config={"scoring_func": "sigmoid"}
    ),
    "glm4_moe": GgufFamily(allowed=_SILU | {"rope": _only("default"), "groups": _only("none")}),
    "flex_olmo": GgufFamily(reason="llama.cpp has no FlexOlmo"),
}
