"""The tensors and config.json of a native family, of our architecture, or of the same family in another layout."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moesaic.checkpoint.config_file import rope_parameters
from moesaic.checkpoint.lazy import Lazy, computed, concat, promoted, stack, stored
from moesaic.checkpoint.source import Checkpoint
from moesaic.checkpoint.streaming import torch_dtype
from moesaic.common.errors import MoesaicError
from moesaic.exporting.view import Expert, LayerParts, View, layer_parts
from moesaic.families.family import Spelling
from moesaic.families.moe import MoEModel
from moesaic.families.moe_table import EMPTY_SHARED_WIDTH, MOE_FAMILIES, OURS, TARGETS

Tensors = dict[str, Lazy]

CODES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""`--dtype` -> safetensors code."""

_FLOATS = frozenset({"F64", "F32", "BF16", "F16"})

GATE = 1e-20
"""Weight of Qwen2-MoE's shared gate: the sigmoid of the logit is 0.5. llama.cpp divides by the logit, so not zero."""


def native_tensors(view: View, family: str, layout: str, written: str | None = None) -> Tensors:
    """All tensors of the model in a native family; `written`: the dtype (safetensors code) if they are cast after."""
    target, spelling = TARGETS[family], MOE_FAMILIES[family].layouts.spelling(layout, family)
    made, factor = dict(view.others), scaling_factor(view)
    for layer in view.layers:
        prefix = f"model.layers.{layer.layer}."
        experts = [replace(one, down_DI=times(one.down_DI, factor, written)) for one in layer.experts]
        made |= expert_tensors(prefix, spelling, layer.router, experts)
        if target.shared is not None:
            made |= SHARED[target.shared](prefix, layer, written)
    if target.qkv_bias:
        made |= _zero_biases(view)
    return made


def our_tensors(view: View) -> Tensors:
    """All tensors of the model in our architecture."""
    made = dict(view.others)
    for layer in view.layers:
        prefix = f"model.layers.{layer.layer}."
        made |= expert_tensors(prefix, OURS.layouts.family, layer.router, layer.experts)
        if layer.shared is not None:
            made |= _shared(prefix, layer.shared)
    return made


def relaid_tensors(checkpoint: Checkpoint, model: MoEModel, layout: str) -> Tensors:
    """The same tensors, those of the experts and routers under the names of another layout; bytes only move."""
    spelling = model.family.layouts.spelling(layout, model.family.model_type)
    if model.family.layouts.single:
        return {name: stored(info) for name, info in checkpoint.tensors.items()}
    layer_of = {
        name: layer
        for layer in model.layers
        for one in layer.expert_tensors
        if one.role != "selection_bias"
        for name in one.names(layer.num_experts)
    }
    made: Tensors = {}
    done: set[int] = set()
    for name, info in checkpoint.tensors.items():
        layer = layer_of.get(name)
        if layer is None:
            made[name] = stored(info)
        elif layer.layer not in done:
            done.add(layer.layer)
            parts = layer_parts(checkpoint.tensors, layer)
            made |= expert_tensors(_layer_prefix(name, layer.layer), spelling, parts.router, parts.experts)
    return made


def input_layout(model: MoEModel, names: Sequence[str]) -> str:
    """The layout that a checkpoint has: per-expert, fused, or family where that is another one."""
    layouts, present = model.family.layouts, set(names)
    prefix = _layer_prefix(next(name for name in names if "layers." in name), model.layers[0].layer)
    known = {"family": layouts.family, "per-expert": layouts.per_expert, "fused": layouts.fused}
    for layout, spelling in known.items():
        if spelling is not None and all(prefix + name in present for name in spelling.names):
            return layout
    return "family"


def expert_tensors(prefix: str, spelling: Spelling, router: Lazy, experts: Sequence[Expert]) -> Tensors:
    """Router and experts of one layer under the names of a spelling; `prefix` is `model.layers.N.`."""
    made = {prefix + spelling.router: router}
    if spelling.own is not None:
        for number, expert in enumerate(experts):
            names = [prefix + name.format(expert=number) for name in spelling.own]
            made |= dict(zip(names, (expert.gate_ID, expert.up_ID, expert.down_DI), strict=True))
        return made
    assert spelling.stacks is not None
    gate_up, down = spelling.stacks
    made[prefix + gate_up] = stack([_gate_up(expert) for expert in experts])
    made[prefix + down] = stack([expert.down_DI for expert in experts])
    return made


def _gate_up(expert: Expert) -> Lazy:
    return concat([expert.gate_ID, expert.up_ID])


def cast_all(tensors: Mapping[str, Lazy], dtype: str) -> Tensors:
    """The same tensors with every floating-point number rounded to `dtype` (a safetensors code)."""
    return {
        name: one.map(partial(_rounded, name, dtype), dtype) if one.dtype in _FLOATS - {dtype} else one
        for name, one in tensors.items()
    }


def _rounded(name: str, dtype: str, values: Tensor) -> Tensor:
    made = values.to(torch_dtype(dtype))
    if bool((made.isinf() & values.isfinite()).any()):
        raise MoesaicError(f"{name} leaves the range of {dtype}; use --dtype bfloat16 or float32")
    return made


def _layer_prefix(name: str, layer: int) -> str:
    return name[: name.index("layers.") + len("layers.")] + f"{layer}."


# --- shared experts ---------------------------------------------------------------------------------------------------


def _shared(prefix: str, expert: Expert) -> Tensors:
    matrices = {"gate_proj": expert.gate_ID, "up_proj": expert.up_ID, "down_proj": expert.down_DI}
    return {f"{prefix}mlp.shared_expert.{name}.weight": matrix for name, matrix in matrices.items()}


def _gated(prefix: str, layer: LayerParts, written: str | None) -> Tensors:
    """Qwen2-MoE multiplies the shared expert by a sigmoid: one of 0.5, and twice the down matrix."""
    hidden, dtype = layer.router.shape[1], layer.router.dtype
    if layer.shared is None:
        inner, outer = (EMPTY_SHARED_WIDTH, hidden), (hidden, EMPTY_SHARED_WIDTH)
        gate, up, down = (_filled(dtype, shape, 0.0) for shape in (inner, inner, outer))
        shared = Expert(gate_ID=gate, up_ID=up, down_DI=down)
    else:
        shared = replace(layer.shared, down_DI=times(layer.shared.down_DI, 2.0))
    # The smallest number of a 16-bit float with 5 bits of exponent is larger, and still gives 0.5 after rounding.
    formats = [torch.finfo(torch_dtype(code)) for code in (dtype, written or dtype)]
    value = max(GATE, *(one.smallest_normal * one.eps for one in formats))
    return {**_shared(prefix, shared), f"{prefix}mlp.shared_expert_gate.weight": _filled(dtype, (1, hidden), value)}


def _stacked(prefix: str, layer: LayerParts, _written: str | None) -> Tensors:
    if layer.shared is None:
        return {}
    return {
        f"{prefix}shared_mlp.input_linear.weight": _gate_up(layer.shared),
        f"{prefix}shared_mlp.output_linear.weight": layer.shared.down_DI,
    }


SHARED: dict[str, Callable[[str, LayerParts, str | None], Tensors]] = {"gated": _gated, "stacked": _stacked}
"""`NativeTarget.shared` -> the tensors of one layer's shared experts."""


def _zero_biases(view: View) -> Tensors:
    """Zeros for the biases that a family always has; there are none to copy."""
    made: Tensors = {}
    for layer in range(view.config["num_hidden_layers"]):
        for name in ("q_proj", "k_proj", "v_proj"):
            place = f"model.layers.{layer}.self_attn.{name}."
            if f"{place}bias" not in view.others:
                weight = view.others[f"{place}weight"]
                made[f"{place}bias"] = _filled(weight.dtype, weight.shape[:1], 0.0)
    return made


def _filled(dtype: str, shape: tuple[int, ...], value: float) -> Lazy:
    return computed(shape, dtype, lambda: torch.full(shape, value, dtype=torch_dtype(dtype)))


# --- factors ----------------------------------------------------------------------------------------------------------


def scaling_factor(view: View) -> float:
    """The factor on the routing weights, which no family that is written here has a key for."""
    return float(view.config.get("routed_scaling_factor", 1.0))


def times(tensor: Lazy, factor: float, written: str | None = None) -> Lazy:
    """A tensor times a factor, rounded once: to `written` (a safetensors code), or to its own dtype."""
    if factor == 1.0:
        return tensor
    where, dtype = f"{tensor.sources[0].file}: {tensor.sources[0].name}", written or tensor.dtype
    wide = tensor.cast(promoted(promoted(tensor.dtype, dtype), "F32"))
    return wide.map(partial(_multiplied, where, factor, dtype), dtype)


def _multiplied(where: str, factor: float, dtype: str, values: Tensor) -> Tensor:
    made = (values * factor).to(torch_dtype(dtype))
    if not made.isfinite().all():
        raise MoesaicError(f"{where} times {factor:g} leaves the range of {dtype}; use --dtype bfloat16 or float32")
    return made


# --- config.json ------------------------------------------------------------------------------------------------------

_COMMON_KEYS = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_act",
    "max_position_embeddings", "initializer_range", "rms_norm_eps", "use_cache", "pad_token_id", "bos_token_id",
    "eos_token_id", "tie_word_embeddings", "attention_dropout", "rope_parameters", "num_experts_per_tok", "dtype",
)  # fmt: skip


def native_config(family: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of a native family, from that of our architecture."""
    target = TARGETS[family]
    made = {key: config.get(key) for key in (*_COMMON_KEYS, *target.keys)}
    made |= {key: value(config) for key, value in target.values.items()}
    made["rope_parameters"] = rope_parameters(config)
    return made | {"model_type": family, "architectures": [target.causal_class]}
