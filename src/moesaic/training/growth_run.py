"""The expansions of a run: checked before it starts, done between two steps, and looked at again on `--resume`."""

import gc
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from moesaic.common.errors import MoesaicError
from moesaic.common.intervals import loss_jump
from moesaic.common.progress import notice
from moesaic.common.recipe import recipe_values
from moesaic.expansion.run import copies_lines
from moesaic.training.building import build_trainable
from moesaic.training.growth import FOLDER, load_moments, write_grown
from moesaic.training.growth_check import described, grown_plans
from moesaic.training.growth_utility import check_frozen
from moesaic.training.recipe import TrainRecipe
from moesaic.training.report import expansion_line
from moesaic.training.result import known_experts, routing_record
from moesaic.training.running import Run, save, throughput_of
from moesaic.training.state import RunState
from moesaic.training.step import Trainable
from moesaic.training.tensors import set_updates, weights_of
from moesaic.training.validate import document_losses, ratio_with_error

Losses = Mapping[str, tuple[Tensor, Tensor]]
"""Domain -> total loss and predicted tokens of each held-out document."""


def check_expansions(trainable: Trainable, *, done: int) -> None:
    """Refuse expansions that cannot work, after the first `done`, before the run takes a step.

    Raises: `MoesaicError`; the line starts with `expand.NUMBER`.
    """
    recipe = trainable.recipe
    if not recipe.transitions[done:]:
        return
    shapes = {name: tuple(tensor.shape) for name, tensor in weights_of(trainable).items()}
    model = described(trainable.model.config.to_dict(), shapes)
    grown_plans(recipe, model, recorded=routing_record(trainable.model), done=done)
    for number, transition in enumerate(recipe.transitions[done:], start=done):
        try:
            check_frozen(trainable, transition)
        except MoesaicError as error:
            raise MoesaicError(f"expand.{number}: {error}") from error


def refuse_changed_expansions(saved: RunState, recipe: TrainRecipe, steps: Sequence[int]) -> None:
    """Refuse to resume where an expansion that was done is another now, or one that was not done would be too late.

    Args:
        saved: the state that the run goes on from.
        recipe: what the run would go on with.
        steps: after how many steps its expansions come.

    Raises: `MoesaicError`.
    """
    for number, record in enumerate(saved.expansions):
        done = f"expand.{number}: was done after step {record['step']:,}"
        if number >= len(steps):
            raise MoesaicError(f"{done} and is missing now; put it back, or use another OUT for another run")
        if steps[number] != record["step"]:
            raise MoesaicError(f"{done} and would be after step {steps[number]:,} now; say its moment as `step`")
        if recipe_values(recipe.transitions[number]) | _MOMENT != record["transition"] | _MOMENT:
            raise MoesaicError(f"{done} with other settings than the recipe has now; use another OUT for another run")
    for number in range(len(saved.expansions), len(steps)):
        if steps[number] < saved.step:
            raise MoesaicError(
                f"expand.{number}: is after step {steps[number]:,}, but this run is at step {saved.step:,}; "
                "choose a later moment"
            )


_MOMENT = dict.fromkeys(("step", "tokens", "fraction"))
"""How the moment is said may change, as long as it is the same one."""


def clear_expansion(out: Path) -> None:
    """Remove what a killed run left of an expansion."""
    shutil.rmtree(out / "state" / FOLDER, ignore_errors=True)


def expand(run: Run) -> None:
    """Grow the experts between two steps, and save the state that the run goes on from; all ranks call this.

    Raises: `MoesaicError` for what only the weights and gradients show; the state before was saved.
    """
    recipe, world, folder = run.recipe, run.world, run.states / FOLDER
    before = document_losses(run.trainable, run.held_out)
    grown = write_grown(
        run.trainable,
        folder,
        run.micro_batches,
        number=len(run.expansions),
        step=run.step,
        known=known_experts(recipe, run.expansions),
    )
    del run.trainable  # the old model and the new one need not be in memory together
    gc.collect()
    run.trainable = build_trainable(
        recipe, run.out, world, start=folder / "weights" / "after", tokenizer=run.tokenizer, quiet=run.quiet
    )
    # What it was loaded from is no layout that anybody chose: the result has the family's own, as after `--resume`.
    vars(run.trainable.model.model).pop("_weight_conversions", None)
    if grown.has_moments:
        load_moments(run.trainable, folder)
    else:
        run.reset_step = run.step
    set_updates(run.trainable, run.step - run.reset_step)
    after = document_losses(run.trainable, run.held_out)
    run.validation = {domain: ratio_with_error(*losses) for domain, losses in after.items()}
    record = grown.record | {"losses": _losses(before, after)}
    run.expansions.append(record)
    run.throughput = throughput_of(run.trainable)
    run.log.write(expansion_line(record))
    _say(record, quiet=run.quiet)
    save(run)
    if world.is_main:
        clear_expansion(run.out)
    world.barrier()


def _losses(before: Losses, after: Losses) -> dict[str, Any]:
    """Held-out losses just before and right after, and the jump with its interval over documents, by domain."""
    found = {}
    for domain, (losses_N, tokens_N) in before.items():
        after_N, _ = after[domain]
        found[domain] = {
            "before": asdict(ratio_with_error(losses_N, tokens_N)),
            "after": asdict(ratio_with_error(after_N, tokens_N)),
            "jump": asdict(loss_jump(losses_N.tolist(), after_N.tolist(), tokens_N.tolist())),
        }
    return found


def _say(record: Mapping[str, Any], *, quiet: bool) -> None:
    notice(
        f"step {record['step']:,}: {record['experts']} experts instead of {record['experts_before']}, "
        f"{record['top_k']} active; {record['statement']['code']}: {record['statement']['text']}",
        quiet=quiet,
    )
    for line in copies_lines(dict(zip(record["layers"], record["copies"], strict=True))):
        notice(line, quiet=quiet)
    for layer, experts in (record["zero_token_experts"] or {}).items():
        numbers = ", ".join(map(str, experts))
        notice(f"layer {layer}: no token reached expert {numbers}, whose utility is 0", quiet=quiet)
    for domain, losses in record["losses"].items():
        jump = losses["jump"]
        error = "" if jump["low"] is None else f" [{jump['low']:+.4f}, {jump['high']:+.4f}]"
        notice(
            f"held-out {domain}: {losses['before']['loss']:.4f} before, {losses['after']['loss']:.4f} after, jump "
            f"{jump['value']:+.4f}{error}",
            quiet=quiet,
        )
