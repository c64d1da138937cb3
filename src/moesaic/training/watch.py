"""What the load of the experts says while a run can still be changed: each kind of finding is a notice, once.

Looked at are the counts that every step makes anyway, added up until each expert would have had `SELECTIONS` by an even
share: one small batch says nothing. Nothing of the run depends on it.
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from moesaic.routing.losses import Load
from moesaic.routing.stats import busiest_share, dead_experts, load_entropy

SELECTIONS = 64
"""Selections per expert that are added up before they are looked at."""
SPREAD = 0.25
"""A load is as uneven as n equally busy experts would make it (n is exp of its entropy). The limit is n a quarter of
the way from K, where every token has the same experts, to E: what `inspect` calls collapsed."""
_CURE = "losses.balance and losses.bias_balancing spread the load"


class RoutingWatch:
    """Adds up the load and names what is wrong with it: constant routers, low entropy, dead experts."""

    def __init__(self) -> None:
        self._load: Load | None = None
        self._said: set[str] = set()

    def look(self, load: Load) -> list[str]:
        """Add the load of a step; return what has to be said now."""
        fits = self._load is not None and self._load.counts_LE.shape == load.counts_LE.shape  # not after an expansion
        added = self._load + load if self._load is not None and fits else load
        self._load = added
        selections, tokens, experts = int(added.counts_LE[0].sum()), int(added.tokens), added.counts_LE.shape[1]
        if selections < SELECTIONS * experts:
            return []
        self._load = None
        top_k = selections // tokens
        if top_k == experts:
            return []
        found = findings(added.counts_LE.cpu(), top_k)
        new = [kind for kind in found if kind not in self._said]
        self._said.update(new)
        return [f"{found[kind]}; {_CURE}" for kind in new]


def findings(counts_LE: Tensor, top_k: int) -> dict[str, str]:
    """Kind -> what is to be said of a load: selections in each MoE layer (L) of each expert (E), K by every token.

    A layer with a constant router is no case of the other kinds.
    """
    constant_L = _is_constant(counts_LE, top_k)
    affected = {kind: finds(counts_LE, top_k) for kind, (finds, _) in _KINDS.items()}
    return {
        kind: says(counts_LE, which_L)
        for kind, (_, says) in _KINDS.items()
        if bool((which_L := affected[kind] & (constant_L if kind == "constant" else ~constant_L)).any())
    }


def _is_constant(counts_LE: Tensor, top_k: int) -> Tensor:
    return (counts_LE > 0).sum(dim=-1) == top_k


def _is_low(counts_LE: Tensor, top_k: int) -> Tensor:
    return load_entropy(counts_LE) < _limit(counts_LE.shape[1], top_k)


def _limit(experts: int, top_k: int) -> float:
    """The entropy, over log E, of a load that `SPREAD` calls collapsed."""
    return math.log(top_k + SPREAD * (experts - top_k)) / math.log(experts)


def _say_constant(_counts_LE: Tensor, which_L: Tensor) -> str:
    return f"{_layers(which_L)}: the router is constant, it sends every token to the same experts"


def _say_low(counts_LE: Tensor, which_L: Tensor) -> str:
    entropy = float(load_entropy(counts_LE)[which_L].min())
    share = float(busiest_share(counts_LE)[which_L].max())
    return (
        f"{_layers(which_L)}: few experts do most of the work (entropy of the load {entropy:.2f} of 1, up to "
        f"{share:.0%} of the selections on one expert)"
    )


def _say_dead(counts_LE: Tensor, which_L: Tensor) -> str:
    even = int(counts_LE[0].sum()) // counts_LE.shape[1]
    number = int(dead_experts(counts_LE)[which_L].sum())
    return f"{_layers(which_L)}: {number} of {counts_LE.numel()} experts got no token, where an even share is {even:,}"


_KINDS: Mapping[str, tuple[Callable[[Tensor, int], Tensor], Callable[[Tensor, Tensor], str]]] = {
    "constant": (_is_constant, _say_constant),
    "entropy": (_is_low, _say_low),
    "dead": (lambda counts_LE, _top_k: dead_experts(counts_LE) > 0, _say_dead),
}
"""Kind -> which layers it is found in, and the words."""


def _layers(which_L: Tensor) -> str:
    """The MoE layers that are meant, by their number among the MoE layers."""
    numbers = torch.nonzero(which_L).flatten().tolist()
    shown = ", ".join(map(str, numbers[:4])) + (" and more" if len(numbers) > 4 else "")
    return f"routing in {len(numbers)} of {len(which_L)} MoE layers (counted from 0: {shown})"
