"""A run between two steps: what it has, what it has done, and how that is saved."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from moesaic.common.recipe import recipe_values
from moesaic.data.dataset import PackedDataset, ValidationSet
from moesaic.data.packing import PackedBatch
from moesaic.training.metrics import MetricsLog
from moesaic.training.parallel import World
from moesaic.training.recipe import TrainRecipe
from moesaic.training.report import Console, Throughput
from moesaic.training.state import RunState, prune_states, save_state
from moesaic.training.step import StepResult, Trainable
from moesaic.training.tensors import optimizer_tensors_of, weights_of
from moesaic.training.validate import DomainLoss


@dataclass(kw_only=True)
class Run:
    """A run between two steps."""

    out: Path
    trainable: Trainable
    tokenizer: PreTrainedTokenizerBase
    data: PackedDataset
    held_out: tuple[ValidationSet, ...]
    steps: int
    """Of the whole run."""
    step: int
    """Steps done."""
    log: MetricsLog
    console: Console
    throughput: Throughput
    expansion_steps: tuple[int, ...]
    """Steps after which the experts grow."""
    expansions: list[dict[str, Any]]
    """Records of the expansions done."""
    reset_step: int
    """Steps done when the optimizer's moments were last put to zero."""
    quiet: bool
    last: StepResult | None = None
    validation: dict[str, DomainLoss] | None = None
    """Measured after the last step done; `None` where it was not."""

    @property
    def recipe(self) -> TrainRecipe:
        """What is trained, and how."""
        return self.trainable.recipe

    @property
    def world(self) -> World:
        """The ranks."""
        return self.trainable.world

    @property
    def states(self) -> Path:
        """Folder of the run state."""
        return self.out / "state"

    @property
    def tokens(self) -> int:
        """Positions that the steps done have seen."""
        return self.step * self.recipe.batch.tokens

    @property
    def must_expand(self) -> bool:
        """Whether the experts grow before the next step."""
        done = len(self.expansions)
        return done < len(self.expansion_steps) and self.expansion_steps[done] == self.step

    def micro_batches(self, step: int) -> list[PackedBatch]:
        """This rank's part of the batch of a step (0-based)."""
        count, world = self.recipe.micro_steps, self.world
        return [
            self.data.batch(step, micro_step=index, num_micro_steps=count, rank=world.rank, world_size=world.size)
            for index in range(count)
        ]


def throughput_of(trainable: Trainable) -> Throughput:
    """What turns the seconds of a step into FLOP/s."""
    return Throughput(
        trainable.masters.parameters,
        trainable.model.config,
        sequence_length=trainable.recipe.data.sequence_length,
        precision=trainable.recipe.precision,
        device=trainable.world.device,
        ranks=trainable.world.size,
    )


def save(run: Run) -> None:
    """Save the state of a run, and remove states that are no longer kept."""
    state = RunState(
        step=run.step,
        metrics_bytes=run.log.sync(),
        validation=None if run.validation is None else {name: asdict(loss) for name, loss in run.validation.items()},
        recipe=recipe_values(run.recipe),
        data=run.data.cache_names,
        held_out=[name for held_out in run.held_out for name in held_out.cache_names],
        expansions=run.expansions,
        reset_step=run.reset_step,
    )
    save_state(
        run.states,
        state,
        weights=weights_of(run.trainable),
        optimizer=optimizer_tensors_of(run.trainable),
        config=run.trainable.model.config,
        world=run.world,
    )
    if run.world.is_main:
        prune_states(run.states, run.recipe.checkpoint.keep)
    run.world.barrier()
