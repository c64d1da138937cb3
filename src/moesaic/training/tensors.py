"""What the state of a run is made of, by name, and how it comes back."""

from pathlib import Path

from torch import Tensor
from torch.distributed.tensor import DTensor

from moesaic.training.optimizer import MOMENTS
from moesaic.training.parallel import World
from moesaic.training.state import load_state
from moesaic.training.step import Trainable


def weights_of(trainable: Trainable) -> dict[str, Tensor]:
    """fp32 weights (frozen ones as the model has them) and persistent buffers, by name."""
    return {**trainable.masters.parameters, **trainable.model.buffers()}


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
