"""A run grows its experts between two steps: it writes its model, `expand` grows that, and it goes on with the result.

    OUT/state/expansion.tmp/weights/before      the model as it is, a plain checkpoint
    OUT/state/expansion.tmp/weights/after       what `moesaic expand` makes of it
    OUT/state/expansion.tmp/exp_avg/before ...  the moments under the names of their weights, expanded in the same way

So weights, router, noise, configuration and record are the verb's own, and every rank reads its shards of the result
as it would read any checkpoint's. The state before and the state after are saved; what lies between is done again, with
the same result, if the run dies there.
"""

import shutil
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from moesaic.checkpoint.output import require_disk
from moesaic.checkpoint.pio import explained
from moesaic.checkpoint.reader import DTYPE_CODES
from moesaic.checkpoint.record import write_provenance
from moesaic.checkpoint.rewrite import rewrite
from moesaic.checkpoint.source import open_checkpoint
from moesaic.checkpoint.writer import CheckpointWriter, OutputTensor, plan_files
from moesaic.common.errors import MoesaicError
from moesaic.common.recipe import recipe_values
from moesaic.data.batch import PackedBatch
from moesaic.expansion.build import build
from moesaic.expansion.resolve import ExpandPlan
from moesaic.expansion.statement import statement
from moesaic.families.moe import detect_moe
from moesaic.training.growth_check import as_keys, resolve_transition
from moesaic.training.growth_utility import Found, find_utilities
from moesaic.training.optimizer import MOMENTS
from moesaic.training.parallel import World
from moesaic.training.result import routing_record
from moesaic.training.state import read_tensors
from moesaic.training.step import Trainable
from moesaic.training.tensors import weights_of, whole

FOLDER = "expansion.tmp"
"""Below OUT/state; what a killed run left there is removed."""

_POWERS = {"exp_avg": 1, "exp_avg_sq": 2}


@dataclass(frozen=True, kw_only=True)
class Grown:
    """One expansion that is on disk."""

    record: dict[str, Any]
    """What moesaic.json and metrics.jsonl say of it, but for the losses."""
    has_moments: bool
    """Whether the optimizer's state goes on."""


def write_grown(
    trainable: Trainable,
    folder: Path,
    micro_batches: Callable[[int], list[PackedBatch]],
    *,
    number: int,
    step: int,
    known: Mapping[str, Any] | None,
) -> Grown:
    """Write what expansion `number` of the recipe makes of the model and its moments; all ranks call this.

    `known` is the `experts` entry of moesaic.json of the model as it is, if it has one.

    Raises: `MoesaicError` for utilities that are all 0 in some layer, weights or losses that are not finite, a full
    disk.
    """
    transition, world = trainable.recipe.transitions[number], trainable.world
    try:
        found = find_utilities(trainable, transition, micro_batches, step=step)
        if world.is_main:
            shutil.rmtree(folder, ignore_errors=True)
        world.barrier()
        weights = folder / "weights"
        _write_before(trainable, weights_of(trainable), weights / "before", known)
        expansion = world.from_main(lambda: _expand(trainable, weights, number, found))
        if transition.optimizer != "reset":
            for moment in MOMENTS:
                _write_moments(trainable, folder / moment, moment, expansion, scaled=transition.optimizer == "scale")
    except MoesaicError as error:
        raise MoesaicError(f"expand.{number}: {as_keys(str(error))}") from error
    world.barrier()
    return Grown(
        record=_record(trainable, expansion, found, number=number, step=step),
        has_moments=transition.optimizer != "reset",
    )


@dataclass(frozen=True, kw_only=True)
class _Expansion:
    """What the main rank decided."""

    plan: ExpandPlan
    copies: dict[int, list[int]]
    experts: dict[str, Any]
    """The `experts` entry of the result's moesaic.json."""


def _expand(trainable: Trainable, folder: Path, number: int, found: Found) -> _Expansion:
    recipe = trainable.recipe
    model = replace(open_checkpoint(folder / "before"), name="the model")
    plan = resolve_transition(recipe.transitions[number], recipe, model)
    copies = plan.copies(found.utilities)
    made = build(plan, copies, {})
    rewrite(made, folder / "after", quiet=True)
    return _Expansion(plan=plan, copies=copies, experts=dict(made.record["experts"]))


def _write_before(
    trainable: Trainable, tensors: Mapping[str, Tensor], folder: Path, known: Mapping[str, Any] | None
) -> None:
    write_whole(tensors, folder, trainable.world, config=trainable.model.config)
    if trainable.world.is_main:
        recipe = trainable.recipe
        write_provenance(
            folder,
            verb="train",
            recipe=recipe_values(recipe),
            seed=recipe.seed,
            sources=[],
            weights_hash=None,
            extra={"routing": routing_record(trainable.model), **({} if known is None else {"experts": dict(known)})},
        )


def _write_moments(trainable: Trainable, folder: Path, moment: str, expansion: _Expansion, *, scaled: bool) -> None:
    """One moment of every weight, expanded like the weights: each copy has its source's, or its share of it."""
    masters, state = trainable.masters, trainable.optimizer.state
    moments = {
        name: state[parameter][moment] if parameter.requires_grad else torch.zeros_like(parameter)
        for name, parameter in masters.parameters.items()
    }
    divisors = _divisors(expansion, _POWERS[moment]) if scaled else {}
    write_whole(moments, folder / "before", trainable.world, config=trainable.model.config, divisors=divisors)
    if trainable.world.is_main:
        copying = replace(
            expansion.plan.recipe, checkpoint=str(folder / "before"), expert_op="copy", router_op="copy", delta=0.0
        )
        before = open_checkpoint(folder / "before")  # parameters alone: a family's selection bias is a buffer
        plan = replace(expansion.plan, recipe=copying, checkpoint=before, model=detect_moe(before), recorded=None)
        rewrite(build(plan, expansion.copies, {}), folder / "after", quiet=True)


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


def write_whole(
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
    layout = plan_files(
        OutputTensor(name=name, dtype=DTYPE_CODES[tensor.dtype], shape=tuple(tensor.shape))
        for name, tensor in tensors.items()
    )
    if world.is_main:
        with explained(folder):
            folder.mkdir(parents=True)
        require_disk(folder, layout.nbytes)
    with CheckpointWriter(folder, layout) if world.is_main else nullcontext() as writer:
        for name, tensor in tensors.items():
            values = whole(tensor)
            if writer is None:
                continue
            values = values.cpu().contiguous()
            if divisors and name in divisors:
                values = values / divisors[name].to(values.dtype).reshape(-1, *[1] * (values.ndim - 1))
            writer.write(name, values)
        if writer is not None:
            writer.finish()
            with explained(folder):
                config.save_pretrained(folder)


def load_moments(trainable: Trainable, folder: Path) -> None:
    """Read the expanded moments into the optimizer of the grown model, each rank its shards."""
    for moment in MOMENTS:
        moments = {
            name: trainable.optimizer.state[parameter][moment]
            for name, parameter in trainable.masters.trainable.items()
        }
        read_tensors(moments, folder / moment / "after", trainable.world)


def _record(trainable: Trainable, expansion: _Expansion, found: Found, *, number: int, step: int) -> dict[str, Any]:
    recipe, plan = trainable.recipe, expansion.plan
    promise = statement(plan)
    return {
        "step": step,
        "tokens": step * recipe.batch.tokens,
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
