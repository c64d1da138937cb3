"""A claim as a number that is positive where it holds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from moesaic.common.intervals import Interval, mean_interval
from moesaic_lab.rows import Row
from moesaic_lab.tables import seed_values, where

Verdict = Literal["seen", "not seen", "opposite", "undecided", "not testable here", "not measured"]
Effect = Callable[[Sequence[Row]], Interval | None]


@dataclass(frozen=True, kw_only=True)
class Premise:
    """What must be so before a claim can be judged."""

    name: str
    figure: str
    """What `effect` is, in words."""
    effect: Effect
    """A figure that is above 0 where the premise holds."""

    def holds(self, rows: Sequence[Row]) -> bool:
        """Whether its interval is above 0; with one seed, whether its value is."""
        found = self.effect(rows)
        return found is not None and (found.value if found.low is None else found.low) > 0


def _above(limit: float, high: str, low: str) -> Effect:
    parts = (high, low)

    def effect(rows: Sequence[Row]) -> Interval | None:
        return combine(lambda a, b: a - b - limit, *(where(rows, measure=part) for part in parts))

    return effect


_OVER_BIGRAM, _WORTH_OF_FFNS = 0.3, 2.5
REGIME = (
    Premise(
        name="more than bigrams",
        figure=f"loss of a bigram model with backoff minus the model's, less {_OVER_BIGRAM}",
        effect=_above(_OVER_BIGRAM, "bigram_loss", "premise_loss"),
    ),
    Premise(
        name="FFNs worth something",
        figure=f"what the model loses without its FFNs, less {_WORTH_OF_FFNS}",
        effect=_above(_WORTH_OF_FFNS, "without_ffns_loss", "premise_loss"),
    ),
)
"""Premises of every claim: at a few tokens per parameter there is nothing in the FFNs to preserve or to specialise."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One claim of a paper."""

    says: str
    place: str
    """Section, table or figure."""
    figure: str
    """What `effect` is, in words."""
    effect: Effect
    """A figure that is above 0 where the claim holds; None where the run did not measure it."""
    premises: tuple[Premise, ...] = REGIME
    otherwise: Literal["opposite", "not seen"] = "opposite"
    """The verdict where the figure is below 0."""


def verdict(claim: Claim, rows: Sequence[Row]) -> Verdict:
    """What the interval says about the claim, where its premises hold."""
    effect = claim.effect(rows)
    if effect is None:
        return "not measured"
    if not all(premise.holds(rows) for premise in claim.premises):
        return "not testable here"
    if effect.low is None or not effect.excludes_zero:
        return "undecided"
    return "seen" if effect.low > 0 else claim.otherwise


def combine(function: Callable[..., float], *parts: Sequence[Row]) -> Interval | None:
    """Interval over seeds of a function of one value per part and seed; None where no seed has all parts."""
    values = [seed_values(part) for part in parts]
    seeds = sorted(set.intersection(*(set(one) for one in values)))
    if not seeds:
        return None
    return mean_interval([function(*(one[seed] for one in values)) for seed in seeds])


def less(low: Sequence[Row], high: Sequence[Row]) -> Interval | None:
    """How much lower the first is than the second."""
    return combine(lambda first, second: second - first, low, high)


def within(limit: float, left: Sequence[Row], right: Sequence[Row]) -> Interval | None:
    """How far the first is from exceeding the second by more than a limit: above 0 where it is as good."""
    return combine(lambda first, second: limit - (first - second), left, right)


def smallest(parts: Sequence[Interval | None]) -> Interval | None:
    """The least of several figures, for a claim that all of them are above 0; None where one is missing.

    Its ends are the least low and the least high end: above 0 where every part is, below where one is. Parts without an
    interval leave it without one, unless another part is below 0: the parts with intervals then decide.
    """
    found = [part for part in parts if part is not None]
    if not found or len(found) < len(parts):
        return None
    ends = [(part.value, part.low, part.high) for part in found if part.low is not None and part.high is not None]
    if len(ends) < len(found) and not any(high < 0 for _, _, high in ends):
        return Interval(value=min(part.value for part in found), low=None, high=None)
    value, low, high = map(min, zip(*ends, strict=True))
    return Interval(value=value, low=low, high=high)
