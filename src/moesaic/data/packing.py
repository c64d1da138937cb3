"""Pieces of documents laid out in the rows of a batch, and the batch made of them. Pure functions."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from moesaic.data.batch import PackedBatch
from moesaic.data.cache import TokenCache
from moesaic.data.stream import Pieces

IGNORED = -100


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
        fields = {name: getattr(self, name)[first:last] for name in self.__dataclass_fields__}
        return Layout(**(fields | {"row_N": fields["row_N"] - start}))


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
    places = zip(*(getattr(layout, name).tolist() for name in layout.__dataclass_fields__), strict=True)
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
