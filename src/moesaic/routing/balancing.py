"""Loss-free balancing (Wang et al. 2024, arXiv 2408.15664): a selection bias per expert instead of a gradient."""

import torch
from jaxtyping import Float
from torch import Tensor

from moesaic.routing.losses import Load


def balanced_bias(
    bias_LE: Float[Tensor, "layers experts"], load: Load, *, rate: float
) -> Float[Tensor, "layers experts"]:
    """Return the bias after one step: plus `rate` for experts below the mean load of their layer, minus above.

    `load` covers the whole step on all ranks (algorithm 1 of the paper); update before the optimizer step. The bias is
    added to the probabilities that experts are selected by and never to the weights of the selected ones.
    """
    counts_LE = load.counts_LE.to(torch.float64)  # exact for integers, so that equal loads have no sign
    return bias_LE + rate * (counts_LE.mean(dim=-1, keepdim=True) - counts_LE).sign().to(bias_LE.dtype)
