"""A run between two steps: how it starts or goes on, what it has and has done, and how that is saved."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from moesaic.common.files import explained
from moesaic.common.progress import notice
from moesaic.common.recipe import dump_recipe, recipe_values
from moesaic.data.dataset import PackedDataset, ValidationSet, validation_sets
from moesaic.data.packing import PackedBatch
from moesaic.data.recipe import DataRecipe
from moesaic.data.tokenise import PreparedData, prepare, refuse_untrainable
from moesaic.data.vocabulary import within_vocabulary
from moesaic.loading import load_config
from moesaic.modeling.cross_entropy import DomainLoss
from moesaic.training.folder import (
    RECIPE_FILE,
    clear_folder,
    list_states,
    refuse_changed_data,
    refuse_changed_expansions,
    refuse_changes,
)
from moesaic.training.growth import check_expansions, clear_expansion
from moesaic.training.metrics import Console, MetricsLog, Throughput
from moesaic.training.parallel import World
from moesaic.training.recipe import TrainRecipe
from moesaic.training.schedule import positions, refuse_long_warmup
from moesaic.training.start import (
    Start,
    Trainable,
    build_trainable,
    check_start,
    load_run_tokenizer,
    refuse_unknown_keys,
    warn_of_other_ids,
)
from moesaic.training.state import RunState, prune_states, read_run, remove_unfinished, restore, save_state
from moesaic.training.step import StepResult
from moesaic.training.task_rows import tasks_as_files
from moesaic.training.trackers import chosen_trackers


@dataclass(kw_only=True)
class Session:
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
    """Steps done that the optimizer's moments are not made of: those before they were last put to zero, and since then
    those that moved nothing."""
    quiet: bool
    last: StepResult | None = None
    validation: dict[str, DomainLoss] | None = None
    """Measured after the last step done; `None` where it was not."""
    passed_over: int = 0
    """Steps of this call in which nothing was predicted."""

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

    def pass_over(self) -> None:
        """Count the step just done as one that moved nothing, and say so the first time."""
        self.reset_step += 1
        self.passed_over += 1
        if self.passed_over == 1:
            notice(
                f"step {self.step:,}: every label is masked, so there is no loss and nothing moves; prompts may be as "
                f"long as data.sequence_length ({self.recipe.data.sequence_length:,}), raise it",
                quiet=self.quiet,
            )

    def micro_batches(self, step: int) -> list[PackedBatch]:
        """This rank's part of the batch of a step (0-based)."""
        count, world = self.recipe.micro_steps, self.world
        return [
            self.data.batch(step, micro_step=index, num_micro_steps=count, rank=world.rank, world_size=world.size)
            for index in range(count)
        ]


_NEW = RunState(step=0, metrics_bytes=0, validation=None, recipe={}, data=[])
"""Where a run stands that goes on from no state."""


def begin(recipe: TrainRecipe, out: Path, world: World, resume: bool, quiet: bool) -> Session:
    """Everything that can be refused, then the model, the data and the last state."""
    state = next(reversed(list_states(out / "state")), None) if resume else None
    saved = _NEW if state is None else read_run(state)
    if state is not None:
        refuse_changes(saved.recipe, recipe_values(recipe))
    if state is None and not isinstance(recipe.model, str):
        refuse_unknown_keys(recipe.model)
    trackers = chosen_trackers(recipe.trackers)
    vocabulary = check_start(recipe).get_text_config().vocab_size
    tokenizer = load_run_tokenizer(recipe)
    if world.is_main:
        warn_of_other_ids(recipe, tokenizer)
    prepared = world.from_local_main(lambda: _prepared(recipe.data, tokenizer, quiet=quiet))
    prepared = within_vocabulary(prepared, vocabulary)
    refuse_untrainable(prepared)
    data = PackedDataset(prepared, seed=recipe.seed, sequences_per_step=recipe.sequences_per_step)
    held_out = validation_sets(prepared, limit=recipe.validation.limit)
    steps = min(limit for limit in (recipe.budget_steps, data.num_steps) if limit is not None)
    if state is None:
        refuse_long_warmup(recipe.optimizer.warmup_steps, steps, "data.epochs")
    else:
        _refuse_other_data(saved, recipe, data, held_out)
    expansion_steps = positions(recipe.transitions, steps=steps, tokens_per_step=recipe.batch.tokens)
    refuse_changed_expansions(saved.expansions, saved.step, recipe, expansion_steps)
    model: Start = recipe.model
    if state is not None and saved.expansions:
        model = load_config(state / "model", str(state))
    trainable = build_trainable(recipe, out, world, start=model, quiet=quiet)
    check_expansions(trainable, done=len(saved.expansions))
    _tidy(out, recipe, world, fresh=state is None)
    if state is not None:
        restore(trainable, state, saved.step - saved.reset_step)
        notice(f"resuming after step {saved.step:,} of {steps:,}", quiet=quiet)
    return Session(
        out=out,
        trainable=trainable,
        tokenizer=tokenizer,
        data=data,
        held_out=held_out,
        steps=steps,
        step=saved.step,
        log=MetricsLog(
            out, start_bytes=saved.metrics_bytes, start_step=saved.step, trackers=trackers, active=world.is_main
        ),
        console=Console(steps=steps, first=saved.step, quiet=quiet),
        throughput=Throughput(trainable),
        expansion_steps=expansion_steps,
        expansions=list(saved.expansions),
        reset_step=saved.reset_step,
        quiet=quiet,
        validation=saved.validation,
    )


def _prepared(recipe: DataRecipe, tokenizer: PreTrainedTokenizerBase, *, quiet: bool) -> PreparedData:
    with tasks_as_files(recipe) as written:
        return replace(prepare(written, tokenizer, quiet=quiet), recipe=recipe)


def _refuse_other_data(
    saved: RunState, recipe: TrainRecipe, data: PackedDataset, held_out: tuple[ValidationSet, ...]
) -> None:
    paths = [source.name for source in recipe.data.sources]
    refuse_changed_data(saved.data, data.cache_names, paths, harm="tokens would be repeated and skipped")
    if saved.held_out is not None:
        names = [name for one in held_out for name in one.cache_names]
        paths = [path for one in held_out for path in one.paths]
        refuse_changed_data(saved.held_out, names, paths, harm="held-out losses would not be of the same text")


def _tidy(out: Path, recipe: TrainRecipe, world: World, *, fresh: bool) -> None:
    """Remove what a stopped run left in OUT, or all that an earlier run did, and write this run's recipe there."""
    if world.is_main:
        if fresh:
            clear_folder(out)
        remove_unfinished(out / "state")
        clear_expansion(out)
        with explained(out):
            (out / RECIPE_FILE).write_text(dump_recipe(recipe), encoding="utf-8")
    world.barrier()


def save(run: Session) -> None:
    """Save the state of a run, and remove states that are no longer kept."""
    state = RunState(
        step=run.step,
        metrics_bytes=run.log.sync(),
        validation=run.validation,
        recipe=recipe_values(run.recipe),
        data=run.data.cache_names,
        held_out=[name for held_out in run.held_out for name in held_out.cache_names],
        expansions=run.expansions,
        reset_step=run.reset_step,
    )
    save_state(run.states, state, run.trainable)
    if run.world.is_main:
        prune_states(run.states, run.recipe.checkpoint.keep)
    run.world.barrier()
