"""What the state of a run is made of, by name, and how it comes back."""

from collections.abc import Container, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from moesaic.training.optimizer import MOMENTS
from moesaic.training.parallel import World
from moesaic.training.state import load_state
from moesaic.training.step import Trainable
from moesaic.training.weights import kept_in_fp32


def weights_of(trainable: Trainable) -> dict[str, Tensor]:
    """fp32 weights (frozen ones as the model has them) and persistent buffers, by name."""
    return {**trainable.masters.parameters, **trainable.model.buffers()}


def gather(
    tensors: Mapping[str, Tensor], dtype: torch.dtype, *, keep: bool, uncast: Container[str] = ()
) -> dict[str, Tensor]:
    """Whole tensors on the CPU, where `keep`; every rank has to call this.

    In `dtype`, but for integers and the names in `uncast`, which stay as they are.
    """
    gathered = {}
    for name, tensor in tensors.items():
        detached = tensor.detach()
        cast = detached.to(dtype) if tensor.is_floating_point() and name not in uncast else detached
        entire = whole(cast)
        if keep:
            gathered[name] = entire.cpu()
    return gathered


def result_of(trainable: Trainable, dtype: torch.dtype, *, keep: bool) -> dict[str, Tensor]:
    """The weights as the run computed with them, whole, where `keep`; every rank has to call this.

    Parameters are in `dtype`. Buffers, such as a family's selection bias, are never cast in training, and not here.
    """
    uncast = {*trainable.model.buffers(), *kept_in_fp32(trainable.model.model)}
    return gather(weights_of(trainable), dtype, keep=keep, uncast=uncast)


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor on every rank, which all call this; without gradient."""
    detached = tensor.detach()
    return detached.full_tensor() if isinstance(detached, DTensor) else detached


def optimizer_tensors_of(trainable: Trainable) -> dict[str, Tensor]:
    """Moments by parameter name, and the selection bias of loss-free balancing."""
    state = trainable.optimizer.state
    tensors = {
        f"{moment}.{name}": state[parameter][moment]
        for name, parameter in trainable.masters.trainable.items()
        for moment in MOMENTS
    }
    installation = trainable.model.installation
    if installation is not None and installation.selection_bias is not None:
        tensors["selection_bias"] = installation.selection_bias
    return tensors


def restore(trainable: Trainable, state: Path, updates: int, world: World) -> None:
    """Put a state that was saved in the place of what is there; `updates` are those that its moments are made of."""
    load_state(state, weights=weights_of(trainable), optimizer=optimizer_tensors_of(trainable), world=world)
    set_updates(trainable, updates)
    trainable.masters.publish()


def set_updates(trainable: Trainable, updates: int) -> None:
    """Say how many updates the moments are made of, which AdamW corrects them for."""
    for moments in trainable.optimizer.state.values():
        moments["step"].fill_(updates)
