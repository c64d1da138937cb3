"""The tensors of `merge-back`: a full model's, with the slots of some experts from a subset."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from moesaic.checkpoint.headers import TensorInfo
from moesaic.checkpoint.pieces import CopiedTensor, Put, Run, Work, whole
from moesaic.checkpoint.reader import TORCH_DTYPES, read_tensor
from moesaic.checkpoint.source import Checkpoint
from moesaic.checkpoint.writer import OutputTensor
from moesaic.common.errors import MoesaicError
from moesaic.families.counting import beyond_depth, layer_of
from moesaic.families.moe import ROUTER_ROLES, ExpertTensor, MoELayerTensors, MoEModel
from moesaic.selection.lineage import Ids
from moesaic.selection.slots import Slot, expert_slots, whole_slot

Piece = tuple[Sequence[Slot], Sequence[Slot] | None]
"""Slots of the full model, and those of the subset that replace them, if any."""
Made = tuple[CopiedTensor, tuple[Work, ...]]
"""A tensor, and the work that fills its gaps."""


@dataclass(frozen=True, kw_only=True)
class Merge:
    """Two checkpoints, and how a value of both becomes one."""

    full: Checkpoint
    subset: Checkpoint
    average: float | None

    def tensor(self, target: TensorInfo, pieces: Sequence[Piece]) -> Made:
        """`target` from consecutive pieces: the slots of the full model, and those of the subset that replace them.

        Pieces that are only copied are; those that are averaged or cast are gaps, each filled by work of its own.
        """
        runs: list[Run] = []
        work: list[Work] = []
        start = 0
        for ours, theirs in pieces:
            number = _elements(ours)
            if theirs is not None and _elements(theirs) != number:
                raise MoesaicError(
                    f"{self.subset.name}: {theirs[0].source.name} has another shape than {target.name} of "
                    f"{self.full.name}; only the number of experts may differ"
                )
            if theirs is None or (self.average is None and all(slot.source.dtype == target.dtype for slot in theirs)):
                runs += [slot.run for slot in (ours if theirs is None else theirs)]
            else:
                runs.append(Run(source=None, start=0, nbytes=sum(slot.nbytes for slot in ours)))
                sources = tuple(slot.source for slot in (*ours, *theirs))
                work.append(Work(sources=sources, run=_mixing(target, start, ours, theirs, self.average)))
            start += number
        output = OutputTensor(name=target.name, dtype=target.dtype, shape=target.shape)
        return CopiedTensor(output=output, runs=tuple(runs)), tuple(work)

    def whole(self, target: TensorInfo) -> Made:
        """A tensor that both have under one name."""
        theirs = self.subset.tensors.get(target.name)
        if theirs is None or theirs.shape != target.shape:
            state = "is missing" if theirs is None else f"has shape {list(theirs.shape)}, not {list(target.shape)}"
            raise MoesaicError(f"{self.subset.name}: {target.name} {state}; leave it out of --with")
        return self.tensor(target, [([whole_slot(target)], [whole_slot(theirs)])])


def _elements(slots: Sequence[Slot]) -> int:
    return sum(slot.info.shape[0] for slot in slots)


def _mixing(
    target: TensorInfo, start: int, ours: Sequence[Slot], theirs: Sequence[Slot], average: float | None
) -> Callable[[Put], None]:
    """The work that writes one piece of `target`: in float32 (float64 for float64), rounded once.

    As `torch.lerp` does it: exact at both ends, and the mean of equal values is that value.
    """

    def work(put: Put) -> None:
        dtype = TORCH_DTYPES[target.dtype]
        values = torch.cat([read_tensor(slot.info) for slot in theirs])
        if average is not None:
            wide = torch.promote_types(torch.promote_types(dtype, values.dtype), torch.float32)
            full = torch.cat([read_tensor(slot.info) for slot in ours]).to(wide)
            values = torch.lerp(full, values.to(wide), average)
        put(target.name, start, values.to(dtype))

    return work


def merged_tensors(
    merge: Merge, full: MoEModel, subset: MoEModel, ids: Ids, parts: Sequence[str]
) -> tuple[list[CopiedTensor], list[Work]]:
    """All tensors of the result, in the order of the full model, and the work that fills their gaps."""
    made: dict[str, Made] = {}
    experts: set[str] = set()
    shared: set[str] = set()
    for layer, cut, kept in zip(full.layers, subset.layers, ids, strict=True):
        shared.update(layer.shared)
        for tensor in layer.expert_tensors:
            experts.update(tensor.names(layer.num_experts))
            if tensor.role not in ROUTER_ROLES or "router" in parts:
                made.update(_expert_tensors(merge, tensor, layer, cut, kept))
    for name, info in merge.full.tensors.items():
        part = "shared" if name in shared else "other"
        stored_only = beyond_depth(merge.full.config, layer_of(name))
        if name not in experts and part in parts and not stored_only:
            made[name] = merge.whole(info)
    tensors = [made[name][0] if name in made else whole(info) for name, info in merge.full.tensors.items()]
    return tensors, [one for _, work in made.values() for one in work]


def _expert_tensors(
    merge: Merge, tensor: ExpertTensor, layer: MoELayerTensors, cut: MoELayerTensors, kept: Sequence[int]
) -> dict[str, Made]:
    """The tensors of one role in one layer, with the kept experts' slots from the subset."""
    place = {expert: number for number, expert in enumerate(kept)}
    pieces = []
    for expert in range(layer.num_experts):
        ours = expert_slots(merge.full, layer, tensor.role, expert)
        theirs = expert_slots(merge.subset, cut, tensor.role, place[expert]) if expert in place else None
        assert ours is not None
        if expert in place and theirs is None:
            raise MoesaicError(f"{merge.subset.name}: layer {cut.layer} has no tensor for {tensor.role} of the experts")
        pieces.append((ours, theirs))
    if tensor.axis is not None:
        return {tensor.name: merge.tensor(merge.full.tensors[tensor.name], pieces)}
    names = tensor.names(layer.num_experts)
    return {names[expert]: merge.tensor(merge.full.tensors[names[expert]], [pieces[expert]]) for expert in place}
