"""The expansions of a run, worked out from names and shapes alone: what cannot work is refused, what it costs is told.

Every expansion is resolved on what the one before it would make, with its copies spread evenly: sizes, and everything
that can be refused, do not depend on which experts are copied. No torch.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

from moesaic.checkpoint.headers import TensorInfo
from moesaic.checkpoint.source import Checkpoint
from moesaic.common.errors import MoesaicError
from moesaic.expansion.costs import PAPER_RATIO, Phase, cost_table, saving_of_phases
from moesaic.expansion.exact import grown_config
from moesaic.expansion.resolve import ExpandPlan, check_recorded_rule, resolve
from moesaic.families.costs import flops_per_token, number
from moesaic.families.counting import ParameterCount, Shapes, count_shapes
from moesaic.training.recipe import TrainRecipe
from moesaic.training.schedule import Transition, positions


def described(config: Mapping[str, Any], shapes: Shapes) -> Checkpoint:
    """A checkpoint that is only described: no tensor of it can be read."""
    tensors = {
        name: TensorInfo(name=name, dtype="F32", shape=tuple(shape), file=Path(), offset=0, nbytes=4 * prod(shape))
        for name, shape in shapes.items()
    }
    # A name that no folder has: nothing is looked up beside it.
    return Checkpoint(path=Path("\0"), name="the model", revision=None, config=dict(config), tensors=tensors)


def grown_plans(
    recipe: TrainRecipe, start: Checkpoint, *, recorded: Mapping[str, Any] | None = None, done: int = 0
) -> list[ExpandPlan]:
    """The expansions that are left after the first `done`, resolved one after the other.

    Args:
        recipe: of the run.
        start: the model as it is now.
        recorded: routing rule and selection bias on it, as moesaic.json would record them.
        done: expansions that it has gone through.

    Raises: `MoesaicError` where one cannot work; the line starts with `expand.NUMBER`.
    """
    plans: list[ExpandPlan] = []
    checkpoint = start
    for index, transition in enumerate(recipe.transitions[done:], start=done):
        try:
            _check_routing(transition, recipe)
            plan = replace(resolve_transition(transition, recipe, checkpoint), recorded=recorded)
            recipe.routing.pool_range(top_k=plan.top_k, num_experts=plan.experts)
            check_recorded_rule(plan)
            checkpoint = described(*grown(plan))
            _check_patterns(recipe, checkpoint)
            if plan.experts % recipe.parallel.expert:
                raise MoesaicError(f"experts {plan.experts}: parallel.expert ({recipe.parallel.expert}) must divide it")
        except MoesaicError as error:
            raise MoesaicError(f"expand.{index}: {as_keys(str(error))}") from error
        plans.append(plan)
    return plans


def resolve_transition(transition: Transition, recipe: TrainRecipe, checkpoint: Checkpoint) -> ExpandPlan:
    """The plan of one expansion of `checkpoint`."""
    return resolve(transition.as_recipe(str(checkpoint.path), recipe.seed), opener=lambda _: checkpoint)


def as_keys(message: str) -> str:
    """Flags of `moesaic expand` in a message as keys of the recipe."""
    return re.sub(r"--([a-z]+(?:-[a-z]+)*)", lambda match: match[1].replace("-", "_"), message)


def grown(plan: ExpandPlan) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """Config and shapes of the result of a plan."""
    sources = {layer: plan.sources(copies) for layer, copies in plan.copies({}).items()}
    config = grown_config(plan, sources)
    shapes = {name: info.shape for name, info in plan.checkpoint.tensors.items()}
    for layer in plan.model.layers:
        for tensor in layer.expert_tensors:
            old = [shapes.pop(name) for name in tensor.names(layer.num_experts)]
            if tensor.axis is None:
                shapes |= dict.fromkeys(tensor.names(plan.experts), old[0])
            else:
                shape = list(old[0])
                shape[tensor.axis] = plan.experts
                shapes[tensor.name] = tuple(shape)
    return config, shapes


def _check_routing(transition: Transition, recipe: TrainRecipe) -> None:
    rule = recipe.routing.rule
    if recipe.routing.expert_groups is not None:
        raise MoesaicError(
            "routing.expert_groups names the group of each expert, and there will be more experts; put the groups into "
            "the model's config"
        )
    if transition.routing == "one_per_copy_group" and rule is not None:
        raise MoesaicError(f"routing one_per_copy_group: routing.rule {rule} would go on; leave routing.rule out")


def _check_patterns(recipe: TrainRecipe, result: Checkpoint) -> None:
    optimizer = recipe.optimizer
    patterns = [("frozen", one) for one in optimizer.frozen] + [("no_decay", one) for one in optimizer.no_decay or ()]
    for key, pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in result.tensors):
            raise MoesaicError(
                f"optimizer.{key}: {pattern!r} matches no parameter of {result.config['model_type']}, which the model "
                "becomes; change the pattern"
            )


# --- sizes and savings ------------------------------------------------------------------------------------------------


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
