"""The MoE layers of a checkpoint as matrices: router, experts, shared experts, whatever their layout. Torch-free."""

from collections.abc import Mapping
from dataclasses import dataclass

from moesaic.checkpoint.headers import TensorInfo
from moesaic.exporting.layouts import Expert
from moesaic.exporting.rows import Rows, joined, part, slot, stored
from moesaic.families.moe import ExpertTensor, MoELayerTensors


@dataclass(frozen=True, kw_only=True)
class LayerParts:
    """One MoE layer: router (E, D), its E experts, and the shared experts as one FFN (None: there are none)."""

    layer: int
    router: Rows
    experts: tuple[Expert, ...]
    shared: Expert | None = None


def layer_parts(tensors: Mapping[str, TensorInfo], layer: MoELayerTensors) -> LayerParts:
    """Router and experts of a detected layer; stacked matrices have gate rows first. Shared experts are left out."""
    roles = {one.role: one for one in layer.expert_tensors}
    count = layer.num_experts

    def matrices(role: str) -> list[Rows]:
        found: ExpertTensor = roles[role]
        infos = [tensors[name] for name in found.names(count)]
        return [stored(info) for info in infos] if found.axis is None else [slot(infos[0], e) for e in range(count)]

    if "gate_up" in roles:
        both = matrices("gate_up")
        half = both[0].shape[0] // 2
        gates, ups = [part(one, 0, half) for one in both], [part(one, half, 2 * half) for one in both]
    else:
        gates, ups = matrices("gate"), matrices("up")
    experts = tuple(
        Expert(gate=gate, up=up, down=down) for gate, up, down in zip(gates, ups, matrices("down"), strict=True)
    )
    return LayerParts(layer=layer.layer, router=stored(tensors[roles["router"].name]), experts=experts)


def gate_up(expert: Expert) -> Rows:
    """Gate rows, then up rows."""
    return joined([expert.gate, expert.up])
