"""The paper's cost model: its own figures, and identities."""

import pytest

from moesaic.expansion.costs import (
    CPT_BUDGETS,
    PAPER_RATIO,
    Phase,
    cost_table,
    cpt_of_share,
    saving,
    saving_of_phases,
    share_of_cpt,
)


def test_the_papers_gpu_hours():
    """27,888 of 41,328 GPU-hours at tau = 2T/3 is s_E/s_mE = 0.512; tau = T/2 then saves 24%."""
    assert 1 - saving(2 / 3, ratio=PAPER_RATIO) == pytest.approx(27_888 / 41_328, rel=1e-3)
    assert saving(2 / 3, ratio=PAPER_RATIO) == pytest.approx(0.325, abs=1e-3)
    assert saving(1 / 2, ratio=PAPER_RATIO) == pytest.approx(0.244, abs=1e-3)


@pytest.mark.parametrize("tau", [0.0, 0.3, 1.0])
def test_saving_is_one_minus_the_quotient_of_the_costs(tau):
    up, fixed = tau * 90 * 2.0 + (90 - tau * 90) * 5.0, 90 * 5.0
    assert saving(tau, ratio=0.4) == pytest.approx(1 - up / fixed)


def test_cpt_budgets_are_the_papers_shares():
    assert [share_of_cpt(cpt) for cpt in CPT_BUDGETS] == pytest.approx([0.25, 0.5, 0.67, 0.8, 0.91], abs=5e-3)
    assert [cpt_of_share(share_of_cpt(cpt)) for cpt in CPT_BUDGETS] == pytest.approx(CPT_BUDGETS)


def test_table():
    rows = cost_table(PAPER_RATIO)
    assert [row.cpt for row in rows] == list(CPT_BUDGETS)
    assert all(row.upcycled + row.saving == pytest.approx(1) for row in rows)
    assert [row.saving for row in rows] == sorted(row.saving for row in rows)  # the later, the cheaper


def test_phases_of_one_and_of_two_expansions():
    two = [Phase(experts=8, steps=60, cost=1.0), Phase(experts=16, steps=30, cost=2.0)]
    assert saving_of_phases(two) == pytest.approx(saving(2 / 3, ratio=0.5))
    three = [*two, Phase(experts=32, steps=10, cost=4.0)]
    assert saving_of_phases(three) == pytest.approx(1 - (60 + 60 + 40) / 400)
