"""`expand:` in a training recipe: when a run grows its experts, and how. No torch."""

import math
from dataclasses import dataclass
from typing import Literal

from moesaic.errors import MoesaicError
from moesaic.expansion.allocation import Allocation
from moesaic.expansion.recipe import ExpandRecipe, ExpertOp, RouterOp, Routing, UtilityName

OptimizerState = Literal["reset", "copy", "scale"]


@dataclass(frozen=True, kw_only=True)
class Transition:
    """One expansion in mid-training (Expert Upcycling, section 3), after one of three: `step`, `tokens`, `fraction`."""

    step: int | None = None
    """After so many steps of the run."""
    tokens: int | None = None
    """After so many tokens; rounded up to whole steps."""
    fraction: float | None = None
    """After this share of the run's steps (tau/T of the paper); rounded to whole steps."""
    experts: int
    """Routed experts per MoE layer from then on."""
    utility: UtilityName = "gradient_norm"
    """What decides which experts are copied."""
    utility_batches: int = 10
    """Gradients are averaged over the batches of so many steps, the last ones before the expansion."""
    allocation: Allocation = "greedy"
    """How copies are given out by utility. `uniform` utilities go round robin whatever this says."""
    cap: int = 3
    """Most copies that are added of one expert."""
    routing: Routing = "plain"
    """`plain`: the model's own top-k. `one_per_copy_group`: a token uses at most one of the copies of an expert."""
    top_k: int | None = None
    """Experts that each token uses from then on. Default: as before."""
    expert_op: ExpertOp = "copy"
    """What a duplicate's weights start from."""
    router_op: RouterOp = "copy"
    """What a duplicate's router row starts from."""
    delta: float = 1e-3
    """Standard deviation of the noise that tells copies apart, absolute: on selection biases, else on router rows."""
    optimizer: OptimizerState = "reset"
    """Moments of AdamW: all zero and its step count too (the paper); each copy has its source's; or these divided among
    an expert's m replicas, as its gradient is: first moments by m, second ones by m squared."""
    seed: int | None = None
    """Seed of noise and draws. Default: the run's."""

    def __post_init__(self) -> None:
        given = [name for name in ("step", "tokens", "fraction") if getattr(self, name) is not None]
        if len(given) != 1:
            what = " and ".join(given) + " are given" if given else "no moment is given"
            raise MoesaicError(f"{what}: give one of step, tokens and fraction")
        for name in ("step", "tokens", "fraction"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise MoesaicError(f"{name} must be greater than 0, got {value}; `moesaic expand` grows a model before")
        if self.fraction is not None and self.fraction >= 1:
            raise MoesaicError(f"fraction must be less than 1, got {self.fraction}; nothing would be trained after it")
        self.as_recipe("", 0)  # refuses values that are wrong whatever the model is

    def as_recipe(self, checkpoint: str, seed: int) -> ExpandRecipe:
        """The same as `moesaic expand` takes it; `seed` is the run's."""
        return ExpandRecipe(
            checkpoint=checkpoint,
            experts=self.experts,
            utility=self.utility,
            utility_batches=self.utility_batches,
            allocation=self.allocation,
            cap=self.cap,
            routing=self.routing,
            top_k=self.top_k,
            expert_op=self.expert_op,
            router_op=self.router_op,
            delta=self.delta,
            seed=seed if self.seed is None else self.seed,
        )

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
