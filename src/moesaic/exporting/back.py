"""`moesaic_<family>` written as the family itself: with as many groups as experts, or all copies of an expert active.

Where every group has m members that are equal, a token's K groups are m * K experts that have together the weight that
the group had (docs/statements.md, E1). No torch but for the comparison of the copies.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from moesaic.checkpoint.lazy import Lazy, stored
from moesaic.checkpoint.source import Checkpoint
from moesaic.common.errors import MoesaicError
from moesaic.families.family import native_type
from moesaic.families.identity import group_count
from moesaic.families.moe import TOP_K_ALIASES, ExpertTensor, MoEModel
from moesaic.routing.subset import own_groups

_OURS = ("routing_rule", "expert_groups", "group_score", "auto_map")
"""Keys of config.json that only our routers read."""


def back_to_family(checkpoint: Checkpoint, model: MoEModel) -> tuple[dict[str, Lazy], dict[str, Any]]:
    """Tensors and config.json of the family, computing what the checkpoint does.

    Raises:
        MoesaicError: groups of different sizes, copies that differ, or a family in which m copies count otherwise.
    """
    members = _members(checkpoint, model)
    times = len(members[0])
    if times > 1:
        _refuse_inexact(checkpoint, model, members)
    # The first of every group, then the second of every group: so groups of the family's own are copied as a whole.
    orders = [[expert for column in columns for expert in column] for columns in members]
    made: dict[str, Lazy] = {}
    taken: set[str] = set()
    for layer, order in zip(model.layers, orders, strict=True):
        for tensor in layer.expert_tensors:
            taken.update(tensor.names(layer.num_experts))
            made |= _reordered(checkpoint, tensor, order)
    others = {name: stored(info) for name, info in checkpoint.tensors.items() if name not in taken}
    return made | others, _config(checkpoint, model, times)


def _members(checkpoint: Checkpoint, model: MoEModel) -> list[list[list[int]]]:
    """Of every MoE layer, the first member of each group, the second of each, ..."""
    count = len(model.layers)
    rows = own_groups(checkpoint.config, count) or [list(range(model.num_experts))] * count
    found = []
    for layer, ids in zip(model.layers, rows, strict=True):
        groups = [[expert for expert, group in enumerate(ids) if group == one] for one in sorted(set(ids))]
        if len({len(group) for group in groups}) > 1 or len(groups[0]) * len(groups) != model.num_experts:
            raise MoesaicError(
                f"{checkpoint.name}: layer {layer.layer} has groups of different sizes, and plain top-k cannot use all "
                "copies of an expert then; export writes the family where every expert has as many copies"
            )
        found.append([list(column) for column in zip(*groups, strict=True)])
    if len({len(columns) for columns in found}) > 1:
        raise MoesaicError(f"{checkpoint.name}: its layers have different numbers of copies, which no family can say")
    return found


def _refuse_inexact(checkpoint: Checkpoint, model: MoEModel, members: Sequence[Sequence[Sequence[int]]]) -> None:
    if not model.family.adds_up:
        raise MoesaicError(
            f"{checkpoint.name}: in {native_type(checkpoint.config['model_type'])} m active copies of an expert have "
            "together another weight than the expert had"
        )
    for layer, columns in zip(model.layers, members, strict=True):
        for tensor in layer.expert_tensors:
            slots = _slots(checkpoint, tensor, layer.num_experts)
            for first, second in pairwise(columns):
                for one, other in zip(first, second, strict=True):
                    if not torch.equal(slots[one].read(), slots[other].read()):
                        raise MoesaicError(
                            f"{checkpoint.name}: experts {one} and {other} of layer {layer.layer} are copies that "
                            f"differ ({tensor.name.format(expert=one)}), so using all of them would be another model; "
                            "keep the routing (--to moesaic)"
                        )


def _slots(checkpoint: Checkpoint, tensor: ExpertTensor, experts: int) -> list[Lazy]:
    if tensor.axis is None:
        return [stored(checkpoint.tensors[name]) for name in tensor.names(experts)]
    whole = stored(checkpoint.tensors[tensor.name])
    return [whole.take([expert], tensor.axis) for expert in range(experts)]


def _reordered(checkpoint: Checkpoint, tensor: ExpertTensor, order: Sequence[int]) -> dict[str, Lazy]:
    if tensor.axis is not None:
        return {tensor.name: stored(checkpoint.tensors[tensor.name]).take(order, tensor.axis)}
    names = tensor.names(len(order))
    return {name: stored(checkpoint.tensors[names[expert]]) for name, expert in zip(names, order, strict=True)}


def _config(checkpoint: Checkpoint, model: MoEModel, times: int) -> dict[str, Any]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    family, old = model.family, checkpoint.config
    native = native_type(old["model_type"])
    config = {key: value for key, value in old.items() if key not in _OURS}
    keys = {family.top_k_key, *(key for key in TOP_K_ALIASES if old.get(key) == model.top_k)}
    config |= dict.fromkeys(keys, model.top_k * times)
    if group_count(old, model) > 1 and family.group_keys is not None:
        config |= {key: old[key] * times for key in family.group_keys}
    if times > 1 and _shares_nothing(model, old):
        config[str(family.scaling_key)] = old[str(family.scaling_key)] / times
    return config | {"model_type": native, "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[native]]}


def _shares_nothing(model: MoEModel, config: Mapping[str, Any]) -> bool:
    """m copies have m times the weight of one: sigmoids that are not normalised."""
    return model.family.scoring == "sigmoid" and not model.family.normalises(config)
