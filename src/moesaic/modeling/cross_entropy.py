"""Cross-entropy and log-partition per token, in chunks and with a backward of its own; the loss of whole documents.

Autograd over `logits.float()` keeps fp32 copies of a (tokens, vocabulary) matrix, by far the largest tensors of a step
with a small model; here the logits themselves and one number per token are all that is kept, and the gradient is the
only other matrix.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from moesaic.common.recipe import Count, Measured

IGNORED = -100
_CHUNK_ELEMENTS = 1 << 22  # 16 MiB of fp32 at a time


def token_losses(
    logits_TV: Float[Tensor, "tokens vocabulary"], labels_T: Int64[Tensor, " tokens"]
) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"]]:
    """Return -log p(label) and logsumexp(logits) of each token in nats, both 0 where the label is -100.

    `labels_T[t]` is what `logits_TV[t]` should predict (already shifted). Computed in fp32, or fp64 for fp64 logits.
    For means that do not depend on how a batch is cut, sum over tokens and divide by the number of labels of the whole
    step; `logsumexp.square()` summed the same way is the LM z-loss (PaLM, section 5).
    """
    return _TokenLosses.apply(logits_TV, labels_T)  # pyright: ignore[reportReturnType]


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, labels_T: Tensor) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(logits_TV.dtype, torch.float32)
        kept_T = labels_T != IGNORED
        partition_T = torch.empty(labels_T.shape, dtype=dtype, device=logits_TV.device)
        for rows in _chunks(logits_TV):
            partition_T[rows] = logits_TV[rows].to(dtype).logsumexp(dim=-1)
        target_T = logits_TV.gather(1, labels_T.where(kept_T, 0)[:, None])[:, 0].to(dtype)
        ctx.save_for_backward(logits_TV, labels_T, partition_T)
        return (partition_T - target_T).where(kept_T, 0), partition_T.where(kept_T, 0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        logits_TV, labels_T, partition_T = ctx.saved_tensors
        kept_T = labels_T != IGNORED
        loss_T, log_partition_T = (gradient.where(kept_T, 0) for gradient in gradients)
        result_TV = torch.empty_like(logits_TV)
        for rows in _chunks(logits_TV):
            chunk = (logits_TV[rows].to(partition_T.dtype) - partition_T[rows, None]).exp_()
            chunk *= (loss_T + log_partition_T)[rows, None]
            chunk.scatter_add_(1, labels_T[rows].where(kept_T[rows], 0)[:, None], -loss_T[rows, None])
            result_TV[rows] = chunk
        return result_TV, None


def _chunks(logits_TV: Tensor) -> list[slice]:
    tokens, vocabulary = logits_TV.shape
    size = max(1, _CHUNK_ELEMENTS // vocabulary)
    return [slice(start, start + size) for start in range(0, tokens, size)]


@dataclass(frozen=True, kw_only=True)
class DomainLoss:
    """Loss of one held-out set, in nats per predicted token."""

    loss: Measured
    """Total loss over total tokens."""
    standard_error: Measured | None
    """Of `loss`, with documents as the units that were drawn; `None` for a single document."""
    documents: Count
    """Documents with at least one predicted token."""
    tokens: Count
    """Predicted tokens."""


def ratio_with_error(losses_N: Tensor, tokens_N: Tensor) -> DomainLoss:
    """Total loss over total tokens of N documents, and the standard error of that ratio.

    Documents differ in length, so the error is that of a ratio estimator (Cochran, Sampling Techniques, 6.4): the
    root of N/(N-1) * sum (loss_i - ratio * tokens_i)^2, over the total number of tokens.
    """
    predicted = tokens_N > 0
    losses_N, tokens_N = losses_N[predicted], tokens_N[predicted]
    number, total = len(tokens_N), float(tokens_N.sum())
    ratio = float(losses_N.sum()) / total if total else math.nan
    error = None
    if number > 1:
        spread = float((losses_N - ratio * tokens_N).square().sum())
        error = math.sqrt(number / (number - 1) * spread) / total
    return DomainLoss(loss=ratio, standard_error=error, documents=number, tokens=int(total))
