"""Selection biases that are tensors of the model itself: of our architecture, and of families that have such."""

from typing import Any

import torch
from torch import Tensor, nn

from moesaic.common.errors import MoesaicError
from moesaic.families.family import MoEFamily

ROW = "_moesaic_row"
"""The attribute of a router that holds the row of a family which is read off its class, and what its config says."""

OUR_ROUTER = "MoesaicRouter"

OWN_BIAS = "e_score_correction_bias"
"""Name of the bias in our routers."""


def bias_tensors(model: nn.Module) -> dict[str, tuple[nn.Module, Tensor]]:
    """Name -> router and tensor of the selection biases that the model stores itself, in the order of its layers."""
    found: dict[str, tuple[nn.Module, Tensor]] = {}
    named = dict((*model.named_parameters(), *model.named_buffers()))
    for name, module in model.named_modules():
        if (own := f"{name}.{OWN_BIAS}") in named and _is_ours(module):
            found[own] = (module, named[own])
        row: MoEFamily | None = module.__dict__.get(ROW, (None,))[0]
        if row is None or row.decision is None or row.decision.bias_on not in ("scores", "logits"):
            continue
        for place in (name, name.rpartition(".")[0]):
            if (bias := f"{place}.{row.decision.bias}") in named:
                found[bias] = (module, named[bias])
    return found


def own_bias(router: nn.Module) -> Tensor | None:
    """The selection bias that a router holds as a tensor of the model, (experts,) in fp32; None where it has none."""
    bias: Any = getattr(router, OWN_BIAS, None)
    return bias


def take_own_biases(model: nn.Module) -> Tensor | None:
    """Take the biases off the routers of our architecture, so that training can move them: (layers, experts) or None.

    The caller's config has to say that there are none; a result of training has them again. Other families' stay.
    """
    routers = [router for router in _our_routers(model) if own_bias(router) is not None]
    if not routers:
        return None
    biases = torch.stack([router._buffers[OWN_BIAS].clone() for router in routers])  # pyright: ignore
    for router in routers:
        router._buffers[OWN_BIAS] = None
    return biases


def give_own_biases(model: nn.Module, bias_LE: Tensor) -> bool:
    """Let the routers of our architecture hold their rows of a bias, as the config then says; False for other models.

    A MoesaicError where the shape is another model's.
    """
    routers = _our_routers(model)
    if not routers:
        return False
    experts: Any = routers[0].num_experts
    if bias_LE.shape != (len(routers), experts):
        raise misfit(bias_LE, len(routers), experts)
    for router, bias_E in zip(routers, bias_LE, strict=True):
        place = router.weight.device  # pyright: ignore
        router._buffers[OWN_BIAS] = bias_E.to(place, torch.float32, copy=True)  # pyright: ignore
    config: Any = model.config
    config.selection_bias = True
    return True


def _our_routers(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if _is_ours(module)]


def _is_ours(module: nn.Module) -> bool:
    return any(base.__name__ == OUR_ROUTER for base in type(module).__mro__)


def misfit(bias_LE: Tensor, layers: int, experts: int) -> MoesaicError:
    """The error for a bias that is another model's."""
    return MoesaicError(
        f"selection_bias is {list(bias_LE.shape)}, but the model has {layers} MoE layers of {experts} experts; the "
        "moesaic.json is another checkpoint's"
    )
