"""Tables against arithmetic done by hand."""

import math

import pytest

from moesaic_lab.experiments.emo_results import tables as emo_tables
from moesaic_lab.experiments.expand_results import tables as expand_tables
from moesaic_lab.results import difference, interval_of, pivot, seed_values, show, where

_T_2 = 4.302652729911275  # Student's t, 97.5%, 2 degrees of freedom


def _row(seed, value, **labels):
    return {"seed": seed, "value": value, **labels}


def test_interval_over_seeds():
    rows = [_row(0, 1.0, domain="a"), _row(0, 3.0, domain="b"), _row(1, 4.0), _row(2, 6.0)]
    assert seed_values(rows) == {0: 2.0, 1: 4.0, 2: 6.0}
    interval = interval_of(rows)
    assert interval is not None
    assert interval.value == 4.0
    assert interval.high == pytest.approx(4.0 + _T_2 * 2.0 / math.sqrt(3))
    assert show(interval) == "4.000 ± 4.968"
    assert show(interval_of(rows[:2])) == "2.000"
    assert show(None) == ""


def test_differences_are_paired_by_seed():
    left = [_row(0, 1.0), _row(1, 2.0), _row(2, 9.0), _row(3, 7.0)]
    right = [_row(0, 0.5), _row(1, 1.5), _row(2, 8.5)]
    assert show(difference(left, right)) == "0.500 ± 0.000"
    assert difference(left, []) is None


def test_pivot():
    rows = [
        _row(0, 1.0, model="b", domain="x"),
        _row(0, 2.0, model="a", domain="y"),
        _row(0, 4.0, model="b", domain="y"),
    ]
    table = pivot(rows, title="t", note="n")
    assert table.header == ("model", "x", "y", "mean")
    assert table.rows == (("b", "1.000", "4.000", "2.500"), ("a", "", "2.000", "2.000"))


def _grown(losses, treatment, measure="loss"):
    labels = {"measure": measure, "model": "grown", "treatment": treatment, "share": 0.5, "from": 8, "experts": 16}
    return [_row(seed, value, **labels) for seed, value in enumerate(losses)]


def _fixed(losses, experts):
    return [_row(s, v, measure="loss", model="fixed", experts=experts) for s, v in enumerate(losses)]


def test_gap_closure_is_printed_only_where_there_is_a_gap():
    rows = [
        *_fixed([3.0, 3.1, 3.2], 8),
        *_grown([2.9, 3.0, 3.1], "uniform"),
        *_grown([2.95, 3.05, 3.15], "gradient_norm"),
    ]
    seen = expand_tables([*rows, *_fixed([2.8, 2.9, 3.0], 16)])
    closure = next(table for table in seen if table.title == "Gap closure")
    assert closure.rows == (("0.5 (100%)", "50% (50% to 50%)", "25% (25% to 25%)"),)
    unclear = expand_tables([*rows, *_fixed([3.2, 3.1, 2.9], 16)])
    closure = next(table for table in unclear if table.title == "Gap closure")
    assert closure.rows == (("0.5 (100%)", "gap not seen", "gap not seen"),)


def test_pairs_say_which_way_is_better():
    rows = [*_fixed([3.0], 8), *_grown([3.0, 3.1, 3.3], "uniform"), *_grown([2.9, 3.0, 3.2], "gradient_norm")]
    pairs = next(table for table in expand_tables(rows) if table.title.startswith("One way"))
    assert pairs.header == ("tau/T", "uniform - gradient_norm")
    assert pairs.rows[0][1] == "0.1000 ± 0.0000 (gradient_norm is better)"


def test_increase_of_the_loss_with_fewer_experts():
    rows = [
        *(_row(s, 3.0 + s, measure="subset_loss", model="emo", domain="a", share=1.0) for s in range(3)),
        *(
            _row(s, 3.2 + s, measure="subset_loss", model="emo", domain="a", share=0.25, method="router", documents=n)
            for s in range(3)
            for n in (1, 5)
        ),
        *(
            _row(s, 9.0, measure="subset_loss", model="emo", domain="a", share=0.25, method="random", documents=None)
            for s in range(3)
        ),
    ]
    table = next(one for one in emo_tables(rows) if one.title == "What fewer experts cost")
    assert table.rows == (("emo", "4.000 ± 2.484", "0.200 ± 0.000"),)


def test_where_takes_a_missing_label_as_none():
    assert where([_row(0, 1.0), _row(1, 2.0, share=None)], share=None) == [_row(0, 1.0), _row(1, 2.0, share=None)]
