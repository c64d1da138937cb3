"""What a method is: a record of choices and one or two pure functions. Importing it imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from moesaic.upcycling.recipe import DropIndices, RouterInit, RoutingRule

if TYPE_CHECKING:
    import torch

    from moesaic.upcycling.experts import ExpertWeights

BASE = 0
"""Index of the base among the sources of a layer; specialist i is source i + 1."""


class Shard(NamedTuple):
    """Shard `number` of the dense FFN of source `source` (`BASE`, or 1 + the specialist's number)."""

    source: int
    number: int


@dataclass(frozen=True, kw_only=True)
class ExpertSpec:
    """What the functions of a method may depend on, besides the weights and the generator."""

    hidden: int
    """D."""
    intermediate: int
    """I, of one expert."""
    shards: int
    """M."""
    biases: bool
    """Whether the FFN's three linear maps have biases."""
    initializer_range: float
    """Standard deviation that the base's architecture initialises its matrices with."""
    drop_ratio: float
    drop_indices: DropIndices


class LayerSources(Protocol):
    """The dense FFNs of one layer, cut on demand: a method reads only the shards that it asks for."""

    @property
    def dtype(self) -> torch.dtype:
        """The precision that experts are made in: at least as wide as the sources' and the result's."""
        ...

    def shard(self, shard: Shard) -> ExpertWeights:
        """The shard in `dtype`, in memory of its own: the method may change it in place."""
        ...


MakeExpert = Callable[[int, "LayerSources", ExpertSpec, "torch.Generator"], "ExpertWeights"]


@dataclass(frozen=True, kw_only=True)
class Method:
    """One way to make experts from dense FFNs. Exactly one of `copies` and `make` is given."""

    name: str
    description: str
    """One sentence for people."""
    paper: str
    """Where it comes from: an address, or the name of a paper's baseline."""
    needs_specialists: bool
    """The experts come from N specialists (E = N*M) rather than from the base (E is free)."""
    cuts: bool
    """Whether M may be above 1."""
    default_shards: int
    whole_groups: bool
    """Whether E must be a multiple of M: every virtual group is complete."""
    default_routing: RoutingRule
    auto_router: Mapping[RoutingRule, RouterInit]
    """Per routing rule, the router initialisation that keeps the strongest statement, where its conditions hold."""
    scaled: bool
    """Whether `--scale` applies; experts from scratch keep the architecture's own standard deviation."""
    reinit: bool
    """Whether everything else may be drawn at random too (`--shared-weights reinit`)."""
    preserves: bool
    """Whether experts are unchanged shards, so that a statement about the result can hold at all."""
    settings: tuple[str, ...] = ()
    """Keys of the recipe that only this method uses; with the others they are refused."""
    copies: Callable[[int, int], Shard] | None = None
    """(expert, M) -> the shard that the expert is an exact copy of."""
    make: MakeExpert | None = None
    """(expert, sources, spec, generator) -> the expert, before scaling, where it is not a plain copy."""


def build_expert(
    method: Method, expert: int, sources: LayerSources, spec: ExpertSpec, generator: torch.Generator
) -> ExpertWeights:
    """Expert `expert` of one layer, before scaling. Pure: the generator is seeded by (seed, method, layer, expert)."""
    if method.copies is not None:
        return sources.shard(method.copies(expert, spec.shards))
    assert method.make is not None, method.name
    return method.make(expert, sources, spec, generator)
