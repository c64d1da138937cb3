"""Where a family's experts are stored, found by giving every number of a tiny model a value of its own and having
transformers say what it would write. Needs torch and transformers.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from moesaic.common.errors import MoesaicError
from moesaic.families.family import Places
from moesaic.families.moe import REORDERED
from moesaic.families.shrink import EXPERTS

LAYER = re.compile(r"^(?P<before>.*?layers\.)(?P<layer>\d+)\.(?P<rest>.+)$")
"""A name in a decoder layer: its number, and what comes after it."""

Code = Mapping[str, Tensor]
"""Name -> tensor of numbers that are all different, over all names."""


def read_places(model: Any, axes: Mapping[str, int], roles: Mapping[str, str], about: str) -> tuple[Places, bool]:
    """Where the slots are, in transformers' own names and in those of its checkpoints; whether layers differ in nothing
    but their FFN.

    Every number of the model gets one of its own, and is looked for in what would be written.
    """
    from transformers.core_model_loading import revert_weight_conversion

    own, start = {}, 0
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            own[name] = torch.arange(start, start + tensor.numel(), dtype=torch.float32).reshape(tensor.shape)
            start += tensor.numel()
    assert start < 2**24, "fp32 has no more whole numbers"
    written = revert_weight_conversion(model, dict(own))
    reader = _Reader(own, axes, roles, about)
    for code in (own, written):
        for name, tensor in code.items():
            reader.read(name, tensor.contiguous())
    shared = _shared(own, written, axes)
    places = Places(stacked=reader.stacked, own=reader.single, shared=shared)
    return places, _is_uniform(written)


class _Reader:
    """Finds where the slots of the experts are in tensors of numbers that are all different."""

    def __init__(self, own: Code, axes: Mapping[str, int], roles: Mapping[str, str], about: str) -> None:
        self.stacked: dict[str, tuple[str, int]] = {}
        self.single: dict[str, str] = {}
        self._names = list(own)
        self._own, self._axes, self._roles, self._about = own, axes, roles, about
        self._starts = torch.tensor([float(own[name].reshape(-1)[0]) for name in own])

    def read(self, name: str, tensor: Tensor) -> None:
        """Note the place of a tensor that has slots of experts."""
        source = int(torch.bucketize(tensor.reshape(-1)[0], self._starts, right=True)) - 1
        parameter = self._names[source]
        if parameter not in self._axes:
            return
        place, home = LAYER.match(name), LAYER.match(parameter)
        if place is None or home is None or place["layer"] != home["layer"]:
            raise MoesaicError(f"{self._about}: its checkpoints number layers in another way than its model ({name})")
        whole, axis = self._own[parameter], self._axes[parameter]
        number_E = whole.movedim(axis, 0).reshape(EXPERTS, -1)
        expert = ((tensor - self._starts[source]).long() // whole.stride(axis)) % EXPERTS
        role = _part(self._roles[home["rest"]], tensor, expert, number_E)
        slots = [a for a in range(tensor.ndim) if torch.equal(expert, _along(tensor, a))]
        if slots and tensor.shape[slots[0]] == EXPERTS:
            self.stacked[place["rest"]] = (role, slots[0])
        elif expert.unique().numel() == 1:
            mark = str(int(expert.reshape(-1)[0]))
            parts = place["rest"].split(".")
            if mark not in parts:
                raise MoesaicError(f"{self._about}: {name} belongs to expert {mark}, which its name does not say")
            parts[parts.index(mark)] = "{expert}"
            self.single[".".join(parts)] = role
        else:
            raise MoesaicError(f"{self._about}: its checkpoints have no slot per expert in {name}")


def _part(role: str, tensor: Tensor, expert: Tensor, number_E: Tensor) -> str:
    """`role`, or that of the half that the tensor has; marked where its numbers are in another order."""
    first = int(expert.reshape(-1)[0])
    slot, whole = tensor[expert == first], number_E[first]
    if torch.equal(slot, whole):
        return role
    halves = {"gate_up": ("gate", "up"), "gate_up_bias": ("gate_bias", "up_bias")}.get(role, ())
    for half, numbers in zip(halves, whole.chunk(2), strict=False):
        if torch.equal(slot, numbers):
            return half
    return role + REORDERED


def _along(tensor: Tensor, axis: int) -> Tensor:
    """For each number of a tensor, its place along an axis."""
    shape = [1] * tensor.ndim
    shape[axis] = tensor.shape[axis]
    return torch.arange(tensor.shape[axis]).reshape(shape).expand(tensor.shape)


def _shared(own: Code, written: Code, axes: Mapping[str, int]) -> tuple[str, ...]:
    """Beginnings of the names of shared experts, which stand beside the routed ones."""
    marks = re.compile(r"^(?P<start>(?:.+\.)?(?:shared_experts?|shared_mlp|share_expert)(?:_gate)?)\.")
    rests = [match["rest"] for name in (*own, *written) if (match := LAYER.match(name)) and name not in axes]
    return tuple(sorted({match["start"] for rest in rests if (match := marks.match(rest))}))


def _is_uniform(written: Code) -> bool:
    """Whether all layers have the same tensors of attention and norms."""
    by_layer: dict[str, set[str]] = {}
    for name in written:
        if (match := LAYER.match(name)) and re.match(r"self_attn\.|\w*norm\w*\.", match["rest"]):
            by_layer.setdefault(match["layer"], set()).add(match["rest"])
    return len({frozenset(rests) for rests in by_layer.values()}) == 1
