"""Losses of the routers in a training loop that is not ours: their gradient joins where the routers' logits are.

Our own loop adds these losses to the loss that it runs backward from. Another one computes its loss as it likes (not at
all from what the model returns, for one of TRL's), divides and scales it, and may checkpoint activations re-entrantly,
so that the forward pass which the losses are read from has no graph. So the gradient of the losses by the logits is
taken at once, on copies, and is added to that of the logits when backward passes the weights of the experts.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moesaic.routing.rules import RoutingDecision


class AddedGradients:
    """What backward adds to the gradient of the logits of each MoE layer of one forward pass; nothing until `take`."""

    def __init__(self) -> None:
        self._by_layer: Sequence[Tensor] = ()

    def tap(self, layer: int, weights: Tensor, logits_TE: Tensor) -> Tensor:
        """The same weights; backward through them gives the logits, wherever these came from, this layer's addition."""
        return _Tap.apply(weights, logits_TE, self, layer)

    def take(
        self,
        decisions: Sequence[RoutingDecision],
        loss: Callable[[Sequence[RoutingDecision]], Tensor],
        factor: float | Tensor,
    ) -> None:
        """Have `factor` times the gradient of `loss(decisions)` added; it is taken by copies of the logits."""
        leaves = [decision.logits_TE.detach().requires_grad_() for decision in decisions]
        copies = [replace(decision, logits_TE=leaf) for decision, leaf in zip(decisions, leaves, strict=True)]
        with torch.enable_grad():
            gradients = torch.autograd.grad(loss(copies), leaves)
        self._by_layer = [gradient * factor for gradient in gradients]

    def of(self, layer: int) -> Tensor | None:
        """The addition of a layer."""
        return self._by_layer[layer] if self._by_layer else None


class _Tap(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, weights: Tensor, logits_TE: Tensor, added: AddedGradients, layer: int
    ) -> Tensor:
        ctx.added, ctx.layer, ctx.like = added, layer, logits_TE.dtype
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:  # pyright: ignore
        more_TE = ctx.added.of(ctx.layer)
        return grad, None if more_TE is None else more_TE.to(ctx.like), None, None
