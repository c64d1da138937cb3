"""What growing a model in mid-training costs and saves (Expert Upcycling, section 3). No torch.

T steps in all, of which the first tau with E experts; `small` and `large` are the costs of one step with E and with mE
experts, in any unit (GPU-hours, FLOPs, bytes). CPT is the training after the expansion, as a share of that before it:
(T - tau) / tau.
"""

from collections.abc import Sequence
from dataclasses import dataclass

CPT_BUDGETS = (3.0, 1.0, 0.5, 0.25, 0.1)
"""The paper's: 300%, 100%, 50%, 25% and 10%, so tau/T of 0.25, 0.5, 0.67, 0.8 and 0.91."""
PAPER_RATIO = 0.512
"""s_E / s_mE of the paper's 7B and 13B: 27,888 of 41,328 GPU-hours at tau = 2T/3."""


def saving(share: float, *, ratio: float) -> float:
    """`1 - C_up / C_fixed = tau/T * (1 - s_E/s_mE)`, for `share` = tau/T and `ratio` = s_E/s_mE.

    `C_up = tau * s_E + (T - tau) * s_mE`; `C_fixed = T * s_mE` has the large model in all steps.
    """
    assert 0 <= share <= 1
    return share * (1 - ratio)


def share_of_cpt(cpt: float) -> float:
    """tau/T of a CPT budget: `1 / (1 + CPT)`."""
    return 1 / (1 + cpt)


def cpt_of_share(share: float) -> float:
    """The inverse: `(T - tau) / tau`."""
    return (1 - share) / share


@dataclass(frozen=True, kw_only=True)
class CostRow:
    """One CPT budget; costs are in units of the fixed run's."""

    cpt: float
    share: float
    """tau/T."""
    upcycled: float
    """`C_up / C_fixed`."""
    saving: float
    """`1 - upcycled`."""


def cost_table(ratio: float, budgets: Sequence[float] = CPT_BUDGETS) -> list[CostRow]:
    """A row per CPT budget, for `ratio` = s_E/s_mE."""
    rows = []
    for cpt in budgets:
        share = share_of_cpt(cpt)
        saved = saving(share, ratio=ratio)
        rows.append(CostRow(cpt=cpt, share=share, upcycled=1 - saved, saving=saved))
    return rows


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Steps of a run with one number of experts."""

    experts: int
    steps: int
    cost: float
    """Of one step."""


def saving_of_phases(phases: Sequence[Phase]) -> float:
    """What a run with any number of expansions saves against one that has its last size from the start."""
    total = sum(phase.steps for phase in phases)
    spent = sum(phase.steps * phase.cost for phase in phases)
    return 1 - spent / (total * phases[-1].cost)
