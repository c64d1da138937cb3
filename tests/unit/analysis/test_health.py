"""The verdict and its words."""

import numpy as np
import pytest

from moesaic.analysis.health import RULE, effective_experts, layer_verdict, levels, model_verdict, normalised_entropy
from moesaic.analysis.inspection import level_name


def level_of(counts: list[int], active: int) -> str:
    counts_SLE = np.array([[counts]])
    effective = effective_experts(counts_SLE / counts_SLE.sum())
    return level_name(levels(counts_SLE, effective, (counts_SLE == 0).sum(axis=-1), active)[0, 0])


@pytest.mark.parametrize(
    ("counts", "active", "level"),
    [
        ([1000] * 8, 2, "healthy"),
        ([1200, 900, 1100, 800, 1000, 1000, 950, 1050], 2, "healthy"),
        ([4000, 4000, 0, 0, 0, 0, 0, 0], 2, "collapsed"),
        ([3000, 3000, 667, 667, 667, 667, 666, 666], 2, "collapsed"),  # DivMoE, 5.2: 60% in two experts
        ([2000, 2000, 667, 667, 667, 667, 666, 666], 2, "skewed"),
        ([1000] * 7 + [0], 2, "skewed"),
        ([1] * 7 + [0], 2, "healthy"),  # too few selections for a dead expert to mean anything
        ([1000] * 3 + [0] * 5, 2, "collapsed"),
        ([1000, 1000], 2, "healthy"),  # nothing to choose
        ([1000, 1000, 1000, 1000], 1, "healthy"),
        ([4000, 0, 0, 0], 1, "collapsed"),
        ([1000] * 128, 8, "healthy"),
        ([1000] * 8 + [10] * 120, 8, "collapsed"),
    ],
)
def test_levels(counts: list[int], active: int, level: str):
    assert level_of(counts, active) == level


def test_a_verdict_says_its_figures():
    load = np.array([0.5, 0.5, 0.0, 0.0])
    verdict = layer_verdict(5, "collapsed", load, 2)
    assert verdict.sentence == (
        "layer 5 is collapsed: the load is that of 2.0 of 4 experts, the 2 busiest experts take 100%, "
        "2 experts are never selected"
    )
    assert layer_verdict(0, "healthy", np.array([0.5, 0.5]), 1).sentence == (
        "layer 0 is healthy: the load is that of 2.0 of 2 experts, the busiest expert takes 50%"
    )


def test_the_model_is_as_its_worst_layer():
    bad = layer_verdict(1, "collapsed", np.array([1.0, 0.0]), 1)
    good = layer_verdict(0, "healthy", np.array([0.5, 0.5]), 1)
    found = model_verdict([good, bad], np.array([2.0, 1.0]))
    assert found.level == "collapsed"
    assert found.sentence == f"of 2 MoE layers, 1 collapsed; the worst: {bad.sentence}"
    assert model_verdict([good], np.array([2.0])).sentence == "the only MoE layer uses its experts evenly"
    assert model_verdict([bad], np.array([1.0])).sentence == bad.sentence


def test_the_layer_that_is_named_is_the_worst_and_not_the_first():
    skewed = [layer_verdict(layer, "skewed", np.array([0.5, 0.5]), 1) for layer in (0, 1)]
    bad = [layer_verdict(layer, "collapsed", np.array([0.5, 0.5]), 1) for layer in (2, 3, 4)]
    found = model_verdict([*skewed, *bad], np.array([1.0, 1.0, 1.9, 1.2, 1.5]))
    assert found.sentence.startswith("of 5 MoE layers, 3 collapsed and 2 skewed; the worst: layer 3 is collapsed")


def test_entropy_of_nothing_is_no_number():
    found = normalised_entropy(np.array([[0.5, 0.5], [1.0, 0.0], [0.0, 0.0]]))
    assert found[:2].tolist() == [1.0, 0.0]
    assert np.isnan(found[2])


def test_the_rule_states_its_thresholds():
    for figure in ("0.25", "0.45", "0.60", "0.20", "20 selections"):
        assert figure in RULE
