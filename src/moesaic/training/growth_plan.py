"""What the expansions of a run will make of its model, and what they save. No torch."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from moesaic.expansion.costs import PAPER_RATIO, Phase, cost_table, saving_of_phases
from moesaic.families.costs import flops_per_token, number
from moesaic.families.counting import ParameterCount, Shapes, count_shapes
from moesaic.training.growth_check import described, grown, grown_plans
from moesaic.training.growth_recipe import positions
from moesaic.training.recipe import TrainRecipe


@dataclass(frozen=True, kw_only=True)
class PhasePlan:
    """The steps between two expansions."""

    steps: int | None
    """`None` where the length of the data decides."""
    parameters: ParameterCount
    flops_per_token: int
    """Forward and backward, recomputation not counted."""


@dataclass(frozen=True, kw_only=True)
class GrowthPlan:
    """A run with expansions, against one that has its last size from the start."""

    phases: tuple[PhasePlan, ...]
    shapes: Shapes
    """Of the model at the end."""
    config: Mapping[str, Any]

    @property
    def ratios(self) -> dict[str, float]:
        """s_E/s_mE of the first and the last size, by what the cost of a step is taken to follow.

        `flops`: steps that compute. `parameters`: steps that move weights, gradients and moments, or wait for others
        that do. `paper`: what the paper's GPU-hours come to, 7B to 13B.
        """
        first, last = self.phases[0], self.phases[-1]
        return {
            "flops": first.flops_per_token / last.flops_per_token,
            "parameters": first.parameters.total / last.parameters.total,
            "paper": PAPER_RATIO,
        }

    @property
    def savings(self) -> dict[str, float | None]:
        """Share of the cost that this run saves, by what the cost of a step is taken to follow."""
        return {
            "flops": self._saving([phase.flops_per_token for phase in self.phases]),
            "parameters": self._saving([phase.parameters.total for phase in self.phases]),
        }

    def _saving(self, costs: list[int]) -> float | None:
        phases = []
        for phase, cost in zip(self.phases, costs, strict=True):
            if phase.steps is None:
                return None
            phases.append(Phase(experts=phase.parameters.num_experts, steps=phase.steps, cost=cost))
        return saving_of_phases(phases)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        tables = {name: [asdict(row) for row in cost_table(ratio)] for name, ratio in self.ratios.items()}
        phases = [
            {"steps": phase.steps, "flops_per_token": phase.flops_per_token, "parameters": phase.parameters.to_dict()}
            for phase in self.phases
        ]
        return {"phases": phases, "ratios": self.ratios, "savings": self.savings, "tables": tables}

    def lines(self) -> list[str]:
        """Text for people."""
        rows = []
        for phase in self.phases:
            count = phase.parameters
            steps = "some steps" if phase.steps is None else f"{phase.steps:,} steps"
            rows.append(
                f"  {steps} with {count.num_experts} experts, {count.top_k} active: {number(count.total)} parameters, "
                f"{number(count.active)} active, {phase.flops_per_token / 1e9:.2f} GFLOP per token"
            )
        ratios = self.ratios
        rows += [
            f"  cost against {self.phases[-1].parameters.num_experts} experts from the start (C_up / C_fixed), where a "
            "step costs in proportion to its",
            f"    {'CPT':>8}  {'tau/T':>5}  {'FLOPs':>6}  {'parameters':>10}  GPU-hours (paper, 7B to 13B)",
        ]
        tables = zip(*(cost_table(ratio) for ratio in ratios.values()), strict=True)
        for flops, parameters, paper in tables:
            rows.append(
                f"    {flops.cpt:>8.0%}  {flops.share:>5.2f}  {flops.upcycled:>6.1%}  {parameters.upcycled:>10.1%}  "
                f"{paper.upcycled:.1%}"
            )
        savings = self.savings
        if savings["flops"] is not None and savings["parameters"] is not None:
            share = self.phases[0].steps or 0
            total = sum(phase.steps or 0 for phase in self.phases)
            rows.append(
                f"    {'this run':>8}  {share / total:>5.2f}  {1 - savings['flops']:>6.1%}  "
                f"{1 - savings['parameters']:>10.1%}"
            )
        return rows


def plan_growth(recipe: TrainRecipe, shapes: Shapes, config: Mapping[str, Any]) -> GrowthPlan | None:
    """Work out the expansions of a recipe; `None` without any.

    Raises: `MoesaicError` for an expansion that cannot work.
    """
    if not recipe.transitions:
        return None
    sizes = [(dict(config), shapes)]
    sizes += [grown(plan) for plan in grown_plans(recipe, described(config, shapes))]
    lengths: list[int | None] = [None] * len(sizes)
    if recipe.budget_steps is not None:
        ends = positions(recipe.transitions, steps=recipe.budget_steps, tokens_per_step=recipe.batch.tokens)
        moments = (0, *ends, recipe.budget_steps)
        lengths = [end - start for start, end in pairwise(moments)]
    phases = tuple(
        PhasePlan(
            steps=steps,
            parameters=count_shapes(of_phase, settings),
            flops_per_token=3 * flops_per_token(of_phase, settings, recipe.data.sequence_length),
        )
        for steps, (settings, of_phase) in zip(lengths, sizes, strict=True)
    )
    return GrowthPlan(phases=phases, shapes=sizes[-1][1], config=sizes[-1][0])
