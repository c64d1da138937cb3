"""Verdicts: what an interval says about a claim, and figures against arithmetic done by hand."""

from typing import Literal

import pytest

from moesaic.expansion.measures import Interval
from moesaic.lab.claims import CLAIMS, claims_table
from moesaic.lab.claims.claim import Claim, combine, less, smallest, verdict, within


def _claim(otherwise: Literal["opposite", "not seen"] = "opposite") -> Claim:
    return Claim(says="a", place="b", figure="c", effect=lambda rows: None, otherwise=otherwise)


@pytest.mark.parametrize(
    ("interval", "expected"),
    [
        (Interval(value=1.0, low=0.5, high=1.5), "seen"),
        (Interval(value=1.0, low=-0.5, high=2.5), "undecided"),
        (Interval(value=-1.0, low=-1.5, high=-0.5), "opposite"),
        (Interval(value=1.0, low=None, high=None), "undecided"),
        (None, "not measured"),
    ],
)
def test_verdicts(interval, expected):
    assert verdict(_claim(), interval) == expected
    assert verdict(_claim("not seen"), interval) == expected.replace("opposite", "not seen")


def _rows(*values):
    return [{"seed": seed, "value": value} for seed, value in enumerate(values)]


def test_figures():
    difference = less(_rows(1.0, 2.0, 3.0), _rows(1.5, 2.5, 3.5))
    assert difference == Interval(value=0.5, low=0.5, high=0.5)
    near = within(0.1, _rows(1.0, 2.0), _rows(1.0, 2.0))
    assert near is not None
    assert near.value == pytest.approx(0.1)
    assert combine(lambda a, b: a / b, _rows(4.0, 9.0, 7.0), _rows(2.0, 3.0)) == combine(float, _rows(2.0, 3.0))
    assert combine(lambda a, b: a, _rows(1.0), []) is None
    assert smallest([difference, near]) is near
    assert smallest([difference, None]) is None


@pytest.mark.parametrize("experiment", CLAIMS)
def test_without_numbers_every_claim_is_there_and_not_measured(experiment):
    table = claims_table(experiment, [])
    assert len(table.rows) == len(CLAIMS[experiment])
    assert {row[2] for row in table.rows} <= {"not measured"}


def test_a_collapse_is_a_place_between_coarse_and_scratch():
    def end(model, *values):
        return [
            {"measure": "loss", "stage": "joint", "model": model, "domain": "a", "seed": seed, "value": value}
            for seed, value in enumerate(values)
        ]

    rows = [*end("drop", 3.0, 3.1, 3.0), *end("scratch", 5.0, 5.1, 5.0), *end("drop_fine", 4.9, 5.0, 4.8)]
    shown = {row[0]: row[1:] for row in claims_table("divmoe", rows).rows}
    figure, said = next(cells for says, cells in shown.items() if says.startswith("fine-grained Drop"))
    assert figure.endswith(": 0.4333 ± 0.0717")  # 0.45, 0.45 and 0.4
    assert said == "seen"
