"""AdamW over fp32 masters, plain or sharded, and the global gradient norm."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moesaic.training.parallel import World
from moesaic.training.recipe import OptimizerRecipe

MOMENTS = ("exp_avg", "exp_avg_sq")


def decays(name: str, parameter: Tensor) -> bool:
    """Weight decay is for matrices (router and embeddings included), not for norms and biases of any shape."""
    return parameter.ndim >= 2 and not name.endswith("bias")


def build_optimizer(parameters: Mapping[str, nn.Parameter], recipe: OptimizerRecipe) -> torch.optim.AdamW:
    """Fused AdamW with its state in place (zeros at step 0), so that a checkpoint can be read into it.

    Parameters that are sharded over different meshes (experts and the rest, under expert parallelism) can't share one
    fused update, so they are groups of their own.
    """
    groups = defaultdict(list)
    for name, parameter in parameters.items():
        groups[decays(name, parameter), _mesh(parameter)].append(parameter)
    optimizer = torch.optim.AdamW(
        [
            {"params": members, "weight_decay": recipe.weight_decay if decay else 0.0}
            for (decay, _), members in groups.items()
        ],
        lr=recipe.lr,
        betas=recipe.betas,
        eps=recipe.eps,
        fused=True,
    )
    for parameter in parameters.values():
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            **{moment: torch.zeros_like(parameter) for moment in MOMENTS},
        }
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Use `rate` from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def gradient_norm(gradients: Iterable[Tensor], world: World) -> float:
    """Euclidean norm over all gradients of all ranks, the same number on every rank; waits for the device."""
    norms = torch.nn.utils.get_total_norm([_local(gradient) for gradient in gradients])
    square = world.sum(norms.to(torch.float64).square()) / world.replicas  # every replica holds every element once
    return math.sqrt(float(square))


@torch.no_grad()
def scale_gradients(gradients: Iterable[Tensor], factor: float) -> None:
    """Multiply every gradient in place."""
    shards = [_local(gradient) for gradient in gradients]
    torch._foreach_mul_(shards, factor)  # pyright: ignore[reportPrivateImportUsage]


def _local(tensor: Tensor) -> Tensor:
    """This rank's shard; the memory is the tensor's own."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _mesh(tensor: Tensor) -> object:
    return tensor.device_mesh if isinstance(tensor, DTensor) else None
