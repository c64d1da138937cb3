"""One MoE layer in memory: the reference that the streaming conversion must reproduce, for tests and for `verify`."""

from jaxtyping import Float
from torch import Tensor

from moesaic.upcycling.choices import LayerSpec
from moesaic.upcycling.experts import ExpertWeights, MoELayer
from moesaic.upcycling.method import LayerSources, build_expert
from moesaic.upcycling.randomness import generator
from moesaic.upcycling.router_init import ROUTER_INITS, RouterSpec


def router_rows(spec: LayerSpec, layer: int) -> Float[Tensor, "E D"]:
    """The router of layer `layer`, (E, D) in float32."""
    rows = RouterSpec(experts=spec.experts, hidden=spec.expert.hidden, shards=spec.shards, std=spec.router_std)
    return ROUTER_INITS[spec.router_init](rows, generator(spec.seed, spec.method.name, layer, "router"))


def scaled_expert(spec: LayerSpec, layer: int, expert: int, sources: LayerSources) -> ExpertWeights:
    """Routed expert `expert` of layer `layer` with its factors applied, in the sources' compute precision."""
    stream = generator(spec.seed, spec.method.name, layer, "expert", expert)
    made = build_expert(spec.method, expert, sources, spec.expert, stream)
    return made.scale(gate_up=spec.factors.gate_up, down=spec.factors.down)


def build_layer(spec: LayerSpec, layer: int, sources: LayerSources, whole_base: ExpertWeights | None) -> MoELayer:
    """Layer `layer` from its sources; `whole_base` is the base's uncut FFN, needed only with shared experts."""
    shared = None
    if spec.shared_experts:
        assert whole_base is not None
        one = whole_base.scale(gate_up=1.0, down=spec.factors.shared_down)
        shared = ExpertWeights.concatenate([one] * spec.shared_experts)
    return MoELayer(
        router_ED=router_rows(spec, layer),
        experts=ExpertWeights.stack([scaled_expert(spec, layer, e, sources) for e in range(spec.experts)]),
        shared=shared,
        groups=spec.groups,
    )
