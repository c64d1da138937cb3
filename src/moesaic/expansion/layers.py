"""The experts of one MoE layer in and out of the tensors of a file: which spelling, stacked or one by one.

E experts, D hidden, I intermediate. Stacked matrices of interleaved families (GPT-OSS) are stored (E, D, 2I) and
(E, I, D), gate and up alternating.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from moesaic.checkpoint.headers import TensorInfo
from moesaic.checkpoint.pieces import NewTensor, Put, concatenated, gap, slot_tensor, whole
from moesaic.checkpoint.reader import TORCH_DTYPES, read_tensor
from moesaic.families.experts import ExpertWeights
from moesaic.families.moe import ROUTER_ROLES, ExpertTensor, MoELayerTensors

_FIELDS = {
    "gate": "gate_ID",
    "up": "up_ID",
    "down": "down_DI",
    "gate_bias": "gate_bias_I",
    "up_bias": "up_bias_I",
    "down_bias": "down_bias_D",
}


@dataclass(frozen=True, kw_only=True)
class LayerFile:
    """Where the experts of a layer are in a checkpoint."""

    layer: MoELayerTensors
    tensors: Mapping[str, TensorInfo]
    """Of the whole checkpoint."""
    interleaved: bool

    @property
    def experts(self) -> tuple[ExpertTensor, ...]:
        """The tensors that are not the router's."""
        return tuple(tensor for tensor in self.layer.expert_tensors if tensor.role not in ROUTER_ROLES)

    def infos(self, tensor: ExpertTensor) -> list[TensorInfo]:
        """What is stored: one stacked tensor, or one per expert."""
        return [self.tensors[name] for name in tensor.names(self.layer.num_experts)]

    def read_slot(self, tensor: ExpertTensor, expert: int) -> Tensor:
        """One expert's part of a tensor, in the file's dtype."""
        infos = self.infos(tensor)
        if tensor.axis is None:
            return read_tensor(infos[expert])
        assert tensor.axis == 0, tensor.name
        return read_tensor(infos[0], expert, expert + 1)[0]

    def read(self, expert: int) -> ExpertWeights:
        """One expert, in float32 (in float64 where that is stored)."""
        parts: dict[str, Tensor] = {}
        for tensor in self.experts:
            values = self.read_slot(tensor, expert)
            values = values.to(torch.promote_types(values.dtype, torch.float32))
            parts |= split_role(tensor.role, values, interleaved=self.interleaved)
        return ExpertWeights(**{_FIELDS[role]: values.contiguous() for role, values in parts.items()})

    def grown(self, sources: Sequence[int], gaps: Sequence[bool]) -> list[NewTensor]:
        """The same tensors with the experts `sources`; where `gaps` says so, left to be computed."""
        made: list[NewTensor] = []
        for tensor in self.experts:
            infos = self.infos(tensor)
            chosen = list(zip(sources, gaps, strict=True))
            if tensor.axis is not None:
                picks = [None if empty else (infos[0], source) for source, empty in chosen]
                made.append(slot_tensor(tensor.name, picks, axis=tensor.axis))
                continue
            for number, (source, empty) in enumerate(chosen):
                name = tensor.name.format(expert=number)
                made.append(gap(infos[source], name) if empty else whole(infos[source], name))
        return made

    def put(self, put: Put, number: int, expert: ExpertWeights) -> None:
        """Write one expert into the gaps that `grown` left at place `number`."""
        for tensor in self.experts:
            info = self.infos(tensor)[0]
            values = join_role(tensor.role, expert, interleaved=self.interleaved).to(TORCH_DTYPES[info.dtype])
            if tensor.axis is None:
                put(tensor.name.format(expert=number), 0, values.contiguous())
            else:
                put(tensor.name, number * prod(info.shape[1:]), values.contiguous())

    def stacked(self, prefix: str, sources: Sequence[int], gaps: Sequence[bool]) -> list[NewTensor]:
        """The experts `sources` in our own layout below `prefix`: `gate_up_proj` and `down_proj`, gate rows first."""
        assert not self.interleaved
        made: list[NewTensor] = []
        for name, roles in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
            of_role = {tensor.role: tensor for tensor in self.experts}
            if "gate_up" in of_role:
                tensor = of_role["gate_up" if len(roles) > 1 else "down"]
                info = self.infos(tensor)[0]
                picks = [None if empty else (info, source) for source, empty in zip(sources, gaps, strict=True)]
                made.append(slot_tensor(prefix + name, picks))
                continue
            per_role = [self.infos(of_role[role]) for role in roles]
            rows, columns = per_role[0][0].shape
            parts = [
                infos[source].nbytes if empty else infos[source]
                for source, empty in zip(sources, gaps, strict=True)
                for infos in per_role
            ]
            made.append(concatenated(prefix + name, (len(sources), len(roles) * rows, columns), parts))
        return made

    def put_stacked(self, put: Put, prefix: str, number: int, expert: ExpertWeights) -> None:
        """Write one expert into the gaps that `stacked` left at place `number`."""
        dtype = TORCH_DTYPES[self.infos(self.experts[0])[0].dtype]
        for name, role in (("gate_up_proj", "gate_up"), ("down_proj", "down")):
            values = join_role(role, expert, interleaved=False).to(dtype).contiguous()
            put(prefix + name, number * values.numel(), values)


def split_role(role: str, values: Tensor, *, interleaved: bool) -> dict[str, Tensor]:
    """A stored slot as gate, up, down matrices and biases (out, in)."""
    if interleaved and values.ndim == 2:
        values = values.T
    if not role.startswith("gate_up"):
        return {role: values}
    suffix = role.removeprefix("gate_up")
    gate, up = (values[::2], values[1::2]) if interleaved else values.chunk(2)
    return {f"gate{suffix}": gate, f"up{suffix}": up}


def join_role(role: str, expert: ExpertWeights, *, interleaved: bool) -> Tensor:
    """The inverse of `split_role`: the slot of an expert as it is stored."""
    if role.startswith("gate_up"):
        suffix = role.removeprefix("gate_up")
        gate, up = (getattr(expert, _FIELDS[part + suffix]) for part in ("gate", "up"))
        values = torch.stack([gate, up], dim=1).flatten(0, 1) if interleaved else torch.cat([gate, up])
    else:
        values = getattr(expert, _FIELDS[role])
    return values.T if interleaved and values.ndim == 2 else values
