"""What makes a native family exactly this model, and what llama.cpp computes: facts in words, against those of a row.

A fact is one line of words about a model; a row of `families.moe_table` lists, per fact, the words that it allows.
No torch.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from moesaic.common.errors import MoesaicError
from moesaic.exporting.view import View
from moesaic.families.dense_table import FAMILIES
from moesaic.families.family import (
    ALL,
    MULTIPLIERS,
    NONE,
    ONE_PER_GROUP,
    PLAIN_LAYERS,
    PLAIN_TOP_K,
    SELECTED,
    GgufFacts,
)
from moesaic.families.moe_table import TARGETS

Config = Mapping[str, Any]
Facts = Mapping[str, str]
Failures = Mapping[str, Mapping[str, str]]
"""Native family -> fact -> what the family has instead."""

LABELS: Mapping[str, str] = {
    "architecture": "architecture of the base",
    "norms": "norms",
    "qk_norm": "norm of queries and keys",
    "attention_bias": "attention biases",
    "expert_bias": "biases in experts",
    "head_size": "head size",
    "routing": "routing",
    "selection_bias": "selection bias",
    "weighting": "weights of the experts",
    "shared": "shared experts",
    "dense_layers": "layers without experts",
    "sliding_window": "sliding window",
    "multipliers": "multipliers on embeddings, residuals, attention or logits",
    "rope": "rope",
    "tied": "output head",
    "activation": "activation",
}
"""Fact -> what it is called in a message."""

_OWN_CODE = "; serve it with its own code (docs/serving.md)"
_OTHER_WAYS = {
    ONE_PER_GROUP: "; or train it further with `routing: {rule: topk}`, which native families have, or take one "
    "specialist out of it, as a dense model, with --to dense --specialist NAME"
}
"""The fact "routing" -> how a model with it can become something that engines know, at a price."""

_WEIGHTINGS = {"selected": SELECTED, "all": ALL, "sigmoid": "sigmoids of the selected over their sum"}


def facts_of(view: View) -> dict[str, str]:
    """The facts of a model, from its config and the names and shapes of its tensors."""
    config = view.config
    layer = f"model.layers.{config['num_hidden_layers'] - 1}."
    shapes = {name.removeprefix(layer): one.shape for name, one in view.others.items() if name.startswith(layer)}
    dense = config["num_hidden_layers"] - len(view.layers)
    return {
        "architecture": FAMILIES[view.base].differs or PLAIN_LAYERS,
        "norms": _norms(shapes),
        "qk_norm": _qk_norm(config, shapes),
        "attention_bias": _attention_bias(shapes),
        "expert_bias": "yes" if config["expert_mlp_bias"] or (dense and config.get("mlp_bias")) else NONE,
        "head_size": _head_size(config),
        "routing": config_routing(config),
        "selection_bias": "added to the probabilities" if config.get("selection_bias") else NONE,
        "weighting": _WEIGHTINGS[config["routing_weighting"]],
        "shared": "with weight 1" if config["num_shared_experts"] else NONE,
        "dense_layers": "some" if dense else NONE,
        "sliding_window": _sliding_window(config),
        "multipliers": "yes" if _multiplied(config) else NONE,
        "rope": str((config.get("rope_parameters") or {}).get("rope_type", "default")),
        "tied": "tied to the embedding" if config.get("tie_word_embeddings") else "of its own",
        "activation": str(config.get("hidden_act")),
    }


def config_routing(config: Config) -> str:
    """The fact "routing" as config.json says it; configs of native families know nothing but top-k."""
    return ONE_PER_GROUP if config.get("routing_rule") == "one_per_group" else PLAIN_TOP_K


def failures_of(facts: Facts, families: Iterable[str] = tuple(TARGETS)) -> dict[str, dict[str, str]]:
    """The rules that a model breaks, per native family; none where it is exactly that family."""
    return {family: _failed(facts, TARGETS[family].allowed) for family in families}


def _failed(facts: Facts, allowed: Mapping[str, frozenset[str]]) -> dict[str, str]:
    return {
        fact: " or ".join(sorted(allowed[fact]))
        for fact, value in facts.items()
        if fact in allowed and value not in allowed[fact]
    }


def refusal(name: str, facts: Facts, failures: Failures) -> MoesaicError:
    """Every rule that failed, in one line: first what fails in each of several families, then the rest by family."""
    families = list(failures)
    common = [fact for fact in facts if len(families) > 1 and all(fact in failures[family] for family in families)]
    parts = [f"{LABELS[fact]}: {facts[fact]}, which none of them has" for fact in common]
    for family, failed in failures.items():
        lines = [f"{LABELS[fact]}: {facts[fact]}, not {other}" for fact, other in failed.items() if fact not in common]
        parts += [f"{family} ({'; '.join(lines)})"] if lines else []
    described = ("; " if common else ", ").join(parts)
    if len(families) == 1:
        return MoesaicError(f"{name} is not exactly {described}{_OTHER_WAYS.get(facts['routing'], '')}")
    ways = "" if facts["routing"] == PLAIN_TOP_K else f"{_OWN_CODE}{_OTHER_WAYS.get(facts['routing'], '')}"
    return MoesaicError(f"{name} is exactly none of the native families: {described}{ways}")


def _norms(shapes: Mapping[str, Any]) -> str:
    before, after = "input_layernorm.weight" in shapes, "post_feedforward_layernorm.weight" in shapes
    middle = "post_attention_layernorm.weight" in shapes
    names = {
        (True, False, True): "before attention and experts",
        (False, True, True): "after attention and experts",
        (True, True, True): "before and after attention and experts",
    }
    return names.get((before, after, middle), "others")


def _qk_norm(config: Config, shapes: Mapping[str, tuple[int, ...]]) -> str:
    shape = shapes.get("self_attn.q_norm.weight")
    if shape is None:
        return NONE
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return "per head" if shape == (head,) else "over all heads"


def _attention_bias(shapes: Mapping[str, Any]) -> str:
    if "self_attn.o_proj.bias" in shapes:
        return "on queries, keys, values and output"
    return "on queries, keys and values" if "self_attn.q_proj.bias" in shapes else NONE


def _head_size(config: Config) -> str:
    usual = config["hidden_size"] / config["num_attention_heads"]
    return "hidden size / heads" if (config.get("head_dim") or usual) == usual else "another than hidden size / heads"


def _sliding_window(config: Config) -> str:
    kinds = set(config.get("layer_types") or ())
    if kinds == {"sliding_attention"}:
        return "in every layer"
    if kinds:
        return "in some layers" if kinds - {"full_attention"} else NONE
    return "in every layer" if config.get("sliding_window") else NONE


def _multiplied(config: Config) -> bool:
    return "attention_multiplier" in config and not (
        all(config[key] == 1 for key in MULTIPLIERS)
        and config["attention_multiplier"] == (config["hidden_size"] // config["num_attention_heads"]) ** -0.5
    )


# --- llama.cpp: what its converter would accept and get wrong, by the config of a native family -----------------------


def _rope(config: Config) -> str:
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return str(parameters.get("rope_type") or parameters.get("type") or "default")


def _dense_layers(config: Config) -> str:
    return "some" if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1 else NONE


def _switched_window(config: Config) -> str:
    return "yes" if config.get("use_sliding_window") and config.get("sliding_window") else NONE


def _groups(config: Config) -> str:
    if config.get("topk_method") == "greedy" or (config.get("n_group") or 1) <= 1:
        return NONE
    return f"{config['n_group']} groups"


GGUF_FACTS: Mapping[str, tuple[str, Callable[[Config], str]]] = {
    "weighting": ("norm_topk_prob", lambda config: "true" if config.get("norm_topk_prob") else "false"),
    "rope": ("rope", _rope),
    "activation": ("activation", lambda config: str(config.get("hidden_act", "silu"))),
    "dense_layers": ("layers without experts", _dense_layers),
    "sliding_window": ("sliding window", lambda config: "yes" if config.get("sliding_window") else NONE),
    "switched_window": ("sliding window", _switched_window),
    "norm_eps": ("rms_norm_eps", lambda config: f"{config.get('rms_norm_eps', 1e-5):g}"),
    "clip": ("clip_qkv", lambda config: NONE if config.get("clip_qkv") is None else str(config["clip_qkv"])),
    "groups": ("group-limited selection", _groups),
    "attention_bias": ("attention biases", lambda config: "yes" if config.get("attention_bias") else NONE),
}
"""Fact -> what it is called in a message, and the words for a config."""


def gguf_failures(row: GgufFacts | None, config: Config) -> list[str]:
    """One line per rule of llama.cpp that a config breaks; a family that nobody has compared breaks them all."""
    if row is None:
        return ["nobody has compared llama.cpp with it"]
    if row.reason:
        return [row.reason]
    found = {fact: (label, words(config)) for fact, (label, words) in GGUF_FACTS.items() if fact in row.allowed}
    return [
        f"{label}: {value}, where llama.cpp computes {' or '.join(sorted(row.allowed[fact]))}"
        for fact, (label, value) in found.items()
        if value not in row.allowed[fact]
    ]
