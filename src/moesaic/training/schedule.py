"""Learning rate as a function of the step alone, so that resuming needs nothing but the step."""

import math

from moesaic.training.recipe import OptimizerRecipe


def _cosine(progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def _linear(progress: float) -> float:
    return 1.0 - progress


_DECAYS = {"cosine": _cosine, "linear": _linear}


def learning_rate(step: int, steps: int, recipe: OptimizerRecipe) -> float:
    """Learning rate of `step` (0-based) in a run of `steps`.

    Rises linearly and reaches `lr` with the last warmup step, then falls from `lr` towards `min_lr`, which the step
    after the last would have: with `min_lr: 0` the last step still moves.
    """
    if step < recipe.warmup_steps:
        return recipe.lr * (step + 1) / recipe.warmup_steps
    progress = (step - recipe.warmup_steps) / max(1, steps - recipe.warmup_steps)
    return recipe.min_lr + (recipe.lr - recipe.min_lr) * _DECAYS[recipe.schedule](min(progress, 1.0))
