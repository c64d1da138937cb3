"""Learning rates at the points that the docstring promises."""

import pytest

from moesaic.training.recipe import OptimizerRecipe
from moesaic.training.schedule import learning_rate


def recipe(**changes) -> OptimizerRecipe:
    return OptimizerRecipe(**({"lr": 1.0, "min_lr": 0.1, "warmup_steps": 4} | changes))


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_warmup_is_linear_and_ends_at_the_highest_rate(schedule):
    rates = [learning_rate(step, 104, recipe(schedule=schedule)) for step in range(6)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[5] < 1.0


@pytest.mark.parametrize(("schedule", "quarter"), [("cosine", 0.1 + 0.9 * (0.5 + 0.5**1.5)), ("linear", 0.775)])
def test_decay(schedule, quarter):
    at = lambda step: learning_rate(step, 104, recipe(schedule=schedule))  # noqa: E731
    assert at(29) == pytest.approx(quarter)
    assert at(54) == pytest.approx(0.55)
    assert at(104) == pytest.approx(0.1)
    assert at(103) > 0.1
    rates = [at(step) for step in range(4, 104)]
    assert rates == sorted(rates, reverse=True)


def test_no_warmup_starts_at_the_highest_rate():
    assert learning_rate(0, 10, recipe(warmup_steps=0)) == 1.0


def test_a_budget_that_is_all_warmup_divides_by_nothing():
    assert learning_rate(3, 4, recipe()) == 1.0
    assert learning_rate(4, 4, recipe()) == 1.0
