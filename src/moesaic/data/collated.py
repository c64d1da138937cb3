"""The documents of a batch that another's collator made, read off what the model is given."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from moesaic.common.errors import MoesaicError
from moesaic.data.packing import IGNORED


def documents_of(inputs: Mapping[str, Any], padding_id: int | None) -> Tensor:
    """The document of each token of a trainer's batch, numbered within its row; -1 for padding. (rows, length)

    Documents start where `position_ids` do not go on by one. Padding is what `attention_mask` hides; without it, a
    document of nothing but `padding_id` of which no token is a label.

    Raises:
        MoesaicError: documents packed under an `attention_mask`, which lets them see each other.
    """
    tokens = inputs.get("input_ids")
    rows, length = (inputs["inputs_embeds"] if tokens is None else tokens).shape[:2]
    device = (inputs["inputs_embeds"] if tokens is None else tokens).device
    mask_BS = inputs.get("attention_mask")
    mask_BS = mask_BS.bool() if isinstance(mask_BS, Tensor) and mask_BS.dim() == 2 else None
    ids_BS = torch.zeros(rows, length, dtype=torch.int64, device=device)
    positions_BS = inputs.get("position_ids")
    if isinstance(positions_BS, Tensor) and positions_BS.dim() == 2:
        positions_BS = positions_BS.expand(rows, length)
        ids_BS[:, 1:] = (positions_BS[:, 1:] != positions_BS[:, :-1] + 1).cumsum(1)
    if mask_BS is not None:
        ids_BS = torch.where(mask_BS, ids_BS, -1)
        highest_B = ids_BS.amax(1, keepdim=True)
        if bool((mask_BS & (ids_BS != highest_B)).any()):
            raise MoesaicError(
                "attention_mask: comes with position_ids that start again, so packed documents see each other; use a "
                "collator without it, such as DataCollatorWithFlattening or SFTConfig(padding_free=True)"
            )
        return ids_BS
    if padding_id is None or tokens is None:
        return ids_BS
    said_BS = tokens != padding_id
    if isinstance(labels_BS := inputs.get("labels"), Tensor) and labels_BS.shape == tokens.shape:
        said_BS = said_BS | (labels_BS != IGNORED)
    counts_BN = torch.zeros(rows, length, dtype=torch.int64, device=device).scatter_add_(1, ids_BS, said_BS.long())
    return torch.where(counts_BN.gather(1, ids_BS) > 0, ids_BS, -1)
