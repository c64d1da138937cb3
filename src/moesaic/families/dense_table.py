"""The dense decoder families that can become an MoE: one row of data per family, and the shapes that a row implies.

A row says which tensors a checkpoint of the family has and how large they are, so that a checkpoint can be checked and
counted from its headers and its config alone, without torch. Sizes are written with these letters:

    d hidden size        f FFN width          v vocabulary
    h query heads        g key/value heads    e head dimension      q = h * e      k = g * e

`2f` and `q+2k` are the two fused sizes that occur. Every row is compared with the class of the same name in
transformers by `tests/unit/families/test_dense_table.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

EMBEDDINGS = "model.embed_tokens.weight"
HEAD = "lm_head.weight"

Sizes = Mapping[str, str]
"""Tensor name -> its shape in the letters above, separated by blanks."""

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class OptionalTensors:
    """Tensors that exist only where a config key says so."""

    tensors: Sizes
    key: str
    default: bool = False


@dataclass(frozen=True, kw_only=True)
class DenseFamily:
    """One dense decoder family: `layer` tensors below `model.layers.N.`, `top` tensors outside the layers.

    `defaults` are the class's own for keys that a config may leave out, `stem` begins the names of its classes.
    """

    model_type: str
    stem: str
    layer: Sizes
    defaults: Mapping[str, int]
    differs: str = ""
    """Why no native MoE family is this one with experts; empty where facts of a model decide (`exporting.rules`)."""
    causal_class: str
    top: Sizes = field(default_factory=lambda: {"model.norm.weight": "d"})
    optional: tuple[OptionalTensors, ...] = ()
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    fused_gate_up: str | None = None
    ffn_bias_key: str | None = None
    activation_key: str = "hidden_act"
    activation: str = "silu"
    tied: bool = False
    fixed_head_dim: bool = False
    """True where the class takes head_dim = hidden / heads whatever the config says."""
    rope_aliases: tuple[str, ...] = ()
    """Old names of kinds of rope that the class translates."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Config keys with which the family is refused, and why."""
    wrappers: tuple[str, ...] = ()
    """Multimodal model types whose `text_config` is of this family where it does not name its own."""
    window_every: int | None = None
    """Every n-th layer sees everything, the others a window, where a config gives a window but no `layer_types`."""
    window_is_switched: bool = False
    """A window counts only where `use_sliding_window` is true."""
    in_vllm: bool = False
    """Whether our architecture on it was found equal in vLLM's transformers backend (`make interop`)."""


_QKV: Sizes = {
    "self_attn.q_proj.weight": "q d",
    "self_attn.k_proj.weight": "k d",
    "self_attn.v_proj.weight": "k d",
}
_ATTENTION: Sizes = {**_QKV, "self_attn.o_proj.weight": "d q"}
_QKV_BIAS: Sizes = {"self_attn.q_proj.bias": "q", "self_attn.k_proj.bias": "k", "self_attn.v_proj.bias": "k"}
_O_BIAS: Sizes = {"self_attn.o_proj.bias": "d"}
_PRE_NORMS: Sizes = {"input_layernorm.weight": "d", "post_attention_layernorm.weight": "d"}
_POST_NORMS: Sizes = {"post_attention_layernorm.weight": "d", "post_feedforward_layernorm.weight": "d"}
_FFN_NORMS: Sizes = {"pre_feedforward_layernorm.weight": "d", "post_feedforward_layernorm.weight": "d"}
_HEAD_QK_NORM: Sizes = {"self_attn.q_norm.weight": "e", "self_attn.k_norm.weight": "e"}
_FULL_QK_NORM: Sizes = {"self_attn.q_norm.weight": "q", "self_attn.k_norm.weight": "k"}
_EACH_QK_NORM: Sizes = {"self_attn.q_norm.weight": "h e", "self_attn.k_norm.weight": "g e"}

_LLAMA: Sizes = {**_ATTENTION, **_PRE_NORMS}
_OLMO2: Sizes = {**_ATTENTION, **_POST_NORMS, **_FULL_QK_NORM}
_GEMMA2: Sizes = {**_LLAMA, **_FFN_NORMS}
_COHERE: Sizes = {**_ATTENTION, "input_layernorm.weight": "d"}
_GLM4: Sizes = {**_LLAMA, "post_self_attn_layernorm.weight": "d", "post_mlp_layernorm.weight": "d"}
_STABLELM: Sizes = {**_LLAMA, "input_layernorm.bias": "d", "post_attention_layernorm.bias": "d"}

_BIASES = (OptionalTensors(key="attention_bias", tensors={**_QKV_BIAS, **_O_BIAS}),)
_GLM_BIASES = (OptionalTensors(key="attention_bias", default=True, tensors=_QKV_BIAS),)
_GEMMA = {"optional": _BIASES, "activation": "gelu_pytorch_tanh", "tied": True}
_HIDDEN_ACTIVATION = {"activation_key": "hidden_activation"}

_GEMMA_SCALES = "Gemma's norms scale by 1 + weight and its embeddings are scaled"
_SOME_WINDOWS = "some layers have a sliding window"
_GLM_ROPE = "its rope turns interleaved pairs and a part of each head"
_PARALLEL = "attention and FFN run in parallel, with layer norms"
_PAIRS = "its rope turns interleaved pairs"


def _sizes(hidden: int, width: int, layers: int, heads: int, kv_heads: int | None, vocab: int, head_dim: int = 0):
    """Return the class's defaults for keys a config may leave out (head_dim 0: hidden / heads)."""
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": vocab,
    }
    return (
        sizes
        | ({"num_key_value_heads": kv_heads} if kv_heads is not None else {})
        | ({"head_dim": head_dim} if head_dim else {})
    )


def _row(model_type: str, stem: str, layer: Sizes, defaults: Mapping[str, int], differs: str = "", **more: Any):
    more = {"causal_class": f"{stem}ForCausalLM", **more}
    return DenseFamily(model_type=model_type, stem=stem, layer=layer, defaults=defaults, differs=differs, **more)


# fmt: off
_ROWS = (
    _row("llama", "Llama", _LLAMA, _sizes(4096, 11008, 32, 32, None, 32000),
         optional=_BIASES, ffn_bias_key="mlp_bias", wrappers=("llava", "llava_next"), in_vllm=True),
    _row("mistral", "Mistral", _LLAMA, _sizes(4096, 14336, 32, 32, 8, 32000), wrappers=("mistral3",), in_vllm=True),
    _row("ministral", "Ministral", _LLAMA, _sizes(4096, 14336, 32, 32, 8, 32000), _SOME_WINDOWS),
    _row("ministral3", "Ministral3", _LLAMA, _sizes(4096, 14336, 34, 32, 8, 131072, 128),
         "its queries are scaled by position"),
    _row("qwen2", "Qwen2", {**_LLAMA, **_QKV_BIAS}, _sizes(4096, 22016, 32, 32, 32, 151936),
         window_is_switched=True, in_vllm=True),
    _row("qwen3", "Qwen3", {**_LLAMA, **_HEAD_QK_NORM}, _sizes(4096, 22016, 32, 32, 32, 151936, 128),
         optional=_BIASES, window_is_switched=True, in_vllm=True),
    _row("gemma", "Gemma", _LLAMA, _sizes(3072, 24576, 28, 16, 16, 256000, 256), _GEMMA_SCALES, **_GEMMA),
    _row("gemma2", "Gemma2", _GEMMA2, _sizes(2304, 9216, 26, 8, 4, 256000, 256),
         "Gemma's norms scale by 1 + weight, its embeddings are scaled and its logits capped",
         window_every=2, **_GEMMA, **_HIDDEN_ACTIVATION),
    _row("gemma3_text", "Gemma3Text", {**_GEMMA2, **_HEAD_QK_NORM}, _sizes(2304, 9216, 26, 8, 4, 262208, 256),
         _GEMMA_SCALES, causal_class="Gemma3ForCausalLM", wrappers=("gemma3",), window_every=6, **_GEMMA,
         **_HIDDEN_ACTIVATION),
    _row("vaultgemma", "VaultGemma", {**_COHERE, "pre_feedforward_layernorm.weight": "d"},
         _sizes(2304, 9216, 26, 8, 4, 256000, 256), _GEMMA_SCALES, **_GEMMA, **_HIDDEN_ACTIVATION),
    _row("olmo", "Olmo", _ATTENTION, _sizes(4096, 11008, 32, 32, None, 50304), "its norms have no weights",
         top={}, optional=_BIASES, fixed_head_dim=True),
    _row("olmo2", "Olmo2", _OLMO2, _sizes(4096, 11008, 32, 32, None, 50304), optional=_BIASES, in_vllm=True),
    _row("olmo3", "Olmo3", _OLMO2, _sizes(4096, 11008, 32, 32, None, 50304),
         "some layers have a sliding window and another rope", optional=_BIASES, window_every=4, in_vllm=True),
    _row("smollm3", "SmolLM3", _LLAMA, _sizes(2048, 11008, 36, 16, 4, 128256), "some layers have no rope",
         optional=_BIASES, ffn_bias_key="mlp_bias", tied=True, in_vllm=True),
    _row("granite", "Granite", _LLAMA, _sizes(4096, 11008, 32, 32, None, 32000),
         optional=_BIASES, ffn_bias_key="mlp_bias"),
    _row("granite_swa", "GraniteSWA", {**_LLAMA, "self_attn.sinks": "h"}, _sizes(2560, 8192, 24, 20, 4, 100352),
         _SOME_WINDOWS, optional=_BIASES, ffn_bias_key="mlp_bias", tied=True),
    _row("phi3", "Phi3", {"self_attn.qkv_proj.weight": "q+2k d", "self_attn.o_proj.weight": "d q", **_PRE_NORMS},
         _sizes(3072, 8192, 32, 32, None, 32064), "its attention has one matrix for queries, keys and values",
         fused_gate_up="mlp.gate_up_proj", rope_aliases=("su",), in_vllm=True),
    _row("glm", "Glm", _LLAMA, _sizes(4096, 13696, 40, 32, 2, 151552, 128), _GLM_ROPE,
         optional=_GLM_BIASES, fused_gate_up="mlp.gate_up_proj"),
    _row("glm4", "Glm4", _GLM4, _sizes(4096, 13696, 40, 32, 2, 151552, 128), _GLM_ROPE,
         optional=_GLM_BIASES, fused_gate_up="mlp.gate_up_proj"),
    _row("cohere", "Cohere", _COHERE, _sizes(8192, 22528, 40, 64, None, 256000), _PARALLEL,
         optional=(*_BIASES, OptionalTensors(key="use_qk_norm", tensors=_EACH_QK_NORM)), tied=True),
    _row("cohere2", "Cohere2", _COHERE, _sizes(8192, 22528, 40, 64, None, 256000), _PARALLEL,
         optional=_BIASES, tied=True, fixed_head_dim=True, window_every=4),
    _row("ernie4_5", "Ernie4_5", _LLAMA, _sizes(1024, 3072, 18, 16, 2, 103424, 128), _PAIRS,
         optional=(OptionalTensors(key="use_bias", tensors={**_QKV_BIAS, **_O_BIAS}),), ffn_bias_key="use_bias",
         tied=True),
    _row("exaone4", "Exaone4", {**_ATTENTION, **_POST_NORMS, **_HEAD_QK_NORM},
         _sizes(4096, 16384, 32, 32, 32, 102400), "its norms come after the blocks and its rope is in some layers only",
         window_every=4),
    _row("hunyuan_v1_dense", "HunYuanDenseV1",
         {**_LLAMA, "self_attn.query_layernorm.weight": "e", "self_attn.key_layernorm.weight": "e"},
         _sizes(4096, 11008, 32, 32, None, 290943), "its queries and keys are normalised after rope",
         optional=_BIASES),
    _row("helium", "Helium", {**_QKV, "self_attn.o_proj.weight": "d d", **_PRE_NORMS},
         _sizes(2560, 7040, 24, 20, 20, 48000, 128), _PAIRS,
         optional=(OptionalTensors(key="attention_bias", tensors=_QKV_BIAS),), ffn_bias_key="mlp_bias"),
    _row("seed_oss", "SeedOss", _LLAMA, _sizes(4096, 27648, 64, 80, 8, 155136, 128),
         "its attention has a bias on queries, keys and values that its output may lack",
         optional=(*_GLM_BIASES, OptionalTensors(key="attention_out_bias", tensors=_O_BIAS)), ffn_bias_key="mlp_bias"),
    _row("stablelm", "StableLm", _STABLELM, _sizes(2560, 6912, 32, 32, 32, 50304),
         "it has layer norms, and rope on a part of each head", top={"model.norm.weight": "d", "model.norm.bias": "d"},
         optional=(OptionalTensors(key="use_qkv_bias", tensors=_QKV_BIAS),), fixed_head_dim=True,
         refused={"qk_layernorm": "its per-head query and key norms are not in the table"}),
    _row("cwm", "Cwm", _LLAMA, _sizes(6144, 21504, 64, 48, 8, 128256, 128), _SOME_WINDOWS, ffn_bias_key="mlp_bias"),
    _row("diffllama", "DiffLlama", {**_LLAMA, **{f"self_attn.lambda_{name}": "e" for name in ("q1", "k1", "q2", "k2")}},
         _sizes(2048, 8192, 16, 32, None, 32000), "its attention is the difference of two", optional=_BIASES),
)
# fmt: on

FAMILIES: Mapping[str, DenseFamily] = {row.model_type: row for row in _ROWS}

WRAPPER_TEXT_TYPES: Mapping[str, str] = {wrapper: row.model_type for row in _ROWS for wrapper in row.wrappers}
"""Multimodal model type -> the text model's type, for a `text_config` that does not name its own."""


# --- the shapes of a row's tensors under a config ---------------------------------------------------------------------


def is_tied(family: DenseFamily, config: Mapping[str, Any]) -> bool:
    """Return whether the config ties the output head to the embedding (a missing key means the class's default)."""
    flag = config.get("tie_word_embeddings")
    return family.tied if flag is None else bool(flag)


def has_ffn_bias(family: DenseFamily, config: Mapping[str, Any]) -> bool:
    """Return whether gate, up and down have biases."""
    return family.ffn_bias_key is not None and bool(config.get(family.ffn_bias_key, False))


def ffn_shapes(family: DenseFamily, config: Mapping[str, Any]) -> Shapes:
    """Return the stored FFN tensors of one layer: name below `model.layers.N.` -> shape."""
    number = _numbers(family, config)
    d, f = number["d"], number["f"]
    inputs = {family.fused_gate_up: 2 * f} if family.fused_gate_up else {family.gate: f, family.up: f}
    shapes: Shapes = {f"{name}.weight": (rows, d) for name, rows in inputs.items()}
    shapes[f"{family.down}.weight"] = (d, f)
    if has_ffn_bias(family, config):
        shapes |= {f"{name}.bias": (rows,) for name, rows in inputs.items()}
        shapes[f"{family.down}.bias"] = (d,)
    return shapes


def other_shapes(family: DenseFamily, config: Mapping[str, Any]) -> Shapes:
    """Return every tensor outside the FFNs: canonical name -> shape, without `lm_head.weight` when it is tied."""
    number = _numbers(family, config)

    def shapes_of(sizes: Sizes, prefix: str = "") -> Shapes:
        return {prefix + name: tuple(number[letter] for letter in dims.split()) for name, dims in sizes.items()}

    layer = dict(family.layer)
    for part in family.optional:
        if config.get(part.key, part.default):
            layer |= part.tensors
    shapes: Shapes = {EMBEDDINGS: (number["v"], number["d"])}
    for index in range(int(config["num_hidden_layers"])):
        shapes |= shapes_of(layer, f"model.layers.{index}.")
    shapes |= shapes_of(family.top)
    if not is_tied(family, config):
        shapes[HEAD] = (number["v"], number["d"])
    return shapes


def _numbers(family: DenseFamily, config: Mapping[str, Any]) -> dict[str, int]:
    """The numbers behind the letters of the table for one config."""
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_dim = hidden // heads if family.fixed_head_dim else int(config.get("head_dim") or hidden // heads)
    width = int(config["intermediate_size"])
    q, k = heads * head_dim, kv_heads * head_dim
    letters = {"d": hidden, "f": width, "v": int(config["vocab_size"]), "h": heads, "g": kv_heads, "e": head_dim}
    return {**letters, "q": q, "k": k, "2f": 2 * width, "q+2k": q + 2 * k}
