"""The experiments: each says its steps for a scale and what its numbers mean."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from moesaic_lab.claims import Claim
from moesaic_lab.experiments import divmoe, divmoe_results, emo, emo_results, expand, expand_results, life, operators
from moesaic_lab.plan import Plan
from moesaic_lab.results import Row, Table
from moesaic_lab.scale import Scale

_FLOPS = 25e9
"""Floating-point operations a second of one core, at 6 per active parameter and token: measured, MoE and dense."""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One experiment."""

    question: str
    """What it answers, in a line."""
    plan: Callable[[Scale, str | None, int], Plan]
    """(scale, folder of --data or None, number of seeds) -> steps."""
    tables: Callable[[Sequence[Row]], list[Table]]
    """Rows of numbers -> tables."""
    claims: Sequence[Claim]
    size: Callable[[Scale], tuple[int, int]]
    """Scale -> active parameters of its models (embeddings included), and tokens that each sees."""

    def minutes(self, scale: Scale) -> float:
        """About how many minutes of one core the training of one seed takes, with four domains."""
        tokens = sum(step.tokens for step in self.plan(scale, None, 1).steps)
        return 6 * self.size(scale)[0] * tokens / _FLOPS / 60


EXPERIMENTS: Mapping[str, Experiment] = {
    "emo": Experiment(
        question="can a part of the experts stand for the whole on one domain (EMO)?",
        plan=emo.plan,
        tables=emo_results.tables,
        claims=emo_results.CLAIMS,
        size=emo.size,
    ),
    "divmoe": Experiment(
        question="what is the best start for an MoE of dense specialists (DivMoE)?",
        plan=divmoe.plan,
        tables=divmoe_results.tables,
        claims=divmoe_results.CLAIMS,
        size=divmoe.size,
    ),
    "expand": Experiment(
        question="can few experts become many on the way (Expert Upcycling)?",
        plan=expand.plan,
        tables=expand_results.tables,
        claims=expand_results.CLAIMS,
        size=expand.size,
    ),
    "operators": Experiment(
        question="does any way of making duplicates beat plain copies (Expert Upcycling, appendix D)?",
        plan=operators.plan,
        tables=operators.tables,
        claims=operators.CLAIMS,
        size=expand.size,
    ),
    "life": Experiment(
        question="does a model gain from all of it, one after the other, over training it dense?",
        plan=life.plan,
        tables=life.tables,
        claims=life.CLAIMS,
        size=life.size,
    ),
}
