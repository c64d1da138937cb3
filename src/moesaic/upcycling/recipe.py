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
    """Dense checkpoint: folder, or hub id org/name[@revision]."""
    method: MethodName
    """How experts are made."""
    specialists: tuple[Specialist, ...] = ()
    """A specialist of btx or divmoe, once for each, in the order of experts: a short name and a folder or hub id."""
    experts: int | None = None
    """Routed experts per layer. Default: 8; btx and divmoe: specialists times shards."""
    shards: int | None = None
    """Contiguous parts that each FFN is cut into. Default: 2 for virtual_group and divmoe, else 1."""
    top_k: int | None = None
    """Experts that each token uses. Default: 2, or the number of shards if larger; at most what the routing allows."""
    shared_experts: int = 0
    """Copies of the base's whole FFN that every token uses as well."""
    routing: RoutingRule | None = None
    """Which experts may be chosen together. Default: one_per_group for divmoe, else topk."""
    weighting: Weighting | None = None
    """Softmax over the selected experts, or over all without renormalisation. Default: all for sparse and btx
    with one expert per token, where selected would teach the router nothing; else selected."""
    router_init: RouterInit = "auto"
    """First router rows; auto keeps the strongest statement about the result."""
    router_std: float = 0.02
    """Standard deviation of random router rows (of the base rows, for tied and latin_square)."""
    scale: Scale = "exact"
    """Factor: exact (on the routing weights), paper (on expert weights, DivMoE's equation 5), none. Not for scratch."""
    shared_weights: SharedWeights | None = None
    """Weights outside the experts. Default: mean for btx and divmoe, else base."""
    drop_ratio: float = 0.5
    """Share of each expert's intermediate neurons that drop draws again, 0 to 1."""
    drop_indices: DropIndices = "per-expert"
    """One set of dropped neurons per expert (the paper), or a fresh set per matrix (public code)."""
    layers: str = "all"
    """Layers that become MoE, counted from 0: all, every:2 (every second one) or ranges such as 1-10,12."""
    dtype: DtypeName = "auto"
    """Data type of the result; auto is the base's."""
    shard_size: str = "5GB"
    """Largest weight file: 500MB, 5GB, 2GiB, or a number of bytes."""
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
