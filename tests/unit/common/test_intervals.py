"""Loss jump, gap closure and their intervals against resampling, simulation and tables."""

import math
import random

import pytest

from moesaic.common.intervals import Interval, gap_closure, loss_jump, mean_interval, t_quantile


@pytest.mark.parametrize(
    ("probability", "freedom", "expected"),
    [
        (0.975, 1, 12.7062),  # any printed table
        (0.975, 2, 4.30265),
        (0.975, 3, 3.18245),
        (0.95, 5, 2.01505),
        (0.975, 10, 2.22814),
        (0.995, 30, 2.75000),
        (0.975, 120, 1.97993),
        (0.5, 7, 0.0),
    ],
)
def test_student_quantiles_of_the_tables(probability, freedom, expected):
    assert t_quantile(probability, freedom) == pytest.approx(expected, rel=1e-5, abs=1e-9)


def test_many_degrees_of_freedom_are_normal():
    assert t_quantile(0.975, 1000) == pytest.approx(t_quantile(0.975, 1001), rel=3e-3)


def test_gap_closure_of_the_paper():
    """111.8% at losses 1.263 and 1.267 implies L_E = 1.301."""
    found = gap_closure([1.301, 1.302], [1.263, 1.264], [1.267, 1.268])
    assert found.closure is not None
    assert found.closure.value == pytest.approx(1.118, abs=1e-3)
    assert found.gap.value == pytest.approx(0.034)
    assert found.gain.value == pytest.approx(0.038)


def test_no_quotient_where_the_gap_may_be_zero():
    found = gap_closure([1.30, 1.31, 1.29], [1.25, 1.26, 1.24], [1.31, 1.26, 1.32])
    assert not found.gap.excludes_zero
    assert found.closure is None
    assert found.gain.excludes_zero


def test_one_seed_has_no_intervals():
    found = gap_closure([1.30], [1.25], [1.20])
    assert found.gap.value == pytest.approx(0.1)
    assert (found.gap.low, found.gap.high) == (None, None)
    assert found.closure is None


def test_fieller_covers_the_true_quotient_as_often_as_it_says():
    draw, runs = random.Random(0), 1000
    hits = 0
    for _ in range(runs):
        noise = [[draw.gauss(0, 0.01) for _ in range(3)] for _ in range(3)]
        arms = [[mean + one for one in of_arm] for mean, of_arm in zip((1.5, 1.38, 1.3), noise, strict=True)]
        found = gap_closure(*arms, level=0.9).closure
        assert found is not None
        assert found.low is not None
        assert found.high is not None
        assert found.low <= found.value <= found.high
        hits += found.low <= 0.12 / 0.2 <= found.high
    assert hits / runs == pytest.approx(0.9, abs=0.03)


def test_mean_interval_by_hand():
    found = mean_interval([1.0, 2.0, 3.0])
    reach = 4.30265 / math.sqrt(3)
    assert (found.low, found.value, found.high) == pytest.approx((2 - reach, 2, 2 + reach), rel=1e-5)


def test_loss_jump_is_the_difference_of_the_means_and_pairs_documents():
    draw = random.Random(0)
    tokens = [draw.randint(5, 50) for _ in range(200)]
    before = [n * draw.gauss(3, 1) for n in tokens]
    after = [loss + n * draw.gauss(0.1, 0.02) for loss, n in zip(before, tokens, strict=True)]
    found = loss_jump(before, after, tokens)
    assert found.value == pytest.approx((sum(after) - sum(before)) / sum(tokens))
    assert found.low is not None
    assert found.high is not None
    assert found.high - found.low < 0.01  # unpaired it would be about 0.4
    values = []
    for _ in range(400):  # the bootstrap over documents says the same
        chosen = draw.choices(range(len(tokens)), k=len(tokens))
        values.append(sum(after[i] - before[i] for i in chosen) / sum(tokens[i] for i in chosen))
    spread = sorted(values)
    assert found.high - found.low == pytest.approx(spread[389] - spread[10], rel=0.25)


def test_loss_jump_without_documents_or_with_one():
    assert math.isnan(loss_jump([0.0], [0.0], [0]).value)
    assert loss_jump([6.0, 0.0], [9.0, 0.0], [3, 0]) == Interval(value=1.0, low=None, high=None)
