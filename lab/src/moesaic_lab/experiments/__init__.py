"""The experiments: each says its steps for a scale and what its numbers mean."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from moesaic_lab.experiments import divmoe, emo, expand, life
from moesaic_lab.plan import Plan
from moesaic_lab.rows import Row
from moesaic_lab.scale import Scale
from moesaic_lab.tables import Table


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One experiment."""

    question: str
    """What it answers, in a line."""
    plan: Callable[[Scale, str | None, int], Plan]
    """(scale, folder of --data or None, number of seeds) -> steps."""
    tables: Callable[[Sequence[Row]], list[Table]]
    """Rows of numbers -> tables."""


EXPERIMENTS: Mapping[str, Experiment] = {
    "emo": Experiment(
        question="can a part of the experts stand for the whole on one domain (EMO)?",
        plan=emo.plan,
        tables=emo.tables,
    ),
    "divmoe": Experiment(
        question="what is the best start for an MoE of dense specialists (DivMoE)?",
        plan=divmoe.plan,
        tables=divmoe.tables,
    ),
    "expand": Experiment(
        question="can few experts become many on the way (Expert Upcycling)?",
        plan=expand.plan,
        tables=expand.tables,
    ),
    "life": Experiment(
        question="does a model gain from all of it, one after the other, over training it dense?",
        plan=life.plan,
        tables=life.tables,
    ),
}
