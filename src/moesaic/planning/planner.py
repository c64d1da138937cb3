"""`plan`: find out what was given and hand it to the plan of its kind."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesaic.checkpoint.source import Checkpoint, open_headers
from moesaic.common.errors import MoesaicError
from moesaic.common.recipe import load_recipe
from moesaic.common.yaml_text import parse_yaml, read_yaml
from moesaic.planning.checkpoints import plan_checkpoint
from moesaic.planning.conversion import plan_upcycle
from moesaic.planning.report import PlanReport
from moesaic.recipes import read_recipe, shipped_recipes
from moesaic.upcycling.recipe import UpcycleRecipe

if TYPE_CHECKING:
    from moesaic.training.planning import TrainPlan

DEFAULT_CONTEXT = 4096
"""Tokens of the sequence that FLOPs and cache are stated for."""

RecipePlan = Callable[[Path | Mapping[str, Any], str, int], "PlanReport | TrainPlan"]


def _plan_upcycle_recipe(source: Path | Mapping[str, Any], subject: str, context: int) -> PlanReport:
    return plan_upcycle(load_recipe(UpcycleRecipe, source), subject=subject, context=context)


def _plan_train_recipe(source: Path | Mapping[str, Any], subject: str, context: int) -> "TrainPlan":
    # `training.planning` counts on this package: imported at the top, the two would wait for each other.
    from moesaic.training.planning import plan_train
    from moesaic.training.recipe import TrainRecipe

    del context  # a training recipe says itself how long its sequences are
    return plan_train(load_recipe(TrainRecipe, source), subject=subject)


RECIPES: Mapping[str, RecipePlan] = {"method": _plan_upcycle_recipe, "optimizer": _plan_train_recipe}
"""A key that only one kind of recipe has -> the plan of that kind."""


def plan(
    source: str | Path | Mapping[str, Any] | UpcycleRecipe | Checkpoint, *, context: int | None = None
) -> "PlanReport | TrainPlan":
    """Return what a checkpoint or a recipe amounts to, from headers and configs alone.

    Args:
        source: a checkpoint (folder, hub id `org/name[@revision]`, or opened), or a recipe (YAML file, name that
            `moesaic recipes list` shows, mapping, or `UpcycleRecipe`).
        context: sequence length in tokens that FLOPs and the key/value cache are stated for; default 4096.

    Returns:
        Parameters, bytes, FLOPs, memory; for a recipe also disk, download and expected minutes.

    Raises:
        MoesaicError: nothing is there, it cannot be read, or it is neither a checkpoint nor a recipe.
    """
    context = DEFAULT_CONTEXT if context is None else context
    if context < 1:
        raise MoesaicError(f"context {context}: must be at least 1 token")
    if isinstance(source, Checkpoint):
        return plan_checkpoint(source, context=context)
    if isinstance(source, UpcycleRecipe):
        return plan_upcycle(source, subject=f"{source.method} of {source.base}", context=context)
    if isinstance(source, Mapping):
        return _plan_recipe(source, source, "recipe", context)
    path = Path(source)
    if path.suffix in {".yaml", ".yml"}:
        return _plan_recipe(path, read_yaml(path), str(source), context)
    if str(source) in {recipe.name for recipe in shipped_recipes()} and not path.exists():
        content = parse_yaml(read_recipe(str(source)), str(source))
        return _plan_recipe(content, content, str(source), context)
    return plan_checkpoint(open_headers(source), context=context)


def _plan_recipe(
    source: Path | Mapping[str, Any], content: Mapping[str, Any], subject: str, context: int
) -> "PlanReport | TrainPlan":
    for key, planner in RECIPES.items():
        if key in content:
            return planner(source, subject, context)
    raise MoesaicError(
        f"{subject}: no recipe that can be planned: it has none of the keys {', '.join(RECIPES)} that tell its kind"
    )
