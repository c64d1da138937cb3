"""What a method is: a record of choices and one pure function. Importing it imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Literal

from moesaic.families.experts import ExpertWeights, T

if TYPE_CHECKING:
    import torch


RoutingRule = Literal["topk", "one_per_group"]
RouterInit = Literal["auto", "random", "zeros", "tied", "latin_square"]
Weighting = Literal["selected", "all"]
DropIndices = Literal["per-expert", "per-matrix"]


@dataclass(frozen=True, kw_only=True)
class ExpertSpec:
    """What the experts of a method may depend on, besides the weights and the generators."""

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


@dataclass(frozen=True, kw_only=True)
class DenseLayer(Generic[T]):
    """One layer's dense FFNs, in memory or as expressions, and what a method may depend on besides.

    The numbers are as wide as both the stored ones and the result's need.
    """

    base: ExpertWeights[T]
    specialists: tuple[ExpertWeights[T], ...]
    """N of them; empty where the experts come from the base."""
    experts: int
    """E."""
    spec: ExpertSpec
    draw: Callable[[int], torch.Generator]
    """Expert -> a new generator of its own, seeded by (seed, method, layer, expert)."""

    @property
    def shards(self) -> int:
        """M."""
        return self.spec.shards


@dataclass(frozen=True, kw_only=True)
class Method:
    """One way to make experts from dense FFNs."""

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
    weighting_of_one: Weighting = "selected"
    """Default weighting where a token uses one expert; `selected` is 1 then, and teaches the router nothing."""
    settings: tuple[str, ...] = ()
    """Keys of the recipe that only this method uses; with the others they are refused."""
    experts: Callable[[DenseLayer], list[ExpertWeights]]
    """The E experts of a layer, before scaling: the method's equations. Pure, but for the generators that it asks for;
    what it computes and does not only cut, it computes in `ExpertWeights.made`."""
