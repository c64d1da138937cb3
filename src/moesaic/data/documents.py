"""Whether a model keeps packed documents apart, which training and gradients on packed text rely on."""

from typing import Any

import torch


@torch.no_grad()
def keeps_documents_apart(model: Any) -> bool:
    """Whether position ids that restart keep packed documents apart in this model.

    transformers' masks see to it where a family passes its position ids on; GPT-OSS does not.
    """
    device = next(model.parameters()).device
    ids_BS, positions_BS = torch.tensor([[0, 1, 2, 1]], device=device), torch.tensor([[0, 1, 0, 1]], device=device)
    packed_V = model(input_ids=ids_BS, position_ids=positions_BS, use_cache=False).logits[0, -1].float()
    alone_V = model(input_ids=ids_BS[:, 2:], use_cache=False).logits[0, -1].float()
    return bool((packed_V - alone_V).norm() < 0.02 * alone_V.norm())
