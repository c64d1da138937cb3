"""A run grows its experts between two steps: it writes its model, `expand` grows that, and it goes on with the result.

    OUT/state/expansion.tmp/weights/before      the model as it is, a plain checkpoint
    OUT/state/expansion.tmp/weights/after       what `moesaic expand` makes of it
    OUT/state/expansion.tmp/exp_avg/before ...  the moments under the names of their weights, expanded in the same way

So weights, router, noise, configuration and record are the verb's own, and every rank reads its shards of the result
as it would read any checkpoint's. The state before and the state after are saved; what lies between is done again, with
the same result, if the run dies there.
"""

import gc
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from moesaic.checkpoint.record import write_provenance
from moesaic.checkpoint.source import open_checkpoint
from moesaic.checkpoint.write import write
from moesaic.common.errors import MoesaicError
from moesaic.common.files import explained
from moesaic.common.intervals import loss_jump
from moesaic.common.progress import notice
from moesaic.common.recipe import recipe_values
from moesaic.expansion.build import build
from moesaic.expansion.exact import statement
from moesaic.expansion.resolve import ExpandPlan
from moesaic.expansion.run import copies_lines
from moesaic.families.moe import detect_moe
from moesaic.modeling.cross_entropy import ratio_with_error
from moesaic.training.growth_plan import as_keys, described, grown_plans, resolve_transition
from moesaic.training.metrics import Throughput
from moesaic.training.moments import adapted
from moesaic.training.optimizer import MOMENTS
from moesaic.training.parallel import World, whole
from moesaic.training.result import known_experts, routing_record, write_weights
from moesaic.training.schedule import OptimizerState
from moesaic.training.start import Trainable, build_trainable
from moesaic.training.state import read_tensors, set_updates, weights_of
from moesaic.training.step import document_losses
from moesaic.training.utilities import Found, check_frozen, find_utilities

if TYPE_CHECKING:
    from moesaic.training.session import Session

FOLDER = "expansion.tmp"
"""Below OUT/state; what a killed run left there is removed."""

_POWERS = {"exp_avg": 1, "exp_avg_sq": 2}

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
    model = described(trainable.config.to_dict(), shapes)
    grown_plans(recipe, model, recorded=routing_record(trainable), done=done)
    for number, transition in enumerate(recipe.transitions[done:], start=done):
        try:
            check_frozen(trainable, transition)
        except MoesaicError as error:
            raise MoesaicError(f"expand.{number}: {error}") from error


def clear_expansion(out: Path) -> None:
    """Remove what a killed run left of an expansion."""
    shutil.rmtree(out / "state" / FOLDER, ignore_errors=True)


def expand(run: "Session") -> None:
    """Grow the experts between two steps; all ranks call this, and then save the state that the run goes on from.

    Raises: `MoesaicError` for utilities that are all 0 in some layer, weights or losses that are not finite, a full
    disk. The state before was saved.
    """
    recipe, world, folder = run.recipe, run.world, run.states / FOLDER
    number = len(run.expansions)
    before = document_losses(run.trainable, run.held_out)
    try:
        record = _write_grown(run, folder, number)
    except MoesaicError as error:
        raise MoesaicError(f"expand.{number}: {as_keys(str(error))}") from error
    world.barrier()
    del run.trainable  # the old model and the new one need not be in memory together
    gc.collect()
    start = folder / "weights" / "after"
    run.trainable = build_trainable(recipe, run.out, world, start=start, quiet=run.quiet)
    # What it was loaded from is no layout that anybody chose: the result has the family's own, as after `--resume`.
    vars(run.trainable.model).pop("_weight_conversions", None)
    if recipe.transitions[number].optimizer == "reset":
        run.reset_step = run.step
    else:
        _load_moments(run.trainable, folder)
    set_updates(run.trainable, run.step - run.reset_step)
    after = document_losses(run.trainable, run.held_out)
    run.validation = {domain: ratio_with_error(*losses) for domain, losses in after.items()}
    record["losses"] = _losses(before, after)
    run.expansions.append(record)
    run.throughput = Throughput(run.trainable)
    run.log.write({"kind": "expansion", **record})
    _say(record, quiet=run.quiet)


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


# --- what is on disk --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Expansion:
    """What the main rank decided."""

    plan: ExpandPlan
    copies: dict[int, list[int]]
    experts: dict[str, Any]
    """The `experts` entry of the result's moesaic.json."""

    @property
    def sources(self) -> dict[int, list[int]]:
        """MoE layer -> source of each expert of the result."""
        return dict(zip(self.experts["layers"], self.experts["sources"], strict=True))


def _write_grown(run: "Session", folder: Path, number: int) -> dict[str, Any]:
    """Write what expansion `number` of the recipe makes of the model and its moments; return the record of it."""
    trainable, recipe, world = run.trainable, run.recipe, run.world
    transition = recipe.transitions[number]
    found = find_utilities(trainable, transition, run.micro_batches, step=run.step)
    if world.is_main:
        shutil.rmtree(folder, ignore_errors=True)
    world.barrier()
    weights = folder / "weights"
    _write_whole(weights_of(trainable), weights / "before", world, config=trainable.config)
    if world.is_main:
        known = known_experts(recipe, run.expansions)
        write_provenance(
            weights / "before",
            verb="train",
            recipe=recipe_values(recipe),
            seed=recipe.seed,
            sources=[],
            weights_hash=None,
            extra={"routing": routing_record(trainable), **({} if known is None else {"experts": known})},
        )
    expansion = world.from_main(lambda: _expand_weights(trainable, weights, number, found))
    if transition.optimizer != "reset":
        for moment in MOMENTS:
            _write_moments(trainable, folder, moment, expansion, transition.optimizer)
    return _record(run, expansion, found, number)


def _expand_weights(trainable: Trainable, folder: Path, number: int, found: Found) -> _Expansion:
    recipe = trainable.recipe
    model = replace(open_checkpoint(folder / "before"), name="the model")
    plan = resolve_transition(recipe.transitions[number], recipe, model)
    copies = plan.copies(found.utilities)
    made = build(plan, copies, {})
    write(made, folder / "after", quiet=True)
    return _Expansion(plan=plan, copies=copies, experts=dict(made.record["experts"]))


def _write_moments(
    trainable: Trainable, expanded: Path, moment: str, expansion: _Expansion, how: OptimizerState
) -> None:
    """One moment of every weight, expanded like the weights: each copy has its source's, or a part or mixture of it."""
    masters, state, folder = trainable.masters, trainable.optimizer.state, expanded / moment
    moments = {
        name: state[parameter][moment] if parameter.requires_grad else torch.zeros_like(parameter)
        for name, parameter in masters.parameters.items()
    }
    divisors = _divisors(expansion, _POWERS[moment]) if how == "scale" else {}
    _write_whole(moments, folder / "before", trainable.world, config=trainable.config, divisors=divisors)
    if trainable.world.is_main:
        operator = "interpolate" if how == "interpolate" else "copy"
        copying = replace(
            expansion.plan.recipe, checkpoint=str(folder / "before"), expert_op=operator, router_op="copy", delta=0.0
        )
        before = open_checkpoint(folder / "before")  # parameters alone: a family's selection bias is a buffer
        plan = replace(expansion.plan, recipe=copying, checkpoint=before, model=detect_moe(before), recorded=None)
        made = build(plan, expansion.copies, {})
        if how == "adaptive_scale":
            weights = open_checkpoint(expanded / "weights" / "after")
            made = replace(made, tensors=adapted(made.tensors, weights, expansion.sources))
        write(made, folder / "after", quiet=True)


def _divisors(expansion: _Expansion, power: int) -> dict[str, Tensor]:
    """What every expert's slots are divided by, by name of the tensor: its replicas, to the power of the moment.

    Replicas that are equal share the gradient of their source equally, because their gradients are equal and the sum of
    them is what the source's would be: exactly so where the expansion preserves the function.
    """
    found = {}
    for layer in expansion.plan.model.layers:
        replicas_E = torch.tensor([1 + added for added in expansion.copies[layer.layer]], dtype=torch.float64)
        for tensor in layer.expert_tensors:
            assert tensor.axis == 0, "stacked in memory, the experts in front"
            found[tensor.name] = replicas_E.pow(power)
    return found


def _write_whole(
    tensors: Mapping[str, Tensor],
    folder: Path,
    world: World,
    *,
    config: PreTrainedConfig,
    divisors: Mapping[str, Tensor] | None = None,
) -> None:
    """Write tensors as a plain checkpoint, gathered from the ranks one at a time; all ranks call this.

    `divisors` are for the slots along the first axis of some of them.
    """
    if not world.is_main:
        for tensor in tensors.values():
            whole(tensor)
        return

    def values(name: str) -> Tensor:
        gathered = whole(tensors[name]).cpu()
        if not divisors or name not in divisors:
            return gathered
        return gathered / divisors[name].to(gathered.dtype).reshape(-1, *[1] * (gathered.ndim - 1))

    with explained(folder):
        folder.mkdir(parents=True)
    write_weights(tensors, folder, values)
    with explained(folder):
        config.save_pretrained(folder)


def _load_moments(trainable: Trainable, folder: Path) -> None:
    """Read the expanded moments into the optimizer of the grown model, each rank its shards."""
    for moment in MOMENTS:
        moments = {
            name: trainable.optimizer.state[parameter][moment]
            for name, parameter in trainable.masters.trainable.items()
        }
        read_tensors(moments, folder / moment / "after", trainable.world)


def _record(run: "Session", expansion: _Expansion, found: Found, number: int) -> dict[str, Any]:
    """What moesaic.json and metrics.jsonl say of it, but for the losses."""
    recipe, plan = run.recipe, expansion.plan
    promise = statement(plan)
    return {
        "step": run.step,
        "tokens": run.tokens,
        "transition": recipe_values(recipe.transitions[number]),
        "experts_before": plan.model.num_experts,
        "experts": plan.experts,
        "top_k": plan.top_k,
        "statement": {"code": promise.code, "text": promise.text},
        "layers": expansion.experts["layers"],
        "copies": expansion.experts["copies"],
        "sources": expansion.experts["sources"],
        "original": expansion.experts["original"],
        "utilities": {str(layer): list(values) for layer, values in found.utilities.items()},
        "utility_batches": found.batches,
        "zero_token_experts": None
        if found.unseen is None
        else {str(layer): list(experts) for layer, experts in found.unseen.items()},
    }
