"""From a plan and the copies per layer to the new checkpoint's tensors, config, record and card."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moesaic.checkpoint import record as card
from moesaic.checkpoint.pieces import ComputedTensor, NewTensor, Put, Work, slot_tensor, whole
from moesaic.checkpoint.reader import TORCH_DTYPES, read_tensor
from moesaic.checkpoint.record import original_experts
from moesaic.checkpoint.rewrite import Rewrite
from moesaic.checkpoint.writer import OutputTensor, parse_size
from moesaic.common.seeds import generator
from moesaic.expansion.config import grown_config
from moesaic.expansion.layers import LayerFile
from moesaic.expansion.operators import EXPERT_OPERATORS, ROUTER_OPERATORS
from moesaic.expansion.resolve import ExpandPlan
from moesaic.expansion.router import duplicate_noise, duplicates_of, grown_rows, zero_sum_noise
from moesaic.expansion.statement import Statement, statement
from moesaic.families.counting import count_shapes
from moesaic.families.moe import ExpertTensor, MoELayerTensors
from moesaic.selection.rules import cut_routing

Sources = Mapping[int, Sequence[int]]
"""MoE layer -> the source of each expert of the result."""


def build(plan: ExpandPlan, copies: Mapping[int, Sequence[int]], texts: Mapping[str, str]) -> Rewrite:
    """Everything about the result, ready to be written; `texts` are further small files."""
    sources = {layer: plan.sources(list(numbers)) for layer, numbers in copies.items()}
    tensors = _tensors(plan, sources)
    promise = statement(plan)
    config = grown_config(plan, sources)
    return Rewrite(
        verb="expand",
        sources=(("source", plan.checkpoint),),
        tensors=tuple(tensors),
        work=tuple(_expert_work(plan, sources)),
        config=config,
        recipe=plan.recipe,
        seed=plan.recipe.seed,
        card=_card(plan, promise, tensors, config),
        record=_record(plan, copies, sources, promise),
        texts=texts,
        shard_size=parse_size(plan.recipe.shard_size),
        allow_nonfinite=plan.recipe.allow_nonfinite,
    )


def _tensors(plan: ExpandPlan, sources: Sources) -> list[NewTensor]:
    """All tensors, those of a grown layer where its first one was."""
    layer_of = {
        name: layer
        for layer in plan.model.layers
        for tensor in layer.expert_tensors
        for name in tensor.names(layer.num_experts)
    }
    if plan.conversion is not None:
        layer_of |= {name: layer for layer in plan.model.layers for name in layer.shared}
    made: list[NewTensor] = []
    done: set[int] = set()
    for name, info in plan.checkpoint.tensors.items():
        layer = layer_of.get(name)
        if layer is None:
            made.append(whole(info))
        elif layer.layer not in done:
            done.add(layer.layer)
            made += _grown_layer(plan, layer, sources[layer.layer])
    return made


def _grown_layer(plan: ExpandPlan, layer: MoELayerTensors, sources: Sequence[int]) -> list[NewTensor]:
    file = layer_file(plan, layer)
    gaps = _gaps(plan, sources)
    experts = file.grown(sources, gaps)
    if plan.conversion is not None:
        experts = file.stacked(_our_prefix(layer) + "experts.", sources, gaps)
        experts += _our_shared_expert(plan, layer)
    router = [
        _router_tensor(plan, layer, tensor, sources) for tensor in layer.expert_tensors if tensor not in file.experts
    ]
    return [*router, *experts]


def layer_file(plan: ExpandPlan, layer: MoELayerTensors) -> LayerFile:
    """The layer's experts in the source."""
    return LayerFile(layer=layer, tensors=plan.checkpoint.tensors, interleaved=plan.model.family.interleaved)


def _our_shared_expert(plan: ExpandPlan, layer: MoELayerTensors) -> list[NewTensor]:
    """The shared experts of a converted family as ours, gate and up apart; nothing where it has none."""
    if not layer.shared:
        return []
    stored = {name.split(".")[-2]: plan.checkpoint.tensors[name] for name in layer.shared}
    gate_up, prefix = stored["input_linear"], f"{_our_prefix(layer)}shared_expert."
    width = gate_up.shape[0] // 2
    return [
        slot_tensor(f"{prefix}gate_proj.weight", [(gate_up, row) for row in range(width)]),
        slot_tensor(f"{prefix}up_proj.weight", [(gate_up, row) for row in range(width, 2 * width)]),
        whole(stored["output_linear"], f"{prefix}down_proj.weight"),
    ]


def _our_prefix(layer: MoELayerTensors) -> str:
    return f"model.layers.{layer.layer}.mlp."


def _gaps(plan: ExpandPlan, sources: Sequence[int]) -> list[bool]:
    """The experts that are computed: duplicates, unless they are plain copies."""
    if plan.recipe.expert_op == "copy":
        return [False] * len(sources)
    return duplicates_of(sources)


# --- router -----------------------------------------------------------------------------------------------------------


def _router_tensor(plan: ExpandPlan, layer: MoELayerTensors, tensor: ExpertTensor, sources: Sequence[int]) -> NewTensor:
    """The router's rows, its bias or the selection bias of a grown layer."""
    info = plan.checkpoint.tensors[tensor.name]
    name = f"{_our_prefix(layer)}gate.weight" if plan.conversion is not None else tensor.name
    assert tensor.axis is not None
    noisy = plan.recipe.delta > 0 and tensor.role == _noisy_role(plan, layer)
    if not noisy and (tensor.role != "router" or plan.recipe.router_op in ("copy", "bias_only")):
        return slot_tensor(name, [(info, source) for source in sources], axis=tensor.axis)
    shape = list(info.shape)
    shape[tensor.axis] = len(sources)
    return ComputedTensor(
        output=OutputTensor(name=name, dtype=info.dtype, shape=tuple(shape)),
        sources=(info,),
        compute=partial(_computed_router, plan, layer.layer, tensor, sources, noisy),
    )


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
                stream = generator(plan.recipe.seed, "expand", layer.layer, "recorded_bias", "noise")
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


def _computed_router(plan: ExpandPlan, layer: int, tensor: ExpertTensor, sources: Sequence[int], noisy: bool) -> Tensor:
    info = plan.checkpoint.tensors[tensor.name]
    stored = read_tensor(info)
    assert tensor.axis is not None
    slots = stored.to(torch.promote_types(stored.dtype, torch.float32)).movedim(tensor.axis, 0)
    seed = plan.recipe.seed
    if tensor.role == "router":
        stream = generator(seed, "expand", layer, tensor.role, "rows")
        grown = grown_rows(slots, sources, ROUTER_OPERATORS[plan.recipe.router_op], stream)
    else:
        grown = slots[list(sources)]
    if noisy:
        draw = zero_sum_noise if plan.exclusive else duplicate_noise
        stream = generator(seed, "expand", layer, tensor.role, "noise")
        grown = grown + draw(sources, slots.shape[1:], plan.recipe.delta, stream).to(grown.dtype)
    return grown.movedim(0, tensor.axis).to(TORCH_DTYPES[info.dtype])


# --- experts that are no copies ---------------------------------------------------------------------------------------


def _expert_work(plan: ExpandPlan, sources: Sources) -> list[Work]:
    """One computation per duplicate; none where duplicates are plain copies."""
    work = []
    for layer in plan.model.layers:
        file = layer_file(plan, layer)
        used = tuple(info for tensor in file.experts for info in file.infos(tensor))
        gaps = _gaps(plan, sources[layer.layer])
        work += [
            Work(sources=used, run=partial(_compute_expert, plan, layer, number, sources[layer.layer][number]))
            for number, empty in enumerate(gaps)
            if empty
        ]
    return work


def _compute_expert(plan: ExpandPlan, layer: MoELayerTensors, number: int, source: int, put: Put) -> None:
    file = layer_file(plan, layer)
    stream = generator(plan.recipe.seed, "expand", layer.layer, "expert", number)
    other = source
    if plan.model.num_experts > 1:
        other = int(torch.randint(plan.model.num_experts - 1, (1,), generator=stream))
        other += other >= source
    made = EXPERT_OPERATORS[plan.recipe.expert_op](file.read(source), file.read(other), stream)
    if plan.conversion is None:
        file.put(put, number, made)
    else:
        file.put_stacked(put, _our_prefix(layer) + "experts.", number, made)


# --- words ------------------------------------------------------------------------------------------------------------


def parameters(tensors: Sequence[NewTensor], config: Mapping[str, Any]) -> tuple[int, int]:
    """Total and active parameters of the result."""
    counted = count_shapes({tensor.output.name: tensor.output.shape for tensor in tensors}, config)
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


def _card(plan: ExpandPlan, promise: Statement, tensors: Sequence[NewTensor], config: Mapping[str, Any]) -> str:
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
    return card.model_card(
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
