"""When things happen in a run, from the step alone: the learning rate, and the expansions of `expand:`. No torch."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from moesaic.common.errors import MoesaicError
from moesaic.expansion.recipe import ExpandRecipe, Growth, UtilityName

if TYPE_CHECKING:
    from moesaic.training.recipe import OptimizerRecipe

OptimizerState = Literal["reset", "copy", "scale", "adaptive_scale", "interpolate"]


def refuse_long_warmup(warmup: int, steps: int, reason: str) -> None:
    """Refuse a warmup that is longer than the run; `reason` is what limits that."""
    if warmup > steps:
        raise MoesaicError(f"optimizer.warmup_steps ({warmup}) exceeds {reason} ({steps} steps); lower it")


_DECAYS = {
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "linear": lambda progress: 1.0 - progress,
}


def learning_rate(step: int, steps: int, recipe: "OptimizerRecipe") -> float:
    """Learning rate of `step` (0-based) in a run of `steps`.

    Rises linearly and reaches `lr` with the last warmup step, then falls from `lr` towards `min_lr`, which the step
    after the last would have: with `min_lr: 0` the last step still moves.
    """
    if step < recipe.warmup_steps:
        return recipe.lr * (step + 1) / recipe.warmup_steps
    progress = (step - recipe.warmup_steps) / max(1, steps - recipe.warmup_steps)
    return recipe.min_lr + (recipe.lr - recipe.min_lr) * _DECAYS[recipe.schedule](min(progress, 1.0))


# --- expansions -------------------------------------------------------------------------------------------------------


def check_seed(seed: int) -> None:
    """Refuse a seed that torch's generators do not take."""
    if not 0 <= seed < 1 << 63:
        raise MoesaicError(f"seed must be at least 0 and less than 2**63, got {seed}")


@dataclass(frozen=True, kw_only=True)
class Transition(Growth):
    """One expansion in mid-training (Expert Upcycling, section 3), after one of three: `step`, `tokens`, `fraction`."""

    step: int | None = None
    """After so many steps of the run."""
    tokens: int | None = None
    """After so many tokens; rounded up to whole steps."""
    fraction: float | None = None
    """After this share of the run's steps (tau/T of the paper); rounded to whole steps."""
    utility: UtilityName = "gradient_norm"
    """What decides which experts are copied."""
    optimizer: OptimizerState = "reset"
    """Moments of AdamW: all zero and its step count too (the paper); each copy has its source's; these divided among
    an expert's m replicas, as its gradient is: first moments by m, second ones by m squared; half the source's, less
    where the copy differs from it; or the mean of the source's and the next expert's."""
    seed: int | None = None
    """Seed of noise and draws. Default: the run's."""

    def __post_init__(self) -> None:
        """Refuse values that are wrong whatever the run is; the message starts with the field's name."""
        super().__post_init__()
        given = [name for name in ("step", "tokens", "fraction") if getattr(self, name) is not None]
        if len(given) != 1:
            what = f"more than one moment is given ({', '.join(given)})" if given else "no moment is given"
            raise MoesaicError(f"{what}: give one of step, tokens and fraction")
        for name in ("step", "tokens", "fraction"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise MoesaicError(f"{name} must be greater than 0, got {value}; `moesaic expand` grows a model before")
        if self.fraction is not None and self.fraction >= 1:
            raise MoesaicError(f"fraction must be less than 1, got {self.fraction}; nothing would be trained after it")
        if self.seed is not None:
            check_seed(self.seed)

    def as_recipe(self, checkpoint: str, seed: int) -> ExpandRecipe:
        """The same as `moesaic expand` takes it; `seed` is the run's."""
        seed = seed if self.seed is None else self.seed
        return ExpandRecipe(checkpoint=checkpoint, utility=self.utility, seed=seed, **self.choices)

    def position(self, *, steps: int, tokens_per_step: int) -> int:
        """The number of steps after which it comes, in a run of `steps`."""
        if self.step is not None:
            return self.step
        if self.tokens is not None:
            return math.ceil(self.tokens / tokens_per_step)
        assert self.fraction is not None
        return max(1, round(self.fraction * steps))


def positions(transitions: tuple[Transition, ...], *, steps: int, tokens_per_step: int) -> tuple[int, ...]:
    """After how many steps each expansion of a run of `steps` comes.

    Raises: `MoesaicError` for one that is not before the end of the run, or not after the one before it.
    """
    found: list[int] = []
    for number, transition in enumerate(transitions):
        position = transition.position(steps=steps, tokens_per_step=tokens_per_step)
        if position >= steps:
            raise MoesaicError(
                f"expand.{number}: is after step {position:,}, but the run has {steps:,} steps, so nothing would be "
                "trained after it; choose an earlier moment"
            )
        if found and position <= found[-1]:
            raise MoesaicError(
                f"expand.{number}: is after step {position:,}, but the expansion before it is after step "
                f"{found[-1]:,}; put them in order, with a step between them"
            )
        found.append(position)
    return tuple(found)
