"""Allocation of copies against brute force over all allocations of small layers."""

import itertools
import math
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.common.errors import MoesaicError
from moesaic.expansion.allocation import RULES, allocate, evenly, greedy, largest_target, proportional, sources_of

UTILITIES = st.lists(st.integers(0, 20).map(float), min_size=1, max_size=5)


@st.composite
def problems(draw):
    utilities = draw(UTILITIES)
    cap = draw(st.integers(1, 3))
    return utilities, draw(st.integers(0, cap * len(utilities))), cap


def every_allocation(count, added, cap):
    return (a for a in itertools.product(range(cap + 1), repeat=count) if sum(a) == added)


@given(problems())
def test_greedy_takes_the_most_utility_that_the_cap_allows(problem):
    utilities, added, cap = problem
    total = sum(u * c for u, c in zip(utilities, greedy(utilities, added, cap, random.Random(0)), strict=True))
    best = max(
        sum(u * c for u, c in zip(utilities, a, strict=True)) for a in every_allocation(len(utilities), added, cap)
    )
    assert total == best


@given(problems())
def test_proportional_is_the_closest_to_the_quotas_where_no_cap_binds(problem):
    utilities, added, cap = problem
    if not sum(utilities):
        utilities = [1.0] * len(utilities)
    quotas = [added * u / sum(utilities) for u in utilities]
    if max(quotas, default=0) > cap - 1:
        return
    distance = sum(
        (q - c) ** 2 for q, c in zip(quotas, proportional(utilities, added, cap, random.Random(0)), strict=True)
    )
    best = min(
        sum((q - c) ** 2 for q, c in zip(quotas, a, strict=True)) for a in every_allocation(len(quotas), added, cap)
    )
    assert distance == pytest.approx(best, abs=1e-9)


@pytest.mark.parametrize("rule", RULES)
@given(problem=problems(), seed=st.integers(0, 3))
def test_caps_and_totals_hold(rule, problem, seed):
    utilities, added, cap = problem
    copies = allocate(utilities, added, cap=cap, rule=rule, rng=random.Random(seed))
    assert sum(copies) == added
    assert all(0 <= number <= cap for number in copies)
    assert copies == allocate(utilities, added, cap=cap, rule=rule, rng=random.Random(seed))


@given(st.integers(1, 12), st.integers(0, 40))
def test_evenly_differs_by_at_most_one(count, added):
    copies = evenly(count, added)
    assert sum(copies) == added
    assert max(copies) - min(copies) <= 1


def test_sampling_follows_the_utilities():
    rng = random.Random(1)
    draws = [allocate([3.0, 1.0, 0.0], 1, cap=3, rule="sample_proportional", rng=rng) for _ in range(4000)]
    shares = [sum(draw[expert] for draw in draws) / 4000 for expert in range(3)]
    assert shares[0] == pytest.approx(0.75, abs=0.03)  # 4.4 standard errors
    assert shares[2] == 0


def naive_chance(utilities, copies, cap, temperature):
    """Probability of `copies` when one after the other is drawn by softmax(utility / temperature) below the cap."""
    if not sum(copies):
        return 1.0
    total = 0.0
    for last in range(len(copies)):
        before = [number - (expert == last) for expert, number in enumerate(copies)]
        if min(before) < 0:
            continue
        weights = [math.exp(u / temperature) * (number < cap) for u, number in zip(utilities, before, strict=True)]
        total += naive_chance(utilities, before, cap, temperature) * weights[last] / sum(weights)
    return total


@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
def test_sample_draws_by_the_softmax_of_utility_over_temperature(temperature):
    """Row 5 of docs/peers.md, against the exact probability of every allocation."""
    utilities, cap, number, rng = [1.0, 0.2, 0.0], 2, 4000, random.Random(1)
    found = Counter(
        tuple(allocate(utilities, 3, cap=cap, rule="sample", rng=rng, temperature=temperature)) for _ in range(number)
    )
    chances = {copies: naive_chance(utilities, copies, cap, temperature) for copies in every_allocation(3, 3, cap)}
    assert sum(chances.values()) == pytest.approx(1)
    for copies, chance in chances.items():
        assert abs(found[copies] - number * chance) < 4.5 * math.sqrt(number * chance * (1 - chance)) + 1


def test_sample_does_not_overflow():
    copies = allocate([1e5, 0.0, -0.0], 4, cap=3, rule="sample", rng=random.Random(0), temperature=1e-3)
    assert copies[0] == 3


@pytest.mark.parametrize("rule", RULES)
def test_groups_grow_equally(rule):
    copies = allocate([9.0, 8.0, 1.0, 0.5], 4, cap=3, rule=rule, rng=random.Random(0), groups=2)
    assert sum(copies[:2]) == sum(copies[2:]) == 2
    assert sources_of(copies, groups=2)[:2] == [0, 1]
    assert sources_of(copies, groups=2)[4:6] == [2, 3]


def test_sources():
    assert sources_of([0, 2, 1]) == [0, 1, 2, 1, 1, 2]


def test_more_than_the_cap_allows_names_the_largest_count():
    assert largest_target(8, 3) == 32
    with pytest.raises(MoesaicError, match="largest count possible is 32"):
        allocate([1.0] * 8, 25, cap=3, rule="greedy", rng=random.Random(0))


def test_groups_that_cannot_share():
    with pytest.raises(MoesaicError, match="multiple of 4"):
        allocate([1.0] * 8, 6, cap=3, rule="greedy", rng=random.Random(0), groups=4)
