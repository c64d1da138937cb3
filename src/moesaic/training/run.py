"""`train(recipe, out)`: from a recipe to a checkpoint, in one go or in several."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path

from moesaic.checkpoint.pio import explained
from moesaic.checkpoint.record import read_provenance
from moesaic.checkpoint.source import open_checkpoint
from moesaic.common.errors import MoesaicError
from moesaic.common.progress import notice
from moesaic.common.recipe import dump_recipe, recipe_values
from moesaic.data.dataset import PackedDataset, ValidationSet, validation_sets
from moesaic.data.packing import PackedBatch
from moesaic.data.tokenise import prepare, refuse_untrainable
from moesaic.loading import load_config, refuse_unknown_architecture
from moesaic.training.building import build_trainable
from moesaic.training.drawing import refuse_unknown_keys
from moesaic.training.folder import (
    RECIPE_FILE,
    clear_folder,
    locked_folder,
    refuse_changed_data,
    refuse_changes,
    refuse_overlap,
)
from moesaic.training.growth_recipe import positions
from moesaic.training.growth_run import check_expansions, clear_expansion, expand, refuse_changed_expansions
from moesaic.training.metrics import MetricsLog
from moesaic.training.parallel import World, joined_world
from moesaic.training.recipe import TrainRecipe, refuse_long_warmup
from moesaic.training.report import Console, step_line, validation_line
from moesaic.training.result import DTYPES, LAST_FILE, TrainResult, write_result
from moesaic.training.running import Run, save, throughput_of
from moesaic.training.schedule import learning_rate
from moesaic.training.signals import TERMINATED, termination_flag
from moesaic.training.state import RunState, list_states, read_run, remove_unfinished
from moesaic.training.step import run_step
from moesaic.training.tensors import restore, result_of
from moesaic.training.tokenizer import load_run_tokenizer
from moesaic.training.validate import validate


def train(
    recipe: TrainRecipe, out: str | Path, *, resume: bool = False, overwrite: bool = False, quiet: bool = False
) -> TrainResult:
    """Train what `recipe` says and leave a plain checkpoint in `out`.

    Under torchrun, every process calls this with the same arguments. The state of a run (`out/state`) is saved as
    `recipe.checkpoint` says, at the end, and on SIGTERM, which then leaves with status 143.

    Args:
        recipe: what to train.
        out: folder of the result, of metrics.jsonl, recipe.yaml and the run state.
        resume: go on where the last state is; start fresh where there is none.
        overwrite: remove an earlier run or checkpoint in `out` first.
        quiet: no progress and no notices.

    Returns:
        Steps, losses and where the checkpoint is.

    Raises:
        MoesaicError: a mistake in the recipe, the data or the model, a full disk, a loss or gradient that isn't finite.
            The last state that was saved stays.
    """
    started = time.monotonic()
    out = Path(out)
    refuse_overlap(out, recipe)
    with joined_world(recipe.parallel) as world:
        quiet = quiet or not world.is_main
        folder = locked_folder(out, resume=resume, overwrite=overwrite) if world.is_main else nullcontext()
        with folder:
            world.barrier()
            run = _start(recipe, out, world, resume, quiet)
            try:
                with termination_flag() as terminated:
                    _loop(run, terminated)
                _finish(run, quiet)
            finally:
                run.console.close()
                run.log.close()
    return TrainResult(
        out=out,
        steps=run.step,
        tokens=run.tokens,
        loss=None if run.last is None else run.last.loss,
        validation=run.validation or {},
        seconds=time.monotonic() - started,
    )


def _start(recipe: TrainRecipe, out: Path, world: World, resume: bool, quiet: bool) -> Run:
    """Everything that can be refused, then the model, the data and the last state."""
    state = next(reversed(list_states(out / "state")), None) if resume else None
    saved = None if state is None else read_run(state)
    if saved is not None:
        refuse_changes(saved.recipe, recipe_values(recipe))
    if isinstance(recipe.model, str):
        refuse_unknown_architecture(open_checkpoint(recipe.model).config, recipe.model)
    elif saved is None:
        refuse_unknown_keys(recipe.model)
    tokenizer = load_run_tokenizer(recipe)
    prepared = world.from_local_main(lambda: prepare(recipe.data, tokenizer, quiet=quiet))
    refuse_untrainable(prepared)
    data = PackedDataset(prepared, seed=recipe.seed, sequences_per_step=recipe.sequences_per_step)
    held_out = validation_sets(prepared)
    steps = min(limit for limit in (recipe.budget_steps, data.num_steps) if limit is not None)
    if saved is None:
        refuse_long_warmup(recipe.optimizer.warmup_steps, steps, "data.epochs")
    else:
        _refuse_other_data(saved, recipe, data, held_out)
    expansion_steps = positions(recipe.transitions, steps=steps, tokens_per_step=recipe.batch.tokens)
    if saved is not None:
        refuse_changed_expansions(saved, recipe, expansion_steps)
    grown = state is not None and saved is not None and saved.expansions
    start = load_config(state / "model", str(state)) if grown and state else recipe.model
    trainable = build_trainable(recipe, out, world, start=start, tokenizer=tokenizer, quiet=quiet)
    check_expansions(trainable, done=0 if saved is None else len(saved.expansions))
    _tidy(out, recipe, world, fresh=state is None)
    first = 0 if saved is None else saved.step
    if state is not None:
        assert saved is not None
        restore(trainable, state, first - saved.reset_step, world)
        notice(f"resuming after step {first:,} of {steps:,}", quiet=quiet)
    return Run(
        out=out,
        trainable=trainable,
        tokenizer=tokenizer,
        data=data,
        held_out=held_out,
        steps=steps,
        step=first,
        log=MetricsLog(
            out, start_bytes=0 if saved is None else saved.metrics_bytes, start_step=first, active=world.is_main
        ),
        console=Console(steps=steps, first=first, quiet=quiet),
        throughput=throughput_of(trainable),
        expansion_steps=expansion_steps,
        expansions=[] if saved is None else list(saved.expansions),
        reset_step=0 if saved is None else saved.reset_step,
        quiet=quiet,
        validation=None if saved is None else saved.measured,
    )


def _refuse_other_data(
    saved: RunState, recipe: TrainRecipe, data: PackedDataset, held_out: tuple[ValidationSet, ...]
) -> None:
    paths = [source.path for source in recipe.data.sources]
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


def _loop(run: Run, terminated: threading.Event) -> None:
    """Take the steps that are left."""
    if run.step == 0 and run.held_out:
        _validate(run)
    if run.must_expand:  # resumed just before
        with _last_good(run):
            expand(run)
    for batches in _batches_ahead(run):
        with _last_good(run):
            _step(run, batches)
            every = run.recipe.validation.every_steps
            run.validation = None
            if run.held_out and (run.step == run.steps or (every is not None and run.step % every == 0)):
                _validate(run)
            stop = run.world.any(terminated.is_set())
            every = run.recipe.checkpoint.every_steps
            due = every is not None and run.step % every == 0
            if stop or due or run.must_expand or run.step == run.steps:
                save(run)
        if stop and run.step < run.steps:
            notice(
                f"stopped by SIGTERM after step {run.step:,}; --resume goes on from there", quiet=not run.world.is_main
            )
            raise SystemExit(TERMINATED)
        if run.must_expand:
            with _last_good(run):
                expand(run)


def _batches_ahead(run: Run) -> Iterator[list[PackedBatch]]:
    """The micro-batches of every step that is left, cut while the step before runs."""
    with ThreadPoolExecutor(1, thread_name_prefix="batches") as pool:
        first = run.step
        ahead = pool.submit(run.micro_batches, first) if first < run.steps else None
        for step in range(first, run.steps):
            assert ahead is not None
            batches = ahead.result()
            ahead = pool.submit(run.micro_batches, step + 1) if step + 1 < run.steps else None
            yield batches


@contextmanager
def _last_good(run: Run) -> Iterator[None]:
    """Name the step and the last good state in what stops a run."""
    step = run.step if run.must_expand else run.step + 1
    try:
        yield
    except MoesaicError as error:
        states = list_states(run.states)
        good = f"the last good state is {states[-1]}" if states else "no state was saved before"
        raise MoesaicError(f"step {step}: {error}; {good}") from error


def _step(run: Run, batches: list[PackedBatch]) -> None:
    started = time.perf_counter()
    rate = learning_rate(run.step, run.steps, run.recipe.optimizer)
    result = run_step(run.trainable, batches, step=run.step, rate=rate, num_domains=len(run.data.domains))
    if not result.is_finite:
        raise MoesaicError(
            f"loss {result.loss:.4g} and gradient norm {result.gradient_norm:.4g} are not both finite; "
            "a lower optimizer.lr or more optimizer.warmup_steps may help"
        )
    run.step, run.last = run.step + 1, result
    timing = run.throughput.line(run.recipe.batch.tokens, time.perf_counter() - started)
    line = step_line(result, step=run.step, tokens=run.tokens, rate=rate, domains=run.data.domains, timing=timing)
    run.log.write(line)
    run.console.step(line)


def _validate(run: Run) -> None:
    run.validation = validate(run.trainable, run.held_out)
    run.log.write(validation_line(run.validation, step=run.step, tokens=run.tokens))
    run.console.validation(run.validation, run.step)


def _finish(run: Run, quiet: bool) -> None:
    """Write the checkpoint, on the main rank; the others hand it their shards."""
    complete = (run.out / LAST_FILE).is_file()  # else a kill came between the files of the result
    if run.last is None and complete and (read_provenance(run.out) or {}).get("steps") == run.step:
        notice(f"{run.out}: was finished before, after {run.step:,} steps; a larger budget would go on", quiet=quiet)
        return
    tensors = result_of(run.trainable, DTYPES[run.recipe.precision], keep=run.world.is_main)
    if run.world.is_main:
        write_result(
            run.recipe,
            run.out,
            trained=run.trainable.model,
            tensors=tensors,
            tokenizer=run.tokenizer,
            steps=run.step,
            validation=run.validation or {},
            expansions=run.expansions,
        )
        notice(f"wrote {run.out}", quiet=quiet)
    run.world.barrier()
