"""The tensors of a native family, of our architecture, or of the same family in another layout."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from moesaic.checkpoint.pieces import ComputedTensor, NewTensor, whole
from moesaic.checkpoint.reader import TORCH_DTYPES
from moesaic.checkpoint.source import Checkpoint
from moesaic.checkpoint.writer import OutputTensor
from moesaic.common.errors import MoesaicError
from moesaic.exporting.layouts import Expert, Spelling, expert_tensors, layouts_of
from moesaic.exporting.natives import EMPTY_SHARED_WIDTH, NATIVE, NativeFamily
from moesaic.exporting.parts import LayerParts, gate_up, layer_parts
from moesaic.exporting.rows import Rows, read, tensor
from moesaic.exporting.rules import PLAIN_TOP_K, Facts, describe
from moesaic.exporting.view import View
from moesaic.families.moe import MoEModel

GATE = 1e-20
"""Weight of Qwen2-MoE's shared gate: the sigmoid of the logit is 0.5. llama.cpp divides by the logit, so not zero."""


def native_tensors(view: View, row: NativeFamily, layout: str, written: str | None = None) -> list[NewTensor]:
    """All tensors of the model in a native family; `written`: the dtype (safetensors code) if they are cast after."""
    spelling = layouts_of(row.model_type).spelling(layout, row.model_type)
    made: list[NewTensor] = [tensor(name, rows) for name, rows in view.others.items()]
    for layer in view.layers:
        prefix = f"model.layers.{layer.layer}."
        made += expert_tensors(prefix, spelling, layer.router, layer.experts)
        if row.shared is not None:
            made += SHARED[row.shared](prefix, layer, written)
    if row.qkv_bias:
        made += _zero_biases(view)
    return made


def our_tensors(view: View) -> list[NewTensor]:
    """All tensors of the model in our architecture."""
    made: list[NewTensor] = [tensor(name, rows) for name, rows in view.others.items()]
    for layer in view.layers:
        prefix = f"model.layers.{layer.layer}."
        made += expert_tensors(prefix, layouts_of(str(view.config["model_type"])).family, layer.router, layer.experts)
        if layer.shared is not None:
            made += _named(f"{prefix}mlp.shared_expert.", layer.shared)
    return made


def relaid_tensors(checkpoint: Checkpoint, model: MoEModel, layout: str) -> list[NewTensor]:
    """The same tensors, those of the experts and routers under the names of another layout; bytes only move."""
    made: list[NewTensor] = []
    model_type = model.family.model_type
    spelling = layouts_of("moesaic_" if model_type == "moesaic" else model_type).spelling(layout, model_type)
    if model.family.interleaved or model_type == "moesaic":  # one layout only
        return [whole(info) for info in checkpoint.tensors.values()]
    layer_of = {
        name: layer
        for layer in model.layers
        for one in layer.expert_tensors
        if one.role != "selection_bias"
        for name in one.names(layer.num_experts)
    }
    done: set[int] = set()
    for name, info in checkpoint.tensors.items():
        layer = layer_of.get(name)
        if layer is None:
            made.append(whole(info))
        elif layer.layer not in done:
            done.add(layer.layer)
            parts = layer_parts(checkpoint.tensors, layer)
            prefix = name[: name.index("layers.") + len("layers.")] + f"{layer.layer}."
            made += expert_tensors(prefix, spelling, parts.router, parts.experts)
    return made


def input_layout(model: MoEModel, names: Sequence[str]) -> str:
    """The layout that a checkpoint has: per-expert, fused, or family where that is another one."""
    layouts = layouts_of("moesaic_" if model.family.model_type == "moesaic" else model.family.model_type)
    present = set(names)
    prefix = next(name for name in names if "layers." in name)
    prefix = prefix[: prefix.index("layers.") + len("layers.")] + f"{model.layers[0].layer}."
    for layout in ("family", "per-expert", "fused"):
        spelling: Spelling | None = {
            "family": layouts.family, "per-expert": layouts.per_expert, "fused": layouts.fused
        }[layout]  # fmt: skip
        if spelling is not None and all(prefix + name in present for name in _expected(spelling)):
            return layout
    return "family"


def _expected(spelling: Spelling) -> list[str]:
    own = [name.format(expert=0) for name in spelling.own or ()]
    return [spelling.router, *own, *(spelling.stacks or ())]


# --- shared experts ---------------------------------------------------------------------------------------------------


def _named(prefix: str, expert: Expert) -> Iterator[NewTensor]:
    for name, rows in (("gate_proj", expert.gate), ("up_proj", expert.up), ("down_proj", expert.down)):
        yield tensor(f"{prefix}{name}.weight", rows)


def _gated(prefix: str, layer: LayerParts, written: str | None) -> Iterator[NewTensor]:
    """Qwen2-MoE multiplies the shared expert by a sigmoid: one of 0.5, and twice the down matrix."""
    hidden, dtype = layer.router.shape[1], layer.router.dtype
    place = f"{prefix}mlp.shared_expert."
    if layer.shared is None:
        width = EMPTY_SHARED_WIDTH
        for name, shape in (
            ("gate_proj", (width, hidden)),
            ("up_proj", (width, hidden)),
            ("down_proj", (hidden, width)),
        ):
            yield _filled(f"{place}{name}.weight", dtype, shape, 0.0)
    else:
        for made in _named(place, layer.shared):
            yield _doubled(made.output, layer.shared.down) if made.output.name.endswith("down_proj.weight") else made
    # The smallest number of a 16-bit float with 5 bits of exponent is larger, and still gives 0.5 after rounding.
    formats = [torch.finfo(TORCH_DTYPES[code]) for code in (dtype, written or dtype)]
    value = max(GATE, *(one.smallest_normal * one.eps for one in formats))
    yield _filled(f"{prefix}mlp.shared_expert_gate.weight", dtype, (1, hidden), value)


def _stacked(prefix: str, layer: LayerParts, _written: str | None) -> Iterator[NewTensor]:
    if layer.shared is not None:
        yield tensor(f"{prefix}shared_mlp.input_linear.weight", gate_up(layer.shared))
        yield tensor(f"{prefix}shared_mlp.output_linear.weight", layer.shared.down)


SHARED: dict[str, Callable[[str, LayerParts, str | None], Iterator[NewTensor]]] = {
    "gated": _gated,
    "stacked": _stacked,
}


def _zero_biases(view: View) -> Iterator[NewTensor]:
    """Zeros for the biases that a family always has; there are none to copy."""
    for layer in range(view.config["num_hidden_layers"]):
        for name in ("q_proj", "k_proj", "v_proj"):
            place = f"model.layers.{layer}.self_attn.{name}."
            if f"{place}bias" not in view.others:
                weight = view.others[f"{place}weight"]
                yield _filled(f"{place}bias", weight.dtype, weight.shape[:1], 0.0)


def _filled(name: str, dtype: str, shape: tuple[int, ...], value: float) -> ComputedTensor:
    output = OutputTensor(name=name, dtype=dtype, shape=shape)
    return ComputedTensor(
        output=output, sources=(), compute=lambda: torch.full(shape, value, dtype=TORCH_DTYPES[dtype])
    )


def _doubled(output: OutputTensor, rows: Rows) -> ComputedTensor:
    return ComputedTensor(output=output, sources=rows.sources, compute=partial(_twice, output, rows))


def _twice(output: OutputTensor, rows: Rows) -> Tensor:
    doubled = read(rows) * 2
    if not doubled.isfinite().all():
        where = rows.sources[0]
        raise MoesaicError(
            f"{where.file}: {where.name} times 2 leaves the range of {output.dtype}; use --dtype bfloat16 or float32"
        )
    return doubled


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A native family for a model, and why; or, without one, the rules that each of them breaks."""

    row: NativeFamily | None
    failures: dict[str, dict[str, str]]


def choose(facts: Facts, families: Sequence[str] = tuple(NATIVE)) -> Choice:
    """The first family in the order of preference that is exactly the model."""
    failures: dict[str, dict[str, str]] = {}
    for model_type in families:
        failures[model_type] = NATIVE[model_type].failures(facts)
        if not failures[model_type]:
            return Choice(row=NATIVE[model_type], failures=failures)
    return Choice(row=None, failures=failures)


def refusal(name: str, facts: Facts, failures: dict[str, dict[str, str]]) -> MoesaicError:
    """Every rule that failed, in one line."""
    if len(failures) == 1:
        return MoesaicError(f"{name} is not exactly {describe(facts, failures)}")
    ways = "" if facts["routing"] == PLAIN_TOP_K else "; serve it with its own code (docs/serving.md)"
    return MoesaicError(f"{name} is exactly none of the native families: {describe(facts, failures)}{ways}")
