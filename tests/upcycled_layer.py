"""One MoE layer in memory, of the same functions whose expressions a conversion streams."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from moesaic.families.experts import ExpertWeights
from moesaic.upcycling.choices import LayerSpec
from moesaic.upcycling.layers import routed_experts, router_rows, shared_experts
from moesaic.upcycling.plan import BASE


@dataclass(frozen=True, kw_only=True)
class MoELayer:
    """One mixture-of-experts layer in memory: `y = sum_k w_k expert_k(x) + shared(x)`."""

    router_ED: Float[Tensor, "E D"]
    experts: ExpertWeights[Tensor]
    """Routed experts, stacked."""
    shared: ExpertWeights[Tensor] | None
    """Shared experts, concatenated to one FFN of width S*F."""
    groups: tuple[int, ...] | None
    """Group of each expert for `one_per_group` routing; None for plain top-k."""
    scaling: float
    """Factor on the routing weights, in w_k already."""


def build_layer(spec: LayerSpec, layer: int, ffns: Sequence[ExpertWeights[Tensor]]) -> MoELayer:
    """Layer `layer` in memory; `ffns` are the base's FFN and the specialists'."""
    return MoELayer(
        router_ED=router_rows(spec, layer),
        experts=ExpertWeights.stack(routed_experts(spec, layer, ffns)),
        shared=shared_experts(spec, ffns[BASE]),
        groups=spec.groups,
        scaling=spec.factors.weights,
    )
