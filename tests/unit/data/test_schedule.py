from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.data.mixing import Schedule, integer_shares


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=9))
def test_every_source_has_its_share_at_every_moment(shares):
    schedule = Schedule(shares)
    num = 2 * schedule.period + 3
    source_N, number_N = schedule.assign(np.arange(num))
    total = sum(shares)
    for source, share in enumerate(shares):
        had_N = np.cumsum(source_N == source)
        # |had - n * share / total| < 1, in whole numbers
        assert (np.abs(had_N * total - np.arange(1, num + 1) * share) < total).all()
        assert number_N[source_N == source].tolist() == list(range(had_N[-1]))


def test_a_dominant_source_among_many_small_ones_keeps_its_share():
    """Rounding each source by itself (divisor methods) misses by more than one here."""
    shares = [901, *([9] * 11)]
    source_N, _ = Schedule(shares).assign(np.arange(1000))
    had_N = np.cumsum(source_N == 0)
    assert np.abs(had_N - np.arange(1, 1001) * 0.901).max() < 1


def test_any_position_is_found_without_those_before():
    schedule = Schedule([3, 5, 9])
    far = 17 * 10**12
    source_N, number_N = schedule.assign(np.arange(far, far + 17))
    near_source_N, near_number_N = schedule.assign(np.arange(17))
    assert source_N.tolist() == near_source_N.tolist()
    assert (number_N - near_number_N == np.array([3, 5, 9])[source_N] * 10**12).all()


@pytest.mark.parametrize(
    ("weights", "shares"),
    [
        ([1.0], (1,)),
        ([0.35, 0.65], (7, 13)),
        ([2, 2, 4], (1, 1, 2)),
        ([0.1, 0.2, 0.3, 0.4], (1, 2, 3, 4)),
        ([1e-3, 1], (1, 1000)),
    ],
)
def test_integer_shares_are_the_written_decimals(weights, shares):
    assert integer_shares(weights) == shares


def test_integer_shares_are_rounded_only_past_the_limit():
    weights = [0.123456789, 0.3, 0.576543211, 1e-9]
    shares = integer_shares(weights)
    total = sum(Fraction(str(weight)) for weight in weights)
    assert sum(shares) <= 100_001
    assert shares[3] == 1
    assert all(abs(share / sum(shares) - weight / total) < 3e-5 for share, weight in zip(shares, weights, strict=True))
