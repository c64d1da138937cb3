"""`train`: from a recipe to a checkpoint, in one go or in several."""

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from moesaic.checkpoint.push import pushed
from moesaic.checkpoint.record import read_provenance
from moesaic.common.errors import MoesaicError
from moesaic.common.numbers import finite_only
from moesaic.common.progress import notice, warn
from moesaic.data.packing import PackedBatch
from moesaic.training.folder import list_states, locked_folder, refuse_overlap
from moesaic.training.growth import clear_expansion, expand
from moesaic.training.metrics import step_line
from moesaic.training.parallel import joined_world
from moesaic.training.recipe import TrainRecipe, load_train_recipe
from moesaic.training.result import LAST_FILE, TrainResult, write_result
from moesaic.training.schedule import learning_rate
from moesaic.training.session import Session, begin, save
from moesaic.training.start import DTYPES
from moesaic.training.state import result_of
from moesaic.training.step import run_step, validate, validation_batches, where_not_finite
from moesaic.training.stop import Stop, stopping
from moesaic.training.watch import RoutingWatch


@pushed
def train(
    recipe: str | Path | Mapping[str, Any] | TrainRecipe,
    out: str | Path,
    *,
    settings: Sequence[str] = (),
    resume: bool = False,
    overwrite: bool = False,
    quiet: bool = True,
) -> TrainResult:
    """Train what a recipe says and leave a plain checkpoint in `out`.

    Under torchrun, every process calls this with the same arguments. The state of a run (`out/state`) is saved as
    `recipe.checkpoint` says, at the end, on SIGTERM, which then leaves with status 143, and on Ctrl-C, which then
    raises KeyboardInterrupt; a second Ctrl-C raises it at once.

    Args:
        recipe: a YAML file, a name that `moesaic recipes list` shows, plain values, or a recipe that is loaded.
        out: folder of the result, of metrics.jsonl, recipe.yaml and the run state.
        settings: `a.b.c=value` texts that win over the recipe.
        resume: go on where the last state is; start fresh where there is none.
        overwrite: remove an earlier run or checkpoint in `out` first.
        quiet: print no progress and no notices.
        push_to_hub: ORG/NAME of a repository on the hub to upload the checkpoint to when it is complete.
        public: let everybody see it there.

    Returns:
        Steps, losses and where the checkpoint is.

    Raises:
        MoesaicError: a mistake in the recipe, the data or the model, a full disk, a loss or gradient that isn't finite.
            The last state that was saved stays.
    """
    started = time.monotonic()
    out = Path(out)
    recipe = recipe if isinstance(recipe, TrainRecipe) else load_train_recipe(recipe, settings)
    refuse_overlap(out, recipe)
    with joined_world(recipe.parallel) as world:
        quiet = quiet or not world.is_main
        folder = locked_folder(out, resume=resume, overwrite=overwrite) if world.is_main else nullcontext()
        with folder:
            world.barrier()
            run = begin(recipe, out, world, resume, quiet)
            try:
                with stopping(alone=world.size == 1, quiet=quiet) as stop:
                    _loop(run, stop)
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


def _loop(run: Session, stop: Stop) -> None:
    """Take the steps that are left."""
    watch = RoutingWatch()
    if run.step == 0 and run.held_out:
        _validate(run)
    if run.must_expand:  # resumed just before
        _expand(run)
    for batches in _batches_ahead(run):
        with _last_good(run):
            _step(run, batches, watch)
            every = run.recipe.validation.every_steps
            run.validation = None
            if run.held_out and (run.step == run.steps or (every is not None and run.step % every == 0)):
                _validate(run)
            stopped = run.world.any(stop.by is not None)
            every = run.recipe.checkpoint.every_steps
            due = every is not None and run.step % every == 0
            if stopped or due or run.must_expand or run.step == run.steps:
                save(run)
        if stopped and run.step < run.steps:
            said = f"stopped by {stop.name} after step {run.step:,}; --resume goes on from there"
            notice(said, quiet=not run.world.is_main)
            raise stop.leave()
        if run.must_expand:
            _expand(run)


def _expand(run: Session) -> None:
    """Grow the experts, and save the state that the run goes on from."""
    with _last_good(run):
        expand(run)
        save(run)
        if run.world.is_main:
            clear_expansion(run.out)
        run.world.barrier()


def _batches_ahead(run: Session) -> Iterator[list[PackedBatch]]:
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
def _last_good(run: Session) -> Iterator[None]:
    """Name the step and the last good state in what stops a run."""
    step = run.step if run.must_expand else run.step + 1
    try:
        yield
    except MoesaicError as error:
        states = list_states(run.states)
        good = f"the last good state is {states[-1]}" if states else "no state was saved before"
        raise MoesaicError(f"step {step}: {error}; {good}") from error


def _step(run: Session, batches: list[PackedBatch], watch: RoutingWatch) -> None:
    started = time.perf_counter()
    rate = learning_rate(run.step, run.steps, run.recipe.optimizer)
    result = run_step(run.trainable, batches, step=run.step, rate=rate, num_domains=len(run.data.domains))
    if not result.is_finite:
        place = where_not_finite(run.trainable, batches)
        raise MoesaicError(
            f"loss {result.loss or 0:.4g} and gradient norm {result.gradient_norm:.4g} are not both finite"
            f"{'' if place is None else f' ({place})'}; a lower optimizer.lr or more optimizer.warmup_steps may help"
        )
    run.step, run.last = run.step + 1, result
    if result.loss is None:
        run.pass_over()
    if result.load is not None:
        for finding in watch.look(result.load):
            notice(f"step {run.step:,}: {finding}", quiet=run.quiet)
    timing = run.throughput.line(run.recipe.batch.tokens, time.perf_counter() - started)
    line = step_line(result, step=run.step, tokens=run.tokens, rate=rate, domains=run.data.domains, timing=timing)
    run.log.write(line)
    run.console.step(line)


def _validate(run: Session) -> None:
    with run.console.validating(validation_batches(run.trainable, run.held_out), run.step) as tick:
        run.validation = validate(run.trainable, run.held_out, tick)
    measured = {domain: finite_only(asdict(loss)) for domain, loss in run.validation.items()}
    if run.world.is_main and (missing := [domain for domain, one in measured.items() if one["loss"] is None]):
        warn(f"step {run.step:,}: the held-out loss of {', '.join(missing)} is not finite, and null in metrics.jsonl")
    run.log.write({"kind": "validation", "step": run.step, "tokens": run.tokens, "validation": measured})
    run.console.validation(run.validation, run.step)


def _finish(run: Session, quiet: bool) -> None:
    """Write the checkpoint, on the main rank; the others hand it their shards."""
    complete = (run.out / LAST_FILE).is_file()  # else a kill came between the files of the result
    if run.last is None and complete and (read_provenance(run.out) or {}).get("steps") == run.step:
        notice(f"{run.out}: was finished before, after {run.step:,} steps; a larger budget would go on", quiet=quiet)
        return
    tensors = result_of(run.trainable, DTYPES[run.recipe.precision], keep=run.world.is_main)
    if run.world.is_main:
        write_result(run, tensors)
        notice(f"wrote {run.out}", quiet=quiet)
    run.world.barrier()
