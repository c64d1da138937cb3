"""What the grown checkpoint is made of: its tensors as lazy ones, its config, record and card.

E experts, D hidden, I intermediate. Stacked matrices of interleaved families (GPT-OSS) are stored (E, D, 2I) and
(E, I, D), gate and up alternating.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moesaic.checkpoint.lazy import Lazy, computed, promoted, stack, stored, together
from moesaic.checkpoint.quantised import numbers_of, scheme_of, settings_of
from moesaic.checkpoint.record import model_card, original_experts
from moesaic.checkpoint.source import Checkpoint
from moesaic.checkpoint.write import NewCheckpoint
from moesaic.checkpoint.writer import parse_size
from moesaic.common import seeds
from moesaic.common.statement import Statement
from moesaic.expansion.exact import grown_config, statement
from moesaic.expansion.operators import (
    EXPERT_OPERATORS,
    ROUTER_OPERATORS,
    duplicate_noise,
    duplicates_of,
    grown_rows,
    zero_sum_noise,
)
from moesaic.expansion.resolve import ExpandPlan
from moesaic.families.counting import count_shapes
from moesaic.families.experts import ExpertWeights
from moesaic.families.moe import ROUTER_ROLES, ExpertTensor, MoELayerTensors
from moesaic.modeling.names import code_files
from moesaic.routing.subset import cut_routing

Sources = Mapping[int, Sequence[int]]
"""MoE layer -> the source of each expert of the result."""

Parts = dict[str, Lazy]
"""Role (`gate`, `gate_up`, `down_bias`, ...) -> what is stored of one expert."""

_FIELDS = {
    "gate": "gate_ID",
    "up": "up_ID",
    "down": "down_DI",
    "gate_bias": "gate_bias_I",
    "up_bias": "up_bias_I",
    "down_bias": "down_bias_D",
}


def build(plan: ExpandPlan, copies: Mapping[int, Sequence[int]], texts: Mapping[str, str]) -> NewCheckpoint:
    """Everything about the result, ready to be written; `texts` are further small files."""
    sources = {layer: plan.sources(list(numbers)) for layer, numbers in copies.items()}
    tensors, config, promise = _tensors(plan, sources), grown_config(plan, sources), statement(plan)
    return NewCheckpoint(
        verb="expand",
        sources=(("source", plan.checkpoint),),
        tensors=tensors,
        config=config,
        recipe=plan.recipe,
        seed=plan.recipe.seed,
        card=_card(plan, promise, tensors, config),
        record=_record(plan, copies, sources, promise),
        texts={**code_files(config), **texts},
        shard_size=parse_size(plan.recipe.shard_size),
        allow_nonfinite=plan.recipe.allow_nonfinite,
    )


def _tensors(plan: ExpandPlan, sources: Sources) -> dict[str, Lazy]:
    """All tensors, those of a grown layer where its first one was."""
    layer_of = {
        name: layer
        for layer in plan.model.layers
        for tensor in layer.expert_tensors
        for name in tensor.names(layer.num_experts)
    }
    made: dict[str, Lazy] = {}
    done: set[int] = set()
    for name, info in plan.checkpoint.tensors.items():
        layer = layer_of.get(name)
        if layer is None:
            made[name] = stored(info)
        elif layer.layer not in done:
            done.add(layer.layer)
            made |= _grown_layer(plan, layer, sources[layer.layer])
    return made


def _grown_layer(plan: ExpandPlan, layer: MoELayerTensors, sources: Sequence[int]) -> dict[str, Lazy]:
    made: dict[str, Lazy] = {}
    for tensor in layer.expert_tensors:
        if tensor.role in ROUTER_ROLES:
            made[tensor.name] = _router_tensor(plan, layer, tensor, sources)
    computes = plan.recipe.expert_op != "copy"
    experts = [
        _duplicate(plan, layer, number, source) if computes and again else expert_parts(plan.checkpoint, layer, source)
        for number, (source, again) in enumerate(zip(sources, duplicates_of(sources), strict=True))
    ]
    for tensor in _expert_tensors(layer):
        parts = [expert[tensor.role] for expert in experts]
        if tensor.axis is None:
            made |= zip(tensor.names(len(parts)), parts, strict=True)
        else:
            made[tensor.name] = stack(parts)
    return made


# --- experts ----------------------------------------------------------------------------------------------------------


def _expert_tensors(layer: MoELayerTensors) -> list[ExpertTensor]:
    return [tensor for tensor in layer.expert_tensors if tensor.role not in ROUTER_ROLES]


def expert_parts(checkpoint: Checkpoint, layer: MoELayerTensors, expert: int) -> Parts:
    """What is stored of one expert, whichever layout the checkpoint has: stacked, or a tensor of its own."""

    def part(tensor: ExpertTensor) -> Lazy:
        if tensor.axis is None:
            return stored(checkpoint.tensors[tensor.name.format(expert=expert)])
        return stored(checkpoint.tensors[tensor.name]).index(expert)

    return {tensor.role: part(tensor) for tensor in _expert_tensors(layer)}


def read_expert(parts: Parts, *, transposed: bool = False, interleaved: bool = False) -> ExpertWeights:
    """One expert in memory, in float32 (in float64 where that is stored)."""
    fields: dict[str, Tensor] = {}
    for role, part in parts.items():
        values = part.cast(promoted(part.dtype, "F32")).read()
        if transposed and values.ndim == 2:
            values = values.T
        if role.startswith("gate_up"):
            gate, up = (values[::2], values[1::2]) if interleaved else values.chunk(2)
            suffix = role.removeprefix("gate_up")
            fields |= {f"gate{suffix}": gate, f"up{suffix}": up}
        else:
            fields[role] = values
    return ExpertWeights(**{_FIELDS[role]: values.contiguous() for role, values in fields.items()})


def _stored_form(role: str, expert: ExpertWeights, *, transposed: bool, interleaved: bool) -> Tensor:
    """The inverse of `read_expert` for one role."""
    if role.startswith("gate_up"):
        suffix = role.removeprefix("gate_up")
        gate, up = (getattr(expert, _FIELDS[part + suffix]) for part in ("gate", "up"))
        values = torch.stack([gate, up], dim=1).flatten(0, 1) if interleaved else torch.cat([gate, up])
    else:
        values = getattr(expert, _FIELDS[role])
    return values.T if transposed and values.ndim == 2 else values


def _duplicate(plan: ExpandPlan, layer: MoELayerTensors, number: int, source: int) -> Parts:
    """Expert `number` of the result, which an operator makes of `source` (and of another expert) when it is written."""
    checkpoint, family = plan.checkpoint, plan.model.family
    form = {"transposed": family.transposed, "interleaved": family.interleaved}
    parts = expert_parts(checkpoint, layer, source)

    def function() -> dict[str, Tensor]:
        stream = seeds.generator(plan.recipe.seed, "expand", layer.layer, "expert", number)
        operator = EXPERT_OPERATORS[plan.recipe.expert_op]
        partner = operator.partner_of(source, plan.model.num_experts, stream)
        one, another = (read_expert(expert_parts(checkpoint, layer, expert), **form) for expert in (source, partner))
        made = operator(one, another, stream)
        return {role: _stored_form(role, made, **form) for role in parts}

    # The partner is drawn when its turn comes. It need not be named here: all experts are in the result anyway.
    return together({role: (part.shape, part.dtype) for role, part in parts.items()}, function, parts.values())


# --- router -----------------------------------------------------------------------------------------------------------


def _router_tensor(plan: ExpandPlan, layer: MoELayerTensors, tensor: ExpertTensor, sources: Sequence[int]) -> Lazy:
    """The router's rows, its bias or the selection bias of a grown layer."""
    old, axis = stored(plan.checkpoint.tensors[tensor.name]), tensor.axis
    assert axis is not None
    noisy = plan.recipe.delta > 0 and tensor.role == _noisy_role(plan, layer)
    smaller = _divides_bias(plan, tensor)
    if not (noisy or smaller) and (tensor.role != "router" or plan.recipe.router_op in ("copy", "bias_only")):
        return old.take(sources, axis)
    shape = (*old.shape[:axis], len(sources), *old.shape[axis + 1 :])
    return computed(shape, old.dtype, partial(_computed_router, plan, layer.layer, tensor, sources, noisy), [old])


def _divides_bias(plan: ExpandPlan, tensor: ExpertTensor) -> bool:
    """Probabilities are that much smaller where every expert is there m times, and so is what is added to them."""
    return tensor.role == "selection_bias" and plan.own_bias and plan.multiplied


def _computed_router(plan: ExpandPlan, layer: int, tensor: ExpertTensor, sources: Sequence[int], noisy: bool) -> Tensor:
    old, axis = stored(plan.checkpoint.tensors[tensor.name]), tensor.axis
    assert axis is not None
    slots = old.cast(promoted(old.dtype, "F32")).read().movedim(axis, 0)
    seed = plan.recipe.seed
    if tensor.role == "router":
        stream = seeds.generator(seed, "expand", layer, tensor.role, "rows")
        grown = grown_rows(slots, sources, ROUTER_OPERATORS[plan.recipe.router_op], stream)
    else:
        grown = slots[list(sources)]
    if _divides_bias(plan, tensor):
        assert plan.multiple is not None
        grown = grown / plan.multiple
    if noisy:
        draw = zero_sum_noise if plan.exclusive else duplicate_noise
        stream = seeds.generator(seed, "expand", layer, tensor.role, "noise")
        grown = grown + draw(sources, slots.shape[1:], plan.recipe.delta, stream).to(grown.dtype)
    return grown.movedim(0, axis)


def _noisy_role(plan: ExpandPlan, layer: MoELayerTensors) -> str:
    """Where the noise of a layer goes: on the family's selection bias, the recorded one, or the router's rows."""
    if not plan.bias_takes_noise:
        return "router"
    own = any(tensor.role == "selection_bias" for tensor in layer.expert_tensors)
    return "selection_bias" if own else "recorded_bias" if plan.recorded_bias is not None else "router"


def _grown_routing(plan: ExpandPlan, sources: Sources) -> dict[str, Any]:
    """The `routing` entry of moesaic.json, where training has recorded one: copies have their source's bias."""
    if plan.recorded is None:
        return {}
    routing = cut_routing(plan.recorded, list(sources.values()))
    assert routing is not None
    routing["rule"]["pool_size"] = _grown_pools(plan)
    if plan.multiplied and plan.multiple and plan.recorded_bias is not None:  # probabilities are that much smaller
        routing["selection_bias"] = [[value / plan.multiple for value in row] for row in routing["selection_bias"]]
    if plan.recorded_bias is not None and plan.recipe.delta > 0:
        for row, layer in zip(routing["selection_bias"], plan.model.layers, strict=True):
            if _noisy_role(plan, layer) == "recorded_bias":
                stream = seeds.generator(plan.recipe.seed, "expand", layer.layer, "recorded_bias", "noise")
                noise = duplicate_noise(sources[layer.layer], (), plan.recipe.delta, stream)
                row[:] = (torch.tensor(row, dtype=torch.float32) + noise).tolist()
    return {"routing": routing}


def _grown_pools(plan: ExpandPlan) -> int | list[int] | None:
    """Sizes of the document pools that a recorded rule draws: the same documents keep their experts and all copies of
    them where every expert is copied and active as often; else the same sizes, but room for the active experts."""
    assert plan.recorded is not None
    size = plan.recorded["rule"]["pool_size"]
    if size is None:
        return None
    times = (plan.multiple or 1) if plan.multiplied else 1
    grown = [max(plan.top_k, times * one) for one in ([size] if isinstance(size, int) else size)]
    return grown[0] if isinstance(size, int) else grown


# --- record and card --------------------------------------------------------------------------------------------------


def parameters(tensors: Mapping[str, Lazy], config: Mapping[str, Any]) -> tuple[int, int]:
    """Total and active parameters of the result."""
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    if settings := settings_of(config):
        shapes = numbers_of(scheme_of(settings, "the result"), shapes)
    counted = count_shapes(shapes, config)
    return counted.total, counted.active


def _record(
    plan: ExpandPlan, copies: Mapping[int, Sequence[int]], sources: Sources, promise: Statement
) -> dict[str, Any]:
    before = original_experts(plan.checkpoint, plan.model.num_experts, len(sources))
    original = [[ids[source] for source in of_layer] for ids, of_layer in zip(before, sources.values(), strict=True)]
    return {
        "statement": {"code": promise.code, "text": promise.text},
        "experts": {
            "layers": list(sources),
            "before": plan.model.num_experts,
            "sources": [list(of_layer) for of_layer in sources.values()],
            "copies": [list(numbers) for numbers in copies.values()],
            "original": original,
        },
        **_grown_routing(plan, sources),
    }


def _card(plan: ExpandPlan, promise: Statement, tensors: Mapping[str, Lazy], config: Mapping[str, Any]) -> str:
    recipe, (total, active) = plan.recipe, parameters(tensors, config)
    facts: dict[str, object] = {
        "Source": plan.checkpoint.name,
        "Experts per MoE layer": f"{plan.experts} instead of {plan.model.num_experts}, {plan.top_k} active per token",
        "Copies by": f"{recipe.utility or recipe.utility_from}, {recipe.allocation}, at most {recipe.cap} of an expert",
        "Duplicates": f"experts {recipe.expert_op}, router {recipe.router_op}, noise {recipe.delta:g}",
        "Routing": recipe.routing,
        "Parameters": f"{total:,}, {active:,} active per token",
        "Before training": f"{promise.code}: {promise.text}",
    }
    return model_card(
        title=f"{plan.checkpoint.name} with {plan.experts} experts",
        bases=[plan.checkpoint.name],
        tags=["moe", "expert-upcycling"],
        command=command(plan),
        facts=facts,
    )


def command(plan: ExpandPlan) -> list[str]:
    """The command line that makes the same checkpoint in a folder OUT, nothing left to defaults."""
    flags = {name: getattr(plan.recipe, name) for name in plan.recipe.__dataclass_fields__ if name != "checkpoint"}
    nonfinite = ["--allow-nonfinite"] if flags.pop("allow_nonfinite") else []
    calibration = [f"--calibration={path}" for path in flags.pop("calibration")]
    options = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items() if value is not None]
    return ["moesaic", "expand", plan.recipe.checkpoint, "OUT", *calibration, *options, *nonfinite]
