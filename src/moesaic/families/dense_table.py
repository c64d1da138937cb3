"""The dense decoder families that can become an MoE: one row of data per family, no code.

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

Sizes = Mapping[str, str]
"""Tensor name -> its shape in the letters above, separated by blanks."""


@dataclass(frozen=True, kw_only=True)
class OptionalTensors:
    """Tensors that exist only where a config key says so (`key=None`: always)."""

    tensors: Sizes
    key: str
    default: bool = False


@dataclass(frozen=True, kw_only=True)
class DenseFamily:
    """One dense decoder family: `layer` tensors below `model.layers.N.`, `top` tensors outside the layers."""

    model_type: str
    causal_class: str
    layer: Sizes
    top: Sizes
    defaults: Mapping[str, int]
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
    notes: Mapping[str, str] = field(default_factory=dict)
    """Config keys with which the family is refused, and why."""


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
_SANDWICH_NORMS: Sizes = {
    **_PRE_NORMS,
    "pre_feedforward_layernorm.weight": "d",
    "post_feedforward_layernorm.weight": "d",
}
_HEAD_QK_NORM: Sizes = {"self_attn.q_norm.weight": "e", "self_attn.k_norm.weight": "e"}
_FULL_QK_NORM: Sizes = {"self_attn.q_norm.weight": "q", "self_attn.k_norm.weight": "k"}
_TOP: Sizes = {"model.norm.weight": "d"}

_ATTENTION_BIAS = OptionalTensors(key="attention_bias", tensors={**_QKV_BIAS, **_O_BIAS})
_LLAMA: Sizes = {**_ATTENTION, **_PRE_NORMS}


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


def _family(model_type: str, causal_class: str, layer: Sizes, defaults: Mapping[str, int], **more: Any) -> DenseFamily:
    more = {"top": _TOP, **more}
    return DenseFamily(model_type=model_type, causal_class=causal_class, layer=layer, defaults=defaults, **more)


_ROWS = (
    _family(
        "llama",
        "LlamaForCausalLM",
        _LLAMA,
        _sizes(4096, 11008, 32, 32, None, 32000),
        optional=(_ATTENTION_BIAS,),
        ffn_bias_key="mlp_bias",
    ),
    _family("mistral", "MistralForCausalLM", _LLAMA, _sizes(4096, 14336, 32, 32, 8, 32000)),
    _family("ministral", "MinistralForCausalLM", _LLAMA, _sizes(4096, 14336, 32, 32, 8, 32000)),
    _family("ministral3", "Ministral3ForCausalLM", _LLAMA, _sizes(4096, 14336, 34, 32, 8, 131072, 128)),
    _family("qwen2", "Qwen2ForCausalLM", {**_LLAMA, **_QKV_BIAS}, _sizes(4096, 22016, 32, 32, 32, 151936)),
    _family(
        "qwen3",
        "Qwen3ForCausalLM",
        {**_LLAMA, **_HEAD_QK_NORM},
        _sizes(4096, 22016, 32, 32, 32, 151936, 128),
        optional=(_ATTENTION_BIAS,),
    ),
    _family(
        "gemma",
        "GemmaForCausalLM",
        _LLAMA,
        _sizes(3072, 24576, 28, 16, 16, 256000, 256),
        optional=(_ATTENTION_BIAS,),
        activation="gelu_pytorch_tanh",
        tied=True,
    ),
    _family(
        "gemma2",
        "Gemma2ForCausalLM",
        {**_ATTENTION, **_SANDWICH_NORMS},
        _sizes(2304, 9216, 26, 8, 4, 256000, 256),
        optional=(_ATTENTION_BIAS,),
        activation_key="hidden_activation",
        activation="gelu_pytorch_tanh",
        tied=True,
    ),
    _family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        {**_ATTENTION, **_SANDWICH_NORMS, **_HEAD_QK_NORM},
        _sizes(2304, 9216, 26, 8, 4, 262208, 256),
        optional=(_ATTENTION_BIAS,),
        activation_key="hidden_activation",
        activation="gelu_pytorch_tanh",
        tied=True,
    ),
    _family(
        "vaultgemma",
        "VaultGemmaForCausalLM",
        {**_ATTENTION, "input_layernorm.weight": "d", "pre_feedforward_layernorm.weight": "d"},
        _sizes(2304, 9216, 26, 8, 4, 256000, 256),
        optional=(_ATTENTION_BIAS,),
        activation_key="hidden_activation",
        activation="gelu_pytorch_tanh",
        tied=True,
    ),
    _family(
        "olmo",
        "OlmoForCausalLM",
        _ATTENTION,
        _sizes(4096, 11008, 32, 32, None, 50304),
        top={},
        optional=(_ATTENTION_BIAS,),
        fixed_head_dim=True,
    ),
    _family(
        "olmo2",
        "Olmo2ForCausalLM",
        {**_ATTENTION, **_POST_NORMS, **_FULL_QK_NORM},
        _sizes(4096, 11008, 32, 32, None, 50304),
        optional=(_ATTENTION_BIAS,),
    ),
    _family(
        "olmo3",
        "Olmo3ForCausalLM",
        {**_ATTENTION, **_POST_NORMS, **_FULL_QK_NORM},
        _sizes(4096, 11008, 32, 32, None, 50304),
        optional=(_ATTENTION_BIAS,),
    ),
    _family(
        "smollm3",
        "SmolLM3ForCausalLM",
        _LLAMA,
        _sizes(2048, 11008, 36, 16, 4, 128256),
        optional=(_ATTENTION_BIAS,),
        ffn_bias_key="mlp_bias",
        tied=True,
    ),
    _family(
        "granite",
        "GraniteForCausalLM",
        _LLAMA,
        _sizes(4096, 11008, 32, 32, None, 32000),
        optional=(_ATTENTION_BIAS,),
        ffn_bias_key="mlp_bias",
    ),
    _family(
        "phi3",
        "Phi3ForCausalLM",
        {"self_attn.qkv_proj.weight": "q+2k d", "self_attn.o_proj.weight": "d q", **_PRE_NORMS},
        _sizes(3072, 8192, 32, 32, None, 32064),
        fused_gate_up="mlp.gate_up_proj",
        rope_aliases=("su",),
    ),
    _family(
        "glm",
        "GlmForCausalLM",
        _LLAMA,
        _sizes(4096, 13696, 40, 32, 2, 151552, 128),
        optional=(OptionalTensors(key="attention_bias", default=True, tensors=_QKV_BIAS),),
        fused_gate_up="mlp.gate_up_proj",
    ),
    _family(
        "glm4",
        "Glm4ForCausalLM",
        {**_LLAMA, "post_self_attn_layernorm.weight": "d", "post_mlp_layernorm.weight": "d"},
        _sizes(4096, 13696, 40, 32, 2, 151552, 128),
        optional=(OptionalTensors(key="attention_bias", default=True, tensors=_QKV_BIAS),),
        fused_gate_up="mlp.gate_up_proj",
    ),
    _family(
        "cohere",
        "CohereForCausalLM",
        {**_ATTENTION, "input_layernorm.weight": "d"},
        _sizes(8192, 22528, 40, 64, None, 256000),
        optional=(
            _ATTENTION_BIAS,
            OptionalTensors(
                key="use_qk_norm", tensors={"self_attn.q_norm.weight": "h e", "self_attn.k_norm.weight": "g e"}
            ),
        ),
        tied=True,
    ),
    _family(
        "cohere2",
        "Cohere2ForCausalLM",
        {**_ATTENTION, "input_layernorm.weight": "d"},
        _sizes(8192, 22528, 40, 64, None, 256000),
        optional=(_ATTENTION_BIAS,),
        tied=True,
        fixed_head_dim=True,
    ),
    _family(
        "ernie4_5",
        "Ernie4_5ForCausalLM",
        _LLAMA,
        _sizes(1024, 3072, 18, 16, 2, 103424, 128),
        optional=(OptionalTensors(key="use_bias", tensors={**_QKV_BIAS, **_O_BIAS}),),
        ffn_bias_key="use_bias",
        tied=True,
    ),
    _family(
        "exaone4",
        "Exaone4ForCausalLM",
        {**_ATTENTION, **_POST_NORMS, **_HEAD_QK_NORM},
        _sizes(4096, 16384, 32, 32, 32, 102400),
    ),
    _family(
        "hunyuan_v1_dense",
        "HunYuanDenseV1ForCausalLM",
        {**_LLAMA, "self_attn.query_layernorm.weight": "e", "self_attn.key_layernorm.weight": "e"},
        _sizes(4096, 11008, 32, 32, None, 290943),
        optional=(_ATTENTION_BIAS,),
    ),
    _family(
        "helium",
        "HeliumForCausalLM",
        {**_QKV, "self_attn.o_proj.weight": "d d", **_PRE_NORMS},
        _sizes(2560, 7040, 24, 20, 20, 48000, 128),
        optional=(OptionalTensors(key="attention_bias", tensors=_QKV_BIAS),),
        ffn_bias_key="mlp_bias",
    ),
    _family(
        "seed_oss",
        "SeedOssForCausalLM",
        _LLAMA,
        _sizes(4096, 27648, 64, 80, 8, 155136, 128),
        optional=(
            OptionalTensors(key="attention_bias", default=True, tensors=_QKV_BIAS),
            OptionalTensors(key="attention_out_bias", tensors=_O_BIAS),
        ),
        ffn_bias_key="mlp_bias",
    ),
    _family(
        "stablelm",
        "StableLmForCausalLM",
        {**_LLAMA, "input_layernorm.bias": "d", "post_attention_layernorm.bias": "d"},
        _sizes(2560, 6912, 32, 32, 32, 50304),
        top={"model.norm.weight": "d", "model.norm.bias": "d"},
        optional=(OptionalTensors(key="use_qkv_bias", tensors=_QKV_BIAS),),
        fixed_head_dim=True,
        notes={"qk_layernorm": "its per-head query and key norms are not in the table"},
    ),
    _family(
        "cwm",
        "CwmForCausalLM",
        _LLAMA,
        _sizes(6144, 21504, 64, 48, 8, 128256, 128),
        ffn_bias_key="mlp_bias",
    ),
    _family(
        "granite_swa",
        "GraniteSWAForCausalLM",
        {**_LLAMA, "self_attn.sinks": "h"},
        _sizes(2560, 8192, 24, 20, 4, 100352),
        optional=(_ATTENTION_BIAS,),
        ffn_bias_key="mlp_bias",
        tied=True,
    ),
    _family(
        "diffllama",
        "DiffLlamaForCausalLM",
        {
            **_LLAMA,
            "self_attn.lambda_q1": "e",
            "self_attn.lambda_k1": "e",
            "self_attn.lambda_q2": "e",
            "self_attn.lambda_k2": "e",
        },
        _sizes(2048, 8192, 16, 32, None, 32000),
        optional=(_ATTENTION_BIAS,),
    ),
)

FAMILIES: Mapping[str, DenseFamily] = {row.model_type: row for row in _ROWS}

WRAPPER_TEXT_TYPES: Mapping[str, str] = {
    "gemma3": "gemma3_text",
    "llava": "llama",
    "llava_next": "llama",
    "mistral3": "mistral",
}
"""Multimodal model type -> the text model's type, for a `text_config` that does not name its own."""
