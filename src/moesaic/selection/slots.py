"""The bytes of one expert in one tensor, whichever on-disk layout a checkpoint has. Torch-free."""

from dataclasses import dataclass
from math import prod

from moesaic.checkpoint.headers import DTYPE_BITS, TensorInfo
from moesaic.checkpoint.pieces import Run
from moesaic.checkpoint.source import Checkpoint
from moesaic.families.moe import ExpertTensor, MoELayerTensors

_HALVES = {
    "gate": ("gate_up", 0),
    "up": ("gate_up", 1),
    "gate_bias": ("gate_up_bias", 0),
    "up_bias": ("gate_up_bias", 1),
}
_FUSED = {"gate_up": ("gate", "up"), "gate_up_bias": ("gate_bias", "up_bias")}


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """`nbytes` consecutive bytes of a stored tensor, from its byte `start` on."""

    source: TensorInfo
    start: int
    nbytes: int

    @property
    def run(self) -> Run:
        """For tensors that are copied."""
        return Run(source=self.source, start=self.start, nbytes=self.nbytes)

    @property
    def info(self) -> TensorInfo:
        """The slot as a one-dimensional stored tensor of its own."""
        source = self.source
        return TensorInfo(
            name=source.name,
            dtype=source.dtype,
            shape=(self.nbytes * 8 // DTYPE_BITS[source.dtype],),
            file=source.file,
            offset=source.offset + self.start,
            nbytes=self.nbytes,
        )


def whole_slot(source: TensorInfo) -> Slot:
    """All of a stored tensor."""
    return Slot(source=source, start=0, nbytes=source.nbytes)


def expert_slots(checkpoint: Checkpoint, layer: MoELayerTensors, role: str, expert: int) -> list[Slot] | None:
    """Where `checkpoint` has the values of `role` of one expert, in the order that `role` has them; None if nowhere.

    Stacked gate_up rows are gate first, then up, wherever gate and up exist apart as well.
    """
    tensors = {tensor.role: tensor for tensor in layer.expert_tensors}
    if role in tensors:
        return [_slot(checkpoint, tensors[role], expert)]
    if role in _HALVES and _HALVES[role][0] in tensors:
        fused, half = _HALVES[role]
        slot = _slot(checkpoint, tensors[fused], expert)
        size = slot.nbytes // 2
        return [Slot(source=slot.source, start=slot.start + half * size, nbytes=size)]
    if role in _FUSED and all(part in tensors for part in _FUSED[role]):
        return [_slot(checkpoint, tensors[part], expert) for part in _FUSED[role]]
    return None


def _slot(checkpoint: Checkpoint, tensor: ExpertTensor, expert: int) -> Slot:
    if tensor.axis is None:
        info = checkpoint.tensors[tensor.name.format(expert=expert)]
        return whole_slot(info)
    info = checkpoint.tensors[tensor.name]
    assert prod(info.shape[: tensor.axis]) == 1, f"{info.name}: a slot is not in one piece"
    size = info.nbytes // info.shape[tensor.axis]
    return Slot(source=info, start=expert * size, nbytes=size)
