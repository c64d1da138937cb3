"""The sums of one MoE layer over batches of calibration tokens, from what its own router and experts did.

Letters: T tokens, D hidden, E experts, K active.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from moesaic.selection.experts import MoEBlock, find_block, replaced_forward, run_experts

Scoring = Literal["softmax", "sigmoid"]

_CHUNK_TOKENS = 256

_SHARED_BESIDE = ("shared_mlp",)
"""Shared experts that the decoder layer, not the MoE block, adds (Granite-MoE-shared)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Routed:
    """What one MoE layer did with some tokens."""

    logits_TE: Float[Tensor, "tokens experts"]
    ids_TK: Int64[Tensor, "tokens active"]
    weights_TK: Float[Tensor, "tokens active"]
    norms_TK: Float[Tensor, "tokens active"]
    """2-norm of the selected experts' outputs, before weighting."""
    input_TD: Float[Tensor, "tokens hidden"]
    """What the block got."""
    residual_TD: Float[Tensor, "tokens hidden"]
    """The residual stream: the input before the norm that comes right before the block, where there is one."""
    routed_TD: Float[Tensor, "tokens hidden"]
    """Weighted sum of the routed experts."""
    output_TD: Float[Tensor, "tokens hidden"]
    """The same with the shared experts, as the model weighs them."""

    def select(self, tokens: slice | Tensor) -> "Routed":
        """Only some of the tokens: a range, or a mask."""
        return Routed(**{name: value[tokens] for name, value in vars(self).items()})


class LayerSums:
    """Sums over tokens that are not padding: float64, and int64 for counts."""

    def __init__(self, num_experts: int, scoring: Scoring) -> None:
        self._scoring: Scoring = scoring
        self.tokens = 0
        self.counts_E = torch.zeros(num_experts, dtype=torch.int64)
        self.probability_E = torch.zeros(num_experts, dtype=torch.float64)
        self.weighted_norm_E = torch.zeros(num_experts, dtype=torch.float64)
        self.drift_original_E = torch.zeros(num_experts, dtype=torch.float64)
        self.drift_emo_E = torch.zeros(num_experts, dtype=torch.float64)

    def add(self, routed: Routed, mask_T: Bool[Tensor, " tokens"]) -> None:
        """Count the tokens of one batch; `mask_T` is False for padding."""
        # Some tokens at a time, because float64 copies of all would be the largest things in memory.
        for start in range(0, len(mask_T), _CHUNK_TOKENS):
            part = slice(start, start + _CHUNK_TOKENS)
            self._add(routed.select(part).select(mask_T[part]))

    def _add(self, real: Routed) -> None:
        self.tokens += len(real.logits_TE)
        ids_A = real.ids_TK.reshape(-1)
        self.counts_E += ids_A.bincount(minlength=len(self.counts_E))
        self.probability_E += probabilities(real.logits_TE, self._scoring).sum(dim=0)
        weighted_TK = real.weights_TK.double() * real.norms_TK.double()
        original_T1 = drift(real.residual_TD, real.routed_TD).unsqueeze(-1)
        emo_T1 = drift(real.input_TD, real.output_TD).unsqueeze(-1)
        for total_E, values_TK in (
            (self.weighted_norm_E, weighted_TK),
            (self.drift_original_E, weighted_TK * original_T1),
            (self.drift_emo_E, weighted_TK * emo_T1),
        ):
            total_E.index_add_(0, ids_A, values_TK.reshape(-1))


def probabilities(logits_TE: Float[Tensor, "tokens experts"], scoring: Scoring) -> Float[Tensor, "tokens experts"]:
    """The router's probabilities in float64: softmax over all experts, or sigmoid scores divided by their sum.

    Without selection bias and groups: these decide which experts are used, not what they are worth.
    """
    logits_TE = logits_TE.double()
    if scoring == "softmax":
        return logits_TE.softmax(dim=-1)
    scores_TE = logits_TE.sigmoid()
    return scores_TE / scores_TE.sum(dim=-1, keepdim=True)


def drift(
    before_TD: Float[Tensor, "tokens hidden"], change_TD: Float[Tensor, "tokens hidden"]
) -> Float[Tensor, " tokens"]:
    """max(0, 1 - cos(x, x + y)) in float64 (arXiv 2504.06792)."""
    # In fp32, 1 - cos would lose all digits of the small drifts of large models.
    before_TD = before_TD.double()
    return (1.0 - F.cosine_similarity(before_TD, before_TD + change_TD.double(), dim=-1)).clamp_min(0.0)


@contextmanager
def observed(layer: nn.Module) -> Iterator["LayerObserver"]:
    """Watch a decoder layer with an MoE block: after each call, `LayerObserver.routed()` says what it did."""
    block = find_block(layer)
    assert block is not None, "a dense layer"
    observer = LayerObserver(layer, block)
    with ExitStack() as stack:
        stack.enter_context(replaced_forward(block.experts, observer.run_experts))
        for hook in observer.hooks():
            stack.callback(hook.remove)
        yield observer


class LayerObserver:
    """Collects what passes the modules of one decoder layer during a call."""

    def __init__(self, layer: nn.Module, block: MoEBlock) -> None:
        self._layer = layer
        self._block = block
        self._children: dict[str, tuple[Tensor, Tensor]] = {}
        self._router: tuple[Tensor, Tensor, Tensor] | None = None
        self._experts: tuple[Tensor, Tensor] | None = None
        self._in_and_out: tuple[Tensor, Tensor] | None = None

    def hooks(self) -> Iterator[Any]:
        """Register all hooks; yields their handles."""
        for name, child in self._layer.named_children():
            if child is not self._block.block:
                yield child.register_forward_hook(self._child_hook(name), with_kwargs=True)
        yield self._block.router.register_forward_hook(self._after_router)
        yield self._block.block.register_forward_hook(self._after_block)

    def run_experts(self, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """The experts' forward."""
        routed_TD, norms_TK = run_experts(self._block.experts, hidden_TD, ids_TK, weights_TK)
        self._experts = (routed_TD, norms_TK)
        return routed_TD

    def routed(self) -> Routed:
        """What the last call did, tokens flattened; forgets it."""
        assert self._router is not None, "the layer was not called"
        assert self._experts is not None
        assert self._in_and_out is not None
        (logits_TE, weights_TK, ids_TK), (routed_TD, norms_TK) = self._router, self._experts
        block_input, output = self._in_and_out
        residual = block_input
        for given, gave in self._children.values():
            if gave is block_input:
                residual = given
        beside = [gave for name, (_, gave) in self._children.items() if name in _SHARED_BESIDE]
        width = block_input.shape[-1]
        self._children, self._router, self._experts, self._in_and_out = {}, None, None, None
        return Routed(
            logits_TE=logits_TE,
            ids_TK=ids_TK,
            weights_TK=weights_TK,
            norms_TK=norms_TK,
            input_TD=block_input.reshape(-1, width),
            residual_TD=residual.reshape(-1, width),
            routed_TD=routed_TD,
            output_TD=sum(beside, start=output).reshape(-1, width),
        )

    def _child_hook(self, name: str) -> Any:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            given = args[0] if args else kwargs.get("hidden_states")
            gave = output[0] if isinstance(output, tuple) else output
            if isinstance(given, Tensor) and isinstance(gave, Tensor):
                self._children[name] = (given, gave)

        return hook

    def _after_router(self, _module: nn.Module, _args: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        self._router = output

    def _after_block(self, _module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._in_and_out = (args[0], output[0] if isinstance(output, tuple) else output)
