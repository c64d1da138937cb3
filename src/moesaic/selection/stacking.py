"""The experts of one layer at a time, read from a checkpoint right into the stacked parameters of a model's module."""

import os
from typing import Any

import torch
from torch import Tensor, nn

from moesaic.checkpoint.pio import explained, read_into
from moesaic.checkpoint.reader import TORCH_DTYPES, read_tensor
from moesaic.checkpoint.source import Checkpoint
from moesaic.common.errors import MoesaicError
from moesaic.families.moe import MoELayerTensors
from moesaic.selection.slots import Slot, expert_slots

_PARAMETERS = {
    "gate_up_proj": "gate_up",
    "down_proj": "down",
    "gate_up_proj_bias": "gate_up_bias",
    "down_proj_bias": "down_bias",
}
"""Parameter of an experts module -> role of its slots."""


class ExpertStacks:
    """Memory for the experts of one layer, used again for the next: nothing is in memory twice, nothing is freed."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._memory: dict[str, Tensor] = {}

    def fill(self, experts: Any, layer: MoELayerTensors) -> None:
        """Give an experts module its weights; what another layer's module was given before is lost."""
        for name, role in _PARAMETERS.items():
            parameter = getattr(experts, name, None)
            if parameter is None:
                continue
            stack = self._memory.get(name)
            if stack is None or (stack.shape, stack.dtype) != (parameter.shape, parameter.dtype):
                stack = self._memory[name] = torch.empty(parameter.shape, dtype=parameter.dtype)
            for expert, target in enumerate(stack):
                self._fill_one(target, layer, role, expert)
            setattr(experts, name, nn.Parameter(stack, requires_grad=False))

    def _fill_one(self, target: Tensor, layer: MoELayerTensors, role: str, expert: int) -> None:
        slots = expert_slots(self._checkpoint, layer, role, expert) or []
        values_N, start = target.view(-1), 0
        if sum(slot.info.shape[0] for slot in slots) != len(values_N):
            raise MoesaicError(
                f"{self._checkpoint.name}: expert {expert} of layer {layer.layer} does not have the "
                f"{list(target.shape)} values for {role} that its config.json says"
            )
        for slot in slots:
            stop = start + slot.info.shape[0]
            _read(slot, values_N[start:stop])
            start = stop


def _read(slot: Slot, values_N: Tensor) -> None:
    if TORCH_DTYPES.get(slot.source.dtype) != values_N.dtype:
        values_N.copy_(read_tensor(slot.info))
        return
    info = slot.info
    with explained(info.file):
        fd = os.open(info.file, os.O_RDONLY)
    try:
        read_into(fd, values_N.view(torch.uint8).numpy().data, info.offset, info.file)
    finally:
        os.close(fd)
