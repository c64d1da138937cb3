"""The expansions of a run worked out from names and shapes alone, so that what cannot work is refused first. No torch.

Every expansion is resolved on what the one before it would make, with its copies spread evenly: sizes, and everything
that can be refused, do not depend on which experts are copied.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import Any

from moesaic.checkpoint.headers import TensorInfo
from moesaic.checkpoint.source import Checkpoint
from moesaic.common.errors import MoesaicError
from moesaic.expansion.exact import grown_config
from moesaic.expansion.resolve import ExpandPlan, check_recorded_rule, resolve
from moesaic.families.counting import Shapes, config_shapes
from moesaic.training.growth_recipe import Transition
from moesaic.training.recipe import TrainRecipe


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
    for number, transition in enumerate(recipe.transitions[done:], start=done):
        try:
            _check_routing(transition, recipe)
            plan = replace(resolve_transition(transition, recipe, checkpoint), recorded=recorded)
            recipe.routing.pool_range(top_k=plan.top_k, num_experts=plan.experts)
            check_recorded_rule(plan)
            checkpoint = described(*grown(plan))
            _check_frozen(recipe, checkpoint)
            if plan.experts % recipe.parallel.expert:
                raise MoesaicError(f"experts {plan.experts}: parallel.expert ({recipe.parallel.expert}) must divide it")
        except MoesaicError as error:
            raise MoesaicError(f"expand.{number}: {as_keys(str(error))}") from error
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
    if plan.conversion is not None:
        return config, config_shapes(config)
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


def _check_frozen(recipe: TrainRecipe, result: Checkpoint) -> None:
    for pattern in recipe.optimizer.frozen:
        if not any(fnmatchcase(name, pattern) for name in result.tensors):
            raise MoesaicError(
                f"optimizer.frozen: {pattern!r} matches no parameter of {result.config['model_type']}, which the model "
                "becomes; change the pattern"
            )
