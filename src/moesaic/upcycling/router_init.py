"""First values of a router, (E, D) in float32. E experts, M shards, expert e*M + j is shard j of domain e."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from moesaic.upcycling.randomness import normal
from moesaic.upcycling.recipe import RouterInit


@dataclass(frozen=True, kw_only=True)
class RouterSpec:
    """What router rows depend on."""

    experts: int
    """E."""
    hidden: int
    """D."""
    shards: int
    """M."""
    std: float


def random(spec: RouterSpec, generator: torch.Generator) -> Float[Tensor, "E D"]:
    """Independent rows from N(0, std)."""
    return normal((spec.experts, spec.hidden), spec.std, generator)


def zeros(spec: RouterSpec, generator: torch.Generator) -> Float[Tensor, "E D"]:  # noqa: ARG001
    """All experts tie for every token until the first update."""
    return torch.zeros(spec.experts, spec.hidden)


def tied(spec: RouterSpec, generator: torch.Generator) -> Float[Tensor, "E D"]:
    """E/M random rows, each repeated M times in a row, so that the shards of a group always tie (arXiv 2410.07524)."""
    assert spec.experts % spec.shards == 0
    base_rows = normal((spec.experts // spec.shards, spec.hidden), spec.std, generator)
    return base_rows.repeat_interleave(spec.shards, dim=0)


def latin_square(spec: RouterSpec, generator: torch.Generator) -> Float[Tensor, "E D"]:
    """The best base row sends the M domains of its virtual group to M *different* shards, with equal logits.

    The N = E/M domains form N/M virtual groups of M; each has M random base rows q. The row of (domain at position t of
    its virtual group, shard j) is `q[(j - t) mod M]`. Works under `one_per_group` and under plain top-k.
    """
    shards = spec.shards
    domains = spec.experts // shards
    assert domains * shards == spec.experts
    assert domains % shards == 0
    base_rows = normal((domains // shards, shards, spec.hidden), spec.std, generator)
    position, shard = torch.arange(shards)[:, None], torch.arange(shards)[None, :]
    return base_rows[:, (shard - position) % shards].reshape(spec.experts, spec.hidden)


ROUTER_INITS: dict[RouterInit, Callable[[RouterSpec, torch.Generator], Tensor]] = {
    "random": random,
    "zeros": zeros,
    "tied": tied,
    "latin_square": latin_square,
}
