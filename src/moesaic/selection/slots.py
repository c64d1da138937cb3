"""The numbers of one expert in one tensor, whichever on-disk layout a checkpoint has. Torch-free."""

from math import prod

from moesaic.checkpoint.lazy import Lazy, concat, stored
from moesaic.checkpoint.source import Checkpoint
from moesaic.families.moe import ExpertTensor, MoELayerTensors

_FUSED = {"gate_up": ("gate", "up"), "gate_up_bias": ("gate_bias", "up_bias")}
"""Role of a stacked tensor -> roles of its halves where each is apart: rows of the gate first, then of up."""


def expert_part(checkpoint: Checkpoint, layer: MoELayerTensors, role: str, expert: int) -> Lazy | None:
    """What `checkpoint` has for `role` of one expert, in one dimension, in the order of `role`; None if nothing."""
    tensors = {tensor.role: tensor for tensor in layer.expert_tensors}
    if role in tensors:
        return _slot(checkpoint, tensors[role], expert)
    for fused, halves in _FUSED.items():
        if role == fused and tensors.keys() >= set(halves):
            return concat([_slot(checkpoint, tensors[half], expert) for half in halves])
        if role in halves and fused in tensors:
            both, number = _slot(checkpoint, tensors[fused], expert), halves.index(role)
            return both.rows(number * both.size // 2, (number + 1) * both.size // 2)
    return None


def _slot(checkpoint: Checkpoint, tensor: ExpertTensor, expert: int) -> Lazy:
    if tensor.axis is None:
        own = stored(checkpoint.tensors[tensor.name.format(expert=expert)])
        return own.reshape(own.size)
    all_of_them = stored(checkpoint.tensors[tensor.name])
    before, count = all_of_them.shape[: tensor.axis], all_of_them.shape[tensor.axis]
    assert prod(before) == 1, f"{tensor.name}: a slot is not in one piece"
    return all_of_them.reshape(count, all_of_them.size // count).index(expert)
