"""Documents packed into the rows of a batch, one after the other: the layout, and the batch made of it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64
from numpy.typing import NDArray
from torch import Tensor

from moesaic.data.cache import TokenCache
from moesaic.data.mixing import Pieces

IGNORED = -100
"""The label that cross entropy passes over, in PyTorch and in transformers."""


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """Sequences of documents packed one after the other. B sequences, S tokens each, all tensors int64 on the CPU.

    A document that the end of a sequence cuts counts as two documents: each piece has its own id and its own positions
    (a validation document longer than a sequence keeps one id over its pieces, which lie in different sequences).

    Labels are *unshifted*, as Hugging Face models expect them: the logits at t-1 are compared with `labels[:, t]`. The
    label of the first token of every piece is -100, so that no document is ever predicted from the one before.
    Prompts that are not trained on and padding are -100 too. Padding is a document of its own, with id and domain -1.
    """

    input_ids_BS: Int64[Tensor, "sequences length"]
    """Token ids; padding holds the padding token."""
    labels_BS: Int64[Tensor, "sequences length"]
    """Unshifted labels, -100 where nothing is to be predicted."""
    position_ids_BS: Int64[Tensor, "sequences length"]
    """Restart at 0 at every piece, padding included."""
    document_ids_BS: Int64[Tensor, "sequences length"]
    """Index of the document in the *global* batch of the step (in validation: in the validation set), however that
    batch is cut into ranks and micro-steps; -1 for padding. The ids of a batch are consecutive:
    `document_ids_BS - first_document` is a dense index below `num_documents`."""
    domain_ids_BS: Int64[Tensor, "sequences length"]
    """Index into `DataRecipe.domains`; -1 for padding."""
    first_document: int
    """The smallest document id of this batch (0 where the batch is all padding)."""
    num_documents: int
    """Documents in this batch, padding not counted."""

    @property
    def num_targets(self) -> int:
        """Labels that a Hugging Face model predicts in this batch (those in column 0 are never predicted)."""
        return int((self.labels_BS[:, 1:] != -100).sum())

    @property
    def num_tokens(self) -> int:
        """Tokens that are not padding."""
        return int((self.document_ids_BS >= 0).sum())

    def to(self, device: torch.device | str) -> "PackedBatch":
        """The same batch with its tensors on `device`."""
        moved = {
            name: value.to(device, non_blocking=True) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return replace(self, **moved)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where each piece of a document lies, sorted by row and column. N pieces."""

    source_N: NDArray[np.int64]
    """Index of the source."""
    begin_N: NDArray[np.int64]
    """First token in the source's token file."""
    length_N: NDArray[np.int64]
    row_N: NDArray[np.int64]
    column_N: NDArray[np.int64]
    document_N: NDArray[np.int64]
    """Document id, not decreasing and without gaps."""

    def rows(self, start: int, stop: int) -> "Layout":
        """The rows from `start` to `stop`, numbered from 0; document ids stay."""
        first, last = np.searchsorted(self.row_N, [start, stop])
        part = layout_of(*(values_N[first:last] for values_N in vars(self).values()))
        return replace(part, row_N=part.row_N - start)


def layout_of(*columns: NDArray[np.int64]) -> Layout:
    """A layout from its six arrays, in the order of its fields."""
    return Layout(**dict(zip(Layout.__dataclass_fields__, columns, strict=True)))


def cut(pieces: Pieces, length: int) -> tuple[Pieces, NDArray[np.int64], NDArray[np.int64]]:
    """Cut a run of pieces into sequences of `length` tokens.

    Gives the pieces, with those that cross a boundary cut in two, and for each the number of its sequence in the run
    and its column in it.
    """
    start_N = np.cumsum(pieces.length_N) - pieces.length_N
    total = int(pieces.length_N.sum())
    start_M = np.union1d(start_N, np.arange(0, total, length))
    parent_M = np.searchsorted(start_N, start_M, side="right") - 1
    begin_M = pieces.begin_N[parent_M] + start_M - start_N[parent_M]
    length_M = np.diff(start_M, append=total)
    return Pieces(begin_N=begin_M, length_N=length_M), start_M // length, start_M % length


def fill(
    layout: Layout,
    *,
    num_rows: int,
    length: int,
    caches: Sequence[TokenCache],
    domains: Sequence[int],
    padding_id: int,
) -> PackedBatch:
    """Read the tokens of a layout: `num_rows` sequences of `length` tokens, padded where nothing lies.

    `caches` and `domains` are the token cache and the domain id of each source. See `PackedBatch` for what is what.
    """
    input_ids_BS = np.full((num_rows, length), padding_id, dtype=np.int64)
    labels_BS = np.full((num_rows, length), IGNORED, dtype=np.int64)
    document_ids_BS = np.full((num_rows, length), -1, dtype=np.int64)
    domain_ids_BS = np.full((num_rows, length), -1, dtype=np.int64)
    used_B = np.bincount(layout.row_N, weights=layout.length_N, minlength=num_rows).astype(np.int64)
    position_ids_BS = np.arange(length) - used_B[:, None]  # of the padding, which is overwritten where documents lie
    places = zip(*(values_N.tolist() for values_N in vars(layout).values()), strict=True)
    for source, begin, size, row, column, document in places:
        cache, where = caches[source], slice(column, column + size)
        input_ids_BS[row, where] = cache.tokens[begin : begin + size]
        labels_BS[row, where] = input_ids_BS[row, where]
        labels_BS[row, column] = IGNORED
        for masked_from, masked_to in cache.masked(begin, begin + size):
            labels_BS[row, column + masked_from - begin : column + masked_to - begin] = IGNORED
        position_ids_BS[row, where] = np.arange(size)
        document_ids_BS[row, where] = document
        domain_ids_BS[row, where] = domains[source]
    first = int(layout.document_N[0]) if len(layout.document_N) else 0
    return PackedBatch(
        input_ids_BS=torch.from_numpy(input_ids_BS),
        labels_BS=torch.from_numpy(labels_BS),
        position_ids_BS=torch.from_numpy(position_ids_BS),
        document_ids_BS=torch.from_numpy(document_ids_BS),
        domain_ids_BS=torch.from_numpy(domain_ids_BS),
        first_document=first,
        num_documents=int(layout.document_N[-1]) - first + 1 if len(layout.document_N) else 0,
    )


@torch.no_grad()
def keeps_documents_apart(model: Any) -> bool:
    """Whether position ids that restart keep packed documents apart in this model.

    transformers' masks see to it where a family passes its position ids on; GPT-OSS does not, and layers with a state
    (Mamba, linear attention, convolutions) carry it over.
    """
    weight = next(model.parameters())
    ids_BS = torch.tensor([[0, 1, 2, 1, 0, 2]], device=weight.device)
    positions_BS = torch.tensor([[0, 1, 2, 0, 1, 2]], device=weight.device)
    packed_SV = model(input_ids=ids_BS, position_ids=positions_BS, use_cache=False).logits[0, 3:].float()
    alone_SV = model(input_ids=ids_BS[:, 3:], use_cache=False).logits[0].float()
    limit = 1e-4 if weight.dtype in (torch.float32, torch.float64) else 0.02
    return bool((packed_SV - alone_SV).norm() < limit * alone_SV.norm())


def one_per_row(batch: PackedBatch) -> PackedBatch:
    """The same pieces of documents, each in a row of its own, padded at the end: for a model that looks back from one
    into the other. Exact for every causal model, at the price of the padding.
    """
    starts_BS = (batch.document_ids_BS >= 0) & (batch.position_ids_BS == 0)
    if not starts_BS.any():
        return batch
    start_R = starts_BS.flatten().nonzero().squeeze(1)
    piece_T = starts_BS.flatten().cumsum(0) - 1
    length_R = piece_T[batch.document_ids_BS.flatten() >= 0].bincount()
    column_S = torch.arange(int(length_R.max()), device=start_R.device)
    inside_RS = column_S < length_R[:, None]
    place_RS = (start_R[:, None] + column_S).clamp_max(starts_BS.numel() - 1)

    def rows(values_BS: Tensor, padding: int) -> Tensor:
        return torch.where(inside_RS, values_BS.flatten()[place_RS], padding)

    return replace(
        batch,
        input_ids_BS=batch.input_ids_BS.flatten()[place_RS],
        labels_BS=rows(batch.labels_BS, IGNORED),
        position_ids_BS=column_S.expand_as(place_RS).contiguous(),
        document_ids_BS=rows(batch.document_ids_BS, -1),
        domain_ids_BS=rows(batch.domain_ids_BS, -1),
    )
