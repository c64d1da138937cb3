"""Utilities of a model's experts in mid-training: from its weights, its gradients and its optimizer, sharded or not.

Gradients are those of the cross-entropy on the batches of the last steps, with routing as at inference: what `moesaic
expand` computes from a checkpoint and the same text. E experts.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.common.errors import MoesaicError
from moesaic.data.packing import PackedBatch
from moesaic.expansion.recipe import MOMENT_UTILITIES, UtilityLayers
from moesaic.expansion.utility import ExpertGradients, is_counted, norms_of_stacks, scores
from moesaic.routing.install import routing_context
from moesaic.routing.losses import Load, measure_load, reduce_load
from moesaic.training.parallel import whole
from moesaic.training.schedule import Transition
from moesaic.training.start import Trainable
from moesaic.training.step import batch_losses, context_of, seed_dropout

PerLayer = dict[int, tuple[float, ...]]
"""MoE layer -> one number per expert."""

# Experts are stacked in memory in every family; a shared expert's name has another word before the dot.
EXPERT_MATRIX = re.compile(r"layers\.(?P<layer>\d+)\..*\bexperts\.\w+$")


@dataclass(frozen=True, kw_only=True)
class Found:
    """Utilities, and what is known of the text they were computed on."""

    utilities: PerLayer
    """Empty for `uniform`."""
    batches: int | None = None
    """Of how many steps gradients were averaged; `None` where none were needed."""
    unseen: Mapping[int, tuple[int, ...]] | None = None
    """Experts that no token of these batches reached, by layer; `None` where that was not counted."""


def expert_matrices(trainable: Trainable, layers: UtilityLayers = "both") -> dict[int, list[str]]:
    """MoE layer -> names of its stacked expert matrices that count, biases left out."""
    found: dict[int, list[str]] = {}
    for name, parameter in trainable.masters.parameters.items():
        if (
            parameter.ndim == 3
            and (match := EXPERT_MATRIX.search(name))
            and is_counted(layers, name.rpartition(".")[2])
        ):
            found.setdefault(int(match["layer"]), []).append(name)
    return found


def check_frozen(trainable: Trainable, transition: Transition) -> None:
    """Refuse a utility that needs gradients of experts that do not train.

    Raises: `MoesaicError`.
    """
    if transition.utility in ("uniform", "weight_norm"):
        return
    frozen = [
        name
        for names in expert_matrices(trainable, transition.utility_layers).values()
        for name in names
        if not trainable.masters.parameters[name].requires_grad
    ]
    if frozen:
        raise MoesaicError(
            f"utility {transition.utility} needs gradients, but optimizer.frozen freezes experts ({frozen[0]}); use "
            "weight_norm or uniform"
        )


def find_utilities(
    trainable: Trainable, transition: Transition, micro_batches: Callable[[int], list[PackedBatch]], *, step: int
) -> Found:
    """The utilities that an expansion after `step` steps asks for, the same on every rank; all ranks call this.

    `micro_batches` gives this rank's part of the batch of a step.

    Raises: `MoesaicError` for a loss that is not finite.
    """
    if transition.utility in _WITHOUT_TEXT:
        return Found(utilities=_WITHOUT_TEXT[transition.utility](trainable, transition.utility_layers))
    return _by_gradient(trainable, transition, micro_batches, step)


def _weight_norms(trainable: Trainable, layers: UtilityLayers) -> PerLayer:
    return _norms(trainable, dict(trainable.masters.parameters), layers)


def _moment_norms(trainable: Trainable, layers: UtilityLayers) -> PerLayer:
    """Norm of AdamW's second moments, not corrected for their start at zero."""
    state = trainable.optimizer.state
    moments = {
        name: state[trainable.masters.parameters[name]]["exp_avg_sq"]
        for names in expert_matrices(trainable, layers).values()
        for name in names
    }
    return _norms(trainable, moments, layers)


def _second_moments(trainable: Trainable, layers: UtilityLayers) -> PerLayer:
    """The trace of the diagonal Fisher information of each expert, as AdamW's second moments estimate it.

    These are running means of squared gradients, corrected for their start at zero. Ours: unlike the square of the
    gradient norm, it also counts what cancels out over batches.
    """
    beta = trainable.recipe.optimizer.betas[1]
    utilities = {}
    for layer, names in expert_matrices(trainable, layers).items():
        total_E: Tensor | float = 0.0
        for name in names:
            state = trainable.optimizer.state[trainable.masters.parameters[name]]
            correction = 1 - beta ** float(state["step"])
            total_E = total_E + whole(state["exp_avg_sq"]).double().flatten(1).sum(1) / correction
        assert isinstance(total_E, Tensor)
        utilities[layer] = tuple(total_E.tolist())
    return utilities


_WITHOUT_TEXT: dict[str, Callable[[Trainable, UtilityLayers], PerLayer]] = {
    "uniform": lambda _, __: {},
    "weight_norm": _weight_norms,
    "second_moments": _second_moments,
}
"""Utilities that the model and its optimizer have; the others need gradients on text."""


def _by_gradient(
    trainable: Trainable, transition: Transition, micro_batches: Callable[[int], list[PackedBatch]], step: int
) -> Found:
    layers = transition.utility_layers
    steps = range(max(0, step - transition.utility_batches), step)
    load: Load | None = None
    trainable.optimizer.zero_grad(set_to_none=True)
    for one in steps:
        found = _add_gradients(trainable, micro_batches(one), one)
        load = found if load is None or found is None else load + found
    gradients = {name: parameter.grad for name, parameter in trainable.masters.trainable.items()}
    sums = _norms(trainable, {name: grad for name, grad in gradients.items() if grad is not None}, layers)
    trainable.optimizer.zero_grad(set_to_none=True)
    means = {layer: tuple(norm / len(steps) for norm in norms) for layer, norms in sums.items()}
    tokens = None if load is None else dict(zip(sums, reduce_load(load).counts_LE.tolist(), strict=True))
    measured = ExpertGradients(
        gradient_norms=means,
        weight_norms=_weight_norms(trainable, layers),
        moment_norms=_moment_norms(trainable, layers) if transition.utility in MOMENT_UTILITIES else None,
        tokens={layer: tuple(of_layer) for layer, of_layer in (tokens or {}).items()},
        batches=len(steps),
    )
    return Found(
        utilities=scores(transition.utility, measured), batches=len(steps), unseen=_unseen(tokens) if tokens else None
    )


def _add_gradients(trainable: Trainable, batches: Sequence[PackedBatch], step: int) -> Load | None:
    """Add the gradients of the mean cross-entropy of one step's batch; return the tokens that its experts got."""
    world = trainable.world
    counts = torch.tensor(sum(batch.num_targets for batch in batches), device=world.device)
    targets = int(world.sum(counts).clamp_min(1))
    seed_dropout(trainable, step)
    load: Load | None = None
    total = torch.zeros((), dtype=torch.float64, device=world.device)
    for batch in (batch.to(world.device) for batch in batches):
        with _loads(trainable, batch, step) as loads:
            loss = batch_losses(trainable.model, batch)[0].sum() / targets
            total += loss.detach()
            (loss * world.size).backward()
        for one in loads:
            load = one if load is None else load + one
    if not torch.isfinite(world.sum(total)):
        raise MoesaicError(f"the loss on the batch of step {step + 1} is {float(total)}, so there are no utilities")
    return load


@contextmanager
def _loads(trainable: Trainable, batch: PackedBatch, step: int) -> Iterator[list[Load]]:
    """Route as at inference, and have the load of the batch's experts, where rules work on the model's routers."""
    loads: list[Load] = []
    installation = trainable.installation
    if installation is None:
        yield loads
        return
    context = context_of(trainable, batch, step)
    with routing_context(installation, context, pools=False) as record:
        yield loads
        loads.append(measure_load(record.decisions, context.token_mask_T))


def _norms(trainable: Trainable, tensors: Mapping[str, Tensor], layers: UtilityLayers) -> PerLayer:
    """Norm over the matrices of each expert; of the whole matrices, one layer at a time."""
    return {
        layer: norms_of_stacks([whole(tensors[name]) for name in names])
        for layer, names in expert_matrices(trainable, layers).items()
    }


def _unseen(counts: Mapping[int, Sequence[int]]) -> dict[int, tuple[int, ...]]:
    empty = {layer: tuple(e for e, count in enumerate(of_layer) if not count) for layer, of_layer in counts.items()}
    return {layer: experts for layer, experts in empty.items() if experts}
