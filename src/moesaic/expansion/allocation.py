"""How many copies each expert gets. Torch-free, exact, the same on every machine.

An allocation is a list of *added* copies per expert: 0 means that the expert stays alone, 3 that there are four of it.
Ties go to the expert with the lower index.
"""

import math
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

from moesaic.common.errors import MoesaicError

Allocation = Literal["greedy", "proportional", "sample", "sample_proportional"]


def largest_target(num_experts: int, cap: int) -> int:
    """The largest number of experts that `cap` added copies per expert can reach."""
    return num_experts * (1 + cap)


def allocate(
    utilities: Sequence[float],
    added: int,
    *,
    cap: int,
    rule: Allocation,
    rng: random.Random,
    groups: int = 1,
    temperature: float = 1.0,
) -> list[int]:
    """Distribute `added` copies over the experts of one layer.

    `groups` consecutive groups of equal size (group-limited selection) each get the same number of copies.
    `temperature` is that of the rule `sample`.

    Raises:
        MoesaicError: more copies than the cap allows, or a number that the groups cannot share equally.
    """
    count = len(utilities)
    if added > count * cap:
        raise MoesaicError(
            f"--experts {count + added} needs more than --cap {cap} added copies of an expert:"
            f" the largest count possible is {largest_target(count, cap)}"
        )
    if added % groups:
        raise MoesaicError(
            f"--experts {count + added}: the {groups} expert groups of this family must grow equally,"
            f" so the count must be {count} plus a multiple of {groups}"
        )
    size = count // groups
    copies: list[int] = []
    distribute = partial(sample, temperature=temperature) if rule == "sample" else RULES[rule]
    for group in range(groups):
        copies += distribute(utilities[group * size : (group + 1) * size], added // groups, cap, rng)
    return copies


def evenly(count: int, added: int, groups: int = 1) -> list[int]:
    """Copies as even as possible, within each of `groups` groups: the utility `uniform` (round robin)."""
    size, share = count // groups, added // groups
    return [share // size + (expert % size < share % size) for expert in range(count)]


def greedy(utilities: Sequence[float], added: int, cap: int, _rng: random.Random) -> list[int]:
    """The best expert takes copies up to its cap, then the next (the paper's rule)."""
    copies = [0] * len(utilities)
    for expert in sorted(range(len(utilities)), key=lambda e: (-utilities[e], e)):
        copies[expert] = min(cap, added - sum(copies))
    return copies


def proportional(utilities: Sequence[float], added: int, cap: int, _rng: random.Random) -> list[int]:
    """Copies in proportion to utility, by largest remainder; what the cap cuts off goes to the others likewise."""
    copies = [0] * len(utilities)
    while left := added - sum(copies):
        open_experts = [expert for expert, number in enumerate(copies) if number < cap]
        for expert, number in zip(open_experts, _shares([utilities[e] for e in open_experts], left), strict=True):
            copies[expert] = min(cap, copies[expert] + number)
    return copies


def sample(
    utilities: Sequence[float], added: int, cap: int, rng: random.Random, *, temperature: float = 1.0
) -> list[int]:
    """Copies drawn one at a time by softmax(utility / temperature) among the experts below their cap.

    The paper's public code (amazon-science/expert-upcycling d42f7c6). Utilities far below the temperature are drawn
    almost evenly; where what is left of the softmax is too small for a float, evenly too.
    """
    largest = max(utilities)
    return _drawn([math.exp((u - largest) / temperature) for u in utilities], added, cap, rng)


def sample_proportional(utilities: Sequence[float], added: int, cap: int, rng: random.Random) -> list[int]:
    """Copies drawn one at a time with probability proportional to utility among the experts below their cap."""
    return _drawn(utilities, added, cap, rng)


def _drawn(weight_of: Sequence[float], added: int, cap: int, rng: random.Random) -> list[int]:
    copies = [0] * len(weight_of)
    for _ in range(added):
        open_experts = [expert for expert, number in enumerate(copies) if number < cap]
        weights = [weight_of[expert] for expert in open_experts]
        if not sum(weights):
            weights = [1.0] * len(open_experts)
        copies[rng.choices(open_experts, weights)[0]] += 1
    return copies


def _shares(utilities: Sequence[float], number: int) -> list[int]:
    """Largest-remainder shares of `number`; equal utilities where all are zero."""
    total = sum(utilities)
    quotas = [number * u / total for u in utilities] if total else [number / len(utilities)] * len(utilities)
    shares = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(quotas)), key=lambda e: (shares[e] - quotas[e], e))
    for expert in by_remainder[: number - sum(shares)]:
        shares[expert] += 1
    return shares


RULES: dict[Allocation, Callable[[Sequence[float], int, int, random.Random], list[int]]] = {
    "greedy": greedy,
    "proportional": proportional,
    "sample": sample,
    "sample_proportional": sample_proportional,
}


def sources_of(copies: Sequence[int], *, groups: int = 1) -> list[int]:
    """The source expert of every expert of the grown layer.

    Originals keep their place at the front, copies follow in the order of their sources; with several groups this holds
    inside each, so that the groups stay consecutive and of equal size.
    """
    size = len(copies) // groups
    sources: list[int] = []
    for group in range(groups):
        members = range(group * size, (group + 1) * size)
        sources += [*members, *(expert for expert in members for _ in range(copies[expert]))]
    return sources
