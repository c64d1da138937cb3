"""Which source each sequence comes from: exact shares at every moment, and any position at once."""

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

MAX_PERIOD = 100_000


def integer_shares(weights: Sequence[float], *, limit: int = MAX_PERIOD) -> tuple[int, ...]:
    """Weights as whole numbers in the same proportion, their sum at most `limit`.

    Weights are taken as the decimals that were written, so 0.35 and 0.65 become 7 and 13. Where the sum would exceed
    the limit, shares are rounded to multiples of 1/limit (each at least one).
    """
    exact = [Fraction(repr(float(weight))) for weight in weights]
    scale = math.lcm(*(value.denominator for value in exact))
    whole = [int(value * scale) for value in exact]
    divisor = math.gcd(*whole)
    shares = tuple(value // divisor for value in whole)
    if sum(shares) <= limit:
        return shares
    total = sum(exact)
    return tuple(max(1, math.floor(value / total * limit)) for value in exact)


class Schedule:
    """A periodic sequence of sources in which source i has `shares[i]` places per period.

    After any number n of sequences, every source has had its exact share of them within less than one sequence: at most
    1 - 1/(2k - 2) for k sources (R. Tijdeman, "The chairman assignment problem", Discrete Mathematics 32, 1980).
    The table of one period is kept (5 bytes a place), so any position is found without going through those before.
    """

    def __init__(self, shares: Sequence[int]) -> None:
        divisor = math.gcd(*shares)
        self.shares_K = np.array([share // divisor for share in shares], dtype=np.int64)
        self.period = int(self.shares_K.sum())
        self._source_P = _assign([int(share) for share in self.shares_K])
        self._place_P = np.empty(self.period, dtype=np.int32)
        for source, share in enumerate(self.shares_K):
            self._place_P[self._source_P == source] = np.arange(share, dtype=np.int32)

    def assign(self, sequence_N: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """For each sequence number: its source, and how many earlier sequences came from that source."""
        period_N, place_N = np.divmod(sequence_N, self.period)
        source_N = self._source_P[place_N].astype(np.int64)
        return source_N, period_N * self.shares_K[source_N] + self._place_P[place_N]


def _assign(shares: list[int]) -> NDArray[np.uint16]:
    """Tijdeman's rule in whole numbers: of the sources that are owed enough, the one whose turn is most urgent."""
    period, num = sum(shares), len(shares)
    table_P = np.zeros(period, dtype=np.uint16)
    if num == 1:
        return table_P
    scale = 2 * num - 2
    owed = [0] * num  # scale * (share * position - period * places had)
    for position in range(period):
        best, urgency = -1, math.inf
        for source, share in enumerate(shares):
            owed[source] += scale * share
            if owed[source] >= period:
                slack = (period * (scale - 1) - owed[source]) / share
                if slack < urgency:
                    best, urgency = source, slack
        assert best >= 0
        owed[best] -= scale * period
        table_P[position] = best
    return table_P
