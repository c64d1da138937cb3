"""What a user asks `upcycle` for: one field per flag, no torch."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from moesaic.common.errors import MoesaicError
from moesaic.upcycling.method import DropIndices, RouterInit, RoutingRule, Weighting
from moesaic.upcycling.methods import METHODS

if TYPE_CHECKING:
    MethodName = str
else:
    MethodName = Literal[tuple(METHODS)]
Scale = Literal["exact", "paper", "none"]
SharedWeights = Literal["mean", "base", "random-specialist", "reinit"]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class Specialist:
    """A model trained on one domain, of the same architecture and vocabulary as the base."""

    name: str
    """Short name of the domain; it appears in the record and the model card."""
    path: str
    """Folder, or hub id `org/name[@revision]`."""


@dataclass(frozen=True, kw_only=True)
class UpcycleRecipe:
    """Everything that decides the bytes of the result.

    The number of workers, progress and overwriting are arguments of `run.upcycle`, not of the recipe. `None` means the
    method's own default; `upcycling.plan.resolve` fills it in and says what it chose.
    """

    base: str
    """The dense base: folder, or hub id `org/name[@revision]`."""
    method: MethodName
    """How experts are made; `upcycling.methods.METHODS` describes each."""
    specialists: tuple[Specialist, ...] = ()
    """One per domain, in the order of their experts. For `btx` and `divmoe` only, at least two."""
    experts: int | None = None
    """E, routed experts per MoE layer. `btx` and `divmoe` derive it (N and N*M); the others default to 8."""
    shards: int | None = None
    """M, contiguous shards that every dense FFN is cut into. Default: 2 for `virtual_group` and `divmoe`, else 1."""
    top_k: int | None = None
    """K, experts that each token uses. Default: max(2, M), but at most what the routing rule allows."""
    shared_experts: int = 0
    """S, copies of the base's whole FFN that every token uses beside the routed experts."""
    routing: RoutingRule | None = None
    """Which experts may be chosen together. Default: `one_per_group` for `divmoe`, else `topk`."""
    weighting: Weighting | None = None
    """Softmax over the selected experts, or over all without renormalisation. Default: `all` for `sparse` and `btx`
    with K = 1, where `selected` would teach the router nothing; else `selected`."""
    router_init: RouterInit = "auto"
    """First values of the router. `auto`: the ones that keep the strongest statement about the result."""
    router_std: float = 0.02
    """Standard deviation of random router rows (of the base rows, for `tied` and `latin_square`)."""
    scale: Scale = "exact"
    """`exact`: routing weights times what they take; `paper`: equation 5 of DivMoE; `none`. Not for scratch."""
    shared_weights: SharedWeights | None = None
    """Everything that does not become an expert. Default: `mean` for `btx` and `divmoe`, else `base`."""
    drop_ratio: float = 0.5
    """Share of each expert's intermediate neurons that `drop` draws again, in [0, 1]."""
    drop_indices: DropIndices = "per-expert"
    """One set of dropped neurons per expert (the paper), or a fresh set per matrix (public code)."""
    layers: str = "all"
    """Layers that become MoE: `all`, `every:n` (i+1 divisible by n) or zero-based ranges such as `1-10,12`."""
    dtype: DtypeName = "auto"
    """Data type of the result; `auto` keeps the base's."""
    shard_size: str = "5GB"
    """Largest file of weights, with a unit (`500MB`, `5GB`, `2GiB`) or a number of bytes."""
    seed: int = 0
    """Seed of every random number; not negative."""
    allow_nonfinite: bool = False
    """Accept NaN and Inf in the sources instead of refusing them."""

    def __post_init__(self) -> None:
        """Refuse values that are wrong whatever the checkpoints are; the message starts with the field's name."""
        for name in ("experts", "shards", "top_k"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise MoesaicError(f"{name} must be at least 1, got {value}")
        for name in ("shared_experts", "seed"):
            if getattr(self, name) < 0:
                raise MoesaicError(f"{name} must not be negative, got {getattr(self, name)}")
        if not 0.0 <= self.drop_ratio <= 1.0:
            raise MoesaicError(f"drop_ratio must be between 0 and 1 (a share of the neurons), got {self.drop_ratio}")
        if not (self.router_std >= 0.0 and math.isfinite(self.router_std)):
            raise MoesaicError(f"router_std must be a finite number that is not negative, got {self.router_std}")
        names = [specialist.name for specialist in self.specialists]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise MoesaicError(f"specialists must have different names, but {', '.join(twice)} is given more than once")
