"""Losses of the routers in a training loop that is not ours: their gradient joins where the routers' logits are.

Our own loop adds these losses to the loss that it runs backward from. Another one computes its loss as it likes (not at
all from what the model returns, for one of TRL's), divides and scales it, and may checkpoint activations re-entrantly,
so that the forward pass which the losses are read from has no graph. So the gradient of the losses by the logits is
taken at once, on copies, and is added to that of the logits when backward passes there.
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

    def tap(self, layer: int, logits_TE: Tensor) -> Tensor:
        """The same logits, whose gradient gets this layer's addition."""
        return _Tap.apply(logits_TE, self, layer)

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
        ctx: Any, logits_TE: Tensor, added: AddedGradients, layer: int
    ) -> Tensor:
        ctx.added, ctx.layer = added, layer
        return logits_TE.view_as(logits_TE)

    @staticmethod
    def backward(ctx: Any, grad_TE: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore
        more_TE = ctx.added.of(ctx.layer)
        return grad_TE if more_TE is None else grad_TE + more_TE, None, None
