"""What the optimizer moves: fp32 masters of the parameters, which of them train, AdamW, and the gradient norm."""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from moesaic.common.errors import MoesaicError
from moesaic.training.parallel import World
from moesaic.training.recipe import OptimizerRecipe

MOMENTS = ("exp_avg", "exp_avg_sq")


def freeze(model: nn.Module, patterns: tuple[str, ...]) -> None:
    """Stop the training of parameters whose names match one of the shell `patterns`.

    Raises: `MoesaicError` where a pattern matches nothing or nothing is left to train.
    """
    _refuse_unmatched("frozen", patterns, [name for name, _ in model.named_parameters()])
    for name, parameter in model.named_parameters():
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise MoesaicError(f"optimizer.frozen: {list(patterns)}: nothing is left to train")


def _refuse_unmatched(key: str, patterns: Iterable[str], names: Sequence[str]) -> None:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise MoesaicError(f"optimizer.{key}: {pattern!r} matches no parameter; one is called {names[0]}")


def describe_trainable(model: nn.Module) -> str:
    """One line: parameters that train, of how many, and how many of them are in routed experts."""
    sizes = [(one.numel(), one.requires_grad, ".experts." in name) for name, one in model.named_parameters()]
    trainable = sum(size for size, trains, _ in sizes if trains)
    experts = sum(size for size, _, routed in sizes if routed)
    both = sum(size for size, trains, routed in sizes if trains and routed)
    every = sum(size for size, *_ in sizes)
    return f"{trainable:,} of {every:,} parameters train; {both:,} of {experts:,} in routed experts"


def kept_in_fp32(model: PreTrainedModel) -> set[str]:
    """Parameters that don't train and that transformers never casts: selection biases, where they are no buffers.

    What trains is computed with in bf16 whatever transformers says, as FSDP's policy does it.
    """
    patterns = [pattern.replace("*", ".*") for pattern in model._keep_in_fp32_modules_strict or ()]
    return {
        name
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad and any(re.search(pattern, name) for pattern in patterns)
    }


class MasterWeights:
    """fp32 parameters, gradients included, by name.

    In fp32, and under FSDP (whose mixed precision casts what it gathers), they are the model's own parameters. Else a
    model that computes in bf16 keeps bf16 parameters, each with an fp32 master: gradients are accumulated in fp32 as
    soon as backward has finished one, so that summing micro-steps loses nothing, and no two copies of them live. The
    numbers are those of FSDP's policy (parameters bf16, reduction fp32), without autocast, and therefore the same with
    every kernel.
    """

    def __init__(self, model: PreTrainedModel, *, copies: torch.dtype | None) -> None:
        """Take over the fp32 `model`; its parameters, all but `kept_in_fp32`, are cast to `copies`, if it is given."""
        kept = kept_in_fp32(model)
        self.parameters: dict[str, nn.Parameter] = {}
        self._pairs: list[tuple[Tensor, nn.Parameter]] = []
        for name, parameter in model.named_parameters():
            assert parameter.dtype == torch.float32, f"{name} was loaded in {parameter.dtype}"
            self.parameters[name] = parameter
            if copies is None or name in kept:
                continue
            master = parameter.detach()
            parameter.data = master.to(copies)
            if parameter.requires_grad:
                self.parameters[name] = nn.Parameter(master)
                self._pairs.append((parameter, self.parameters[name]))
                parameter.register_post_accumulate_grad_hook(_move_gradient_to(self.parameters[name]))

    @property
    def trainable(self) -> dict[str, nn.Parameter]:
        """What the optimizer moves."""
        return {name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad}

    @torch.no_grad()
    def publish(self) -> None:
        """Let the model compute with the masters as they are now."""
        if self._pairs:
            copies, masters = zip(*self._pairs, strict=True)
            torch._foreach_copy_(list(copies), list(masters))  # pyright: ignore[reportPrivateImportUsage]


def _move_gradient_to(master: nn.Parameter):
    def hook(parameter: Tensor) -> None:
        assert parameter.grad is not None
        if master.grad is None:
            master.grad = parameter.grad.float()
        else:
            master.grad.add_(parameter.grad)
        parameter.grad = None

    return hook


# --- AdamW ------------------------------------------------------------------------------------------------------------


def decays(name: str, parameter: Tensor, no_decay: Sequence[str] | None = None) -> bool:
    """Whether a parameter has weight decay: by default matrices (router and embeddings included), not norms and biases.

    With the patterns `no_decay`: all that match none of them.
    """
    if no_decay is None:
        return parameter.ndim >= 2 and not name.endswith("bias")
    return not any(fnmatchcase(name, pattern) for pattern in no_decay)


def build_optimizer(parameters: Mapping[str, nn.Parameter], recipe: OptimizerRecipe) -> torch.optim.AdamW:
    """Fused AdamW with its state in place (zeros at step 0), so that a checkpoint can be read into it.

    Parameters that are sharded over different meshes (experts and the rest, under expert parallelism) can't share one
    fused update, so they are groups of their own.

    Raises: `MoesaicError` for a pattern of `no_decay` that matches none of the parameters.
    """
    _refuse_unmatched("no_decay", recipe.no_decay or (), list(parameters))
    groups = defaultdict(list)
    for name, parameter in parameters.items():
        groups[decays(name, parameter, recipe.no_decay), _mesh(parameter)].append(parameter)
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
