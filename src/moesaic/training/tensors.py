"""What the state of a run is made of, by name, and how it comes back."""

from pathlib import Path

from torch import Tensor

from moesaic.training.optimizer import MOMENTS
from moesaic.training.parallel import World
from moesaic.training.state import load_state
from moesaic.training.step import Trainable


def weights_of(trainable: Trainable) -> dict[str, Tensor]:
    """fp32 weights (frozen ones as the model has them) and persistent buffers, by name."""
    return {**trainable.masters.parameters, **trainable.model.buffers()}


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


def restore(trainable: Trainable, state: Path, step: int, world: World) -> None:
    """Put the state that was saved after `step` steps in the place of what is there."""
    load_state(state, weights=weights_of(trainable), optimizer=optimizer_tensors_of(trainable), world=world)
    for moments in trainable.optimizer.state.values():
        moments["step"].fill_(step)
    trainable.masters.publish()
