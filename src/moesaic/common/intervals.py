"""What an expansion did to the loss, with intervals: the jump at the transition, and the gap closed at the end.

Losses are in nats per predicted token. No torch.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean

from moesaic.common.recipe import Measured

LEVEL = 0.95
"""Probability that an interval is meant to have, unless the caller says another."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """An estimate and the two ends of its confidence interval; `None` where there is nothing to estimate it from."""

    value: Measured
    low: Measured | None
    high: Measured | None

    @property
    def excludes_zero(self) -> bool:
        """Whether there is an interval and 0 is outside it."""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high


@dataclass(frozen=True, kw_only=True)
class GapClosure:
    """How far an upcycled model comes from the small model's loss to the large one's: 1 is all the way."""

    gap: Interval
    """`L_E - L_mE`, what there is to gain."""
    gain: Interval
    """`L_E - L_up`, what was gained."""
    closure: Interval | None
    """`gain / gap`; `None` where the interval of the gap is unknown or includes 0: then the quotient means nothing."""


def loss_jump(
    before_N: Sequence[float], after_N: Sequence[float], tokens_N: Sequence[float], *, level: float = LEVEL
) -> Interval:
    """Loss after an expansion minus the loss before, on the same N documents.

    Args:
        before_N: total loss of each document just before, summed over its predicted tokens.
        after_N: the same just after.
        tokens_N: predicted tokens of each document; documents without one are left out.
        level: probability of the interval.

    Returns:
        The difference of the two mean losses per token. Its interval comes from the documents' own differences (a ratio
        estimator, Cochran, Sampling Techniques, 6.4), so what makes a document hard in both models cancels out.
    """
    rows = [(a - b, n) for b, a, n in zip(before_N, after_N, tokens_N, strict=True) if n > 0]
    count, total = len(rows), sum(n for _, n in rows)
    if not total:
        return Interval(value=math.nan, low=None, high=None)
    value = sum(difference for difference, _ in rows) / total
    if count < 2:
        return Interval(value=value, low=None, high=None)
    spread = sum((difference - value * n) ** 2 for difference, n in rows)
    error = math.sqrt(count / (count - 1) * spread) / total
    reach = t_quantile(0.5 + level / 2, count - 1) * error
    return Interval(value=value, low=value - reach, high=value + reach)


def gap_closure(
    small: Sequence[float], upcycled: Sequence[float], large: Sequence[float], *, level: float = LEVEL
) -> GapClosure:
    """`(L_E - L_up) / (L_E - L_mE)` from the final losses of three runs at matched tokens, one loss per seed.

    Args:
        small: losses of the model that keeps E experts.
        upcycled: losses of the one that grew from E to mE, in the same order of seeds.
        large: losses of the one that has had mE experts from the start.
        level: probability of the intervals.

    Returns:
        Gap, gain and their quotient. Seeds are pairs (the same data in all three runs), so intervals come from the
        seeds' own differences, Student's t; that of the quotient by Fieller's theorem (1954), which holds exactly where
        the gap's interval excludes 0. A single seed has no intervals, and so no quotient.
    """
    assert len(small) == len(upcycled) == len(large) > 0, "one loss per seed of each of the three runs"
    gains = [e - up for e, up in zip(small, upcycled, strict=True)]
    gaps = [e - me for e, me in zip(small, large, strict=True)]
    gain, gap = mean_interval(gains, level=level), mean_interval(gaps, level=level)
    closure = _quotient(gains, gaps, level) if gap.excludes_zero else None
    return GapClosure(gap=gap, gain=gain, closure=closure)


def mean_interval(values: Sequence[float], *, level: float = LEVEL) -> Interval:
    """Mean of independent values with Student's interval; no interval for a single one."""
    mean, count = fmean(values), len(values)
    if count < 2:
        return Interval(value=mean, low=None, high=None)
    reach = t_quantile(0.5 + level / 2, count - 1) * math.sqrt(_covariance(values, values) / count)
    return Interval(value=mean, low=mean - reach, high=mean + reach)


def _quotient(numerators: Sequence[float], denominators: Sequence[float], level: float) -> Interval:
    """Fieller's interval of a quotient of two means of pairs.

    The quotients r for which `mean(numerator) - r * mean(denominator)` is within t standard errors of 0; the ends are
    the roots of a quadratic.
    """
    count = len(numerators)
    square = t_quantile(0.5 + level / 2, count - 1) ** 2 / count
    a, b = fmean(numerators), fmean(denominators)
    leading = b * b - square * _covariance(denominators, denominators)
    middle = a * b - square * _covariance(numerators, denominators)
    last = a * a - square * _covariance(numerators, numerators)
    assert leading > 0, "the caller has made sure that the interval of the denominator excludes 0"
    root = math.sqrt(max(0.0, middle * middle - leading * last))
    return Interval(value=a / b, low=(middle - root) / leading, high=(middle + root) / leading)


def _covariance(left: Sequence[float], right: Sequence[float]) -> float:
    mean_left, mean_right = fmean(left), fmean(right)
    products = ((x - mean_left) * (y - mean_right) for x, y in zip(left, right, strict=True))
    return math.fsum(products) / (len(left) - 1)


def t_quantile(probability: float, freedom: int) -> float:
    """Quantile of Student's t with a whole number of degrees of freedom, for a probability of at least 0.5.

    Inverts the distribution's finite series (Abramowitz and Stegun, 26.7.3 and 26.7.4) by bisection; above 1,000
    degrees of freedom the normal quantile, which differs by less than 0.3%.
    """
    assert 0.5 <= probability < 1
    assert freedom >= 1
    if freedom > _NORMAL_FROM:
        return NormalDist().inv_cdf(probability)
    inside = 2 * probability - 1
    high = 1.0
    while _inside(high, freedom) < inside:
        high *= 2
    return _bisect(lambda t: _inside(t, freedom) - inside, 0.0, high)


_NORMAL_FROM = 1000


def _inside(t: float, freedom: int) -> float:
    """Probability that Student's t is between -t and t."""
    angle = math.atan(t / math.sqrt(freedom))
    square, sine = math.cos(angle) ** 2, math.sin(angle)
    if freedom == 1:
        return 2 * angle / math.pi
    odd = freedom % 2
    term = total = math.cos(angle) if odd else 1.0
    for index in range(1 + odd, freedom - 2, 2):
        term *= square * index / (index + 1)
        total += term
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def _bisect(function: Callable[[float], float], low: float, high: float) -> float:
    """The zero of an increasing function between two ends, to the last bit or so."""
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) < 0 else (low, middle)
    return (low + high) / 2
