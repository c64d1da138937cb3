"""What makes a native family exactly this model: facts about the model against rows of what each family computes.

A fact is one line of words; a row lists, per fact, the words that it allows. No torch.
"""

from collections.abc import Mapping
from typing import Any

from moesaic.exporting.view import View

Facts = Mapping[str, str]

LABELS: Mapping[str, str] = {
    "architecture": "architecture of the base",
    "norms": "norms",
    "qk_norm": "norm of queries and keys",
    "attention_bias": "attention biases",
    "expert_bias": "biases in experts",
    "head_size": "head size",
    "routing": "routing",
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

PLAIN = ("llama", "mistral", "qwen2", "qwen3", "olmo2", "granite")
"""Bases that differ from a Llama in nothing but these facts."""

PLAIN_LAYERS = "plain decoder layers"

PLAIN_TOP_K, ONE_PER_GROUP = "plain top-k", "one expert per group"
"""Words of the fact "routing"."""

SPECIAL: Mapping[str, str] = {
    "gemma": "Gemma's norms scale by 1 + weight and its embeddings are scaled",
    "gemma2": "Gemma's norms scale by 1 + weight, its embeddings are scaled and its logits capped",
    "gemma3_text": "Gemma's norms scale by 1 + weight and its embeddings are scaled",
    "vaultgemma": "Gemma's norms scale by 1 + weight and its embeddings are scaled",
    "olmo": "its norms have no weights",
    "olmo3": "some layers have a sliding window and another rope",
    "smollm3": "some layers have no rope",
    "phi3": "its attention has one matrix for queries, keys and values",
    "glm": "its rope turns interleaved pairs and a part of each head",
    "glm4": "its rope turns interleaved pairs and a part of each head",
    "cohere": "attention and FFN run in parallel, with layer norms",
    "cohere2": "attention and FFN run in parallel, with layer norms",
    "stablelm": "it has layer norms, and rope on a part of each head",
    "diffllama": "its attention is the difference of two",
    "granite_swa": "some layers have a sliding window",
    "ministral": "some layers have a sliding window",
    "ministral3": "its queries are scaled by position",
    "cwm": "some layers have a sliding window",
    "ernie4_5": "its rope turns interleaved pairs",
    "helium": "its rope turns interleaved pairs",
    "exaone4": "its norms come after the blocks and its rope is in some layers only",
    "hunyuan_v1_dense": "its queries and keys are normalised after rope",
    "seed_oss": "its attention has a bias on queries, keys and values that its output may lack",
}
"""Bases that no native family of the table is, and why."""

_MULTIPLIERS = ("embedding_multiplier", "logits_scaling", "residual_multiplier")


def facts_of(view: View) -> dict[str, str]:
    """The facts of a model, from its config and the names and shapes of its tensors."""
    config = view.config
    layer = f"model.layers.{config['num_hidden_layers'] - 1}."
    shapes = {name.removeprefix(layer): rows.shape for name, rows in view.others.items() if name.startswith(layer)}
    dense = config["num_hidden_layers"] - len(view.layers)
    shared = config["num_shared_experts"]
    return {
        "architecture": SPECIAL.get(view.base, PLAIN_LAYERS),
        "norms": _norms(shapes),
        "qk_norm": _qk_norm(config, shapes),
        "attention_bias": _attention_bias(shapes),
        "expert_bias": "yes" if config["expert_mlp_bias"] or (dense and config.get("mlp_bias")) else "none",
        "head_size": _head_size(config),
        "routing": config_routing(config),
        "weighting": _WEIGHTINGS[config["routing_weighting"]],
        "shared": "with weight 1" if shared else "none",
        "dense_layers": "some" if dense else "none",
        "sliding_window": _sliding_window(config),
        "multipliers": "yes" if _multiplied(config) else "none",
        "rope": str((config.get("rope_parameters") or {}).get("rope_type", "default")),
        "tied": "tied to the embedding" if config.get("tie_word_embeddings") else "of its own",
        "activation": str(config.get("hidden_act")),
    }


def config_routing(config: Mapping[str, Any]) -> str:
    """The fact "routing" as config.json says it; configs of native families know nothing but top-k."""
    return ONE_PER_GROUP if config.get("routing_rule") == "one_per_group" else PLAIN_TOP_K


_WEIGHTINGS = {
    "selected": "softmax over selected",
    "all": "softmax over all",
    "sigmoid": "sigmoids of the selected over their sum",
}


def failed_rules(facts: Facts, allowed: Mapping[str, frozenset[str]]) -> dict[str, str]:
    """Fact -> what the row has instead, for each fact that it does not allow; facts it leaves out may be anything."""
    return {
        fact: " or ".join(sorted(allowed[fact]))
        for fact, value in facts.items()
        if fact in allowed and value not in allowed[fact]
    }


def describe(facts: Facts, failures: Mapping[str, Mapping[str, str]]) -> str:
    """Every rule that failed, in words: first what fails in each of several families, then the rest by family."""
    families = list(failures)
    common = [fact for fact in facts if len(families) > 1 and all(fact in failures[family] for family in families)]
    parts = [f"{LABELS[fact]}: {facts[fact]}, which none of them has" for fact in common]
    for family, failed in failures.items():
        lines = [f"{LABELS[fact]}: {facts[fact]}, not {other}" for fact, other in failed.items() if fact not in common]
        parts += [f"{family} ({'; '.join(lines)})"] if lines else []
    return "; ".join(parts) if common else ", ".join(parts)


def _norms(shapes: Mapping[str, Any]) -> str:
    before, after = "input_layernorm.weight" in shapes, "post_feedforward_layernorm.weight" in shapes
    middle = "post_attention_layernorm.weight" in shapes
    names = {
        (True, False, True): "before attention and experts",
        (False, True, True): "after attention and experts",
        (True, True, True): "before and after attention and experts",
    }
    return names.get((before, after, middle), "others")


def _qk_norm(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> str:
    shape = shapes.get("self_attn.q_norm.weight")
    if shape is None:
        return "none"
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return "per head" if shape == (head,) else "over all heads"


def _attention_bias(shapes: Mapping[str, Any]) -> str:
    if "self_attn.o_proj.bias" in shapes:
        return "on queries, keys, values and output"
    return "on queries, keys and values" if "self_attn.q_proj.bias" in shapes else "none"


def _head_size(config: Mapping[str, Any]) -> str:
    usual = config["hidden_size"] / config["num_attention_heads"]
    return "hidden size / heads" if (config.get("head_dim") or usual) == usual else "another than hidden size / heads"


def _sliding_window(config: Mapping[str, Any]) -> str:
    kinds = set(config.get("layer_types") or ())
    if kinds == {"sliding_attention"}:
        return "in every layer"
    if kinds:
        return "in some layers" if kinds - {"full_attention"} else "none"
    return "in every layer" if config.get("sliding_window") else "none"


def _multiplied(config: Mapping[str, Any]) -> bool:
    return "attention_multiplier" in config and not (
        all(config[key] == 1 for key in _MULTIPLIERS)
        and config["attention_multiplier"] == (config["hidden_size"] // config["num_attention_heads"]) ** -0.5
    )
