"""One source as an endless stream of tokens: all its documents, in a new order each epoch."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from moesaic.data.shuffle import derive_key, permute

BLOCK_DOCUMENTS = 65_536


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """Consecutive pieces of documents, in the order of the stream."""

    begin_N: NDArray[np.int64]
    """First token, as an index into the source's token file."""
    length_N: NDArray[np.int64]
    """Number of tokens."""


class DocumentStream:
    """The documents of a source one after the other, epoch after epoch, each epoch in its own order.

    Position p of the stream is found directly, without going through what lies before. For that the order is made in
    two levels: a fixed pseudorandom permutation deals the documents into blocks of 65,536 (each a random sample of
    the whole source), and every epoch permutes the blocks and, anew, the documents within each block. A source of at
    most one block is so shuffled freely. Memory is one number per block and the few blocks in use, whatever the size
    of the source; the one pass over the document lengths at the start takes about a second per ten million documents.
    """

    def __init__(
        self, offsets: NDArray[np.int64], *, seed: int, stream: int, block_documents: int = BLOCK_DOCUMENTS
    ) -> None:
        """`offsets`: of all documents in the token file and its end; `stream`: which of the run's sources this is."""
        self._offsets = np.asarray(offsets)
        self.num_documents = len(offsets) - 1
        self.num_tokens = int(offsets[-1])
        self._block_documents = block_documents
        self._key = derive_key(seed, stream)
        num_blocks = -(-self.num_documents // block_documents)
        self._block_tokens_B = np.array([self._lengths(self._members(block)).sum() for block in range(num_blocks)])
        self._epoch = lru_cache(maxsize=2)(self._order_blocks)
        self._block = lru_cache(maxsize=4)(self._order_documents)

    def pieces(self, start: int, stop: int) -> Pieces:
        """The pieces of documents at the positions `start` to `stop` of the stream; the ends may cut a document."""
        begins, lengths = [], []
        while start < stop:
            begin_N, length_N = self._pieces_in_block(start, stop)
            begins.append(begin_N)
            lengths.append(length_N)
            start += int(length_N.sum())
        empty = [np.empty(0, dtype=np.int64)]
        return Pieces(begin_N=np.concatenate(begins or empty), length_N=np.concatenate(lengths or empty))

    def _pieces_in_block(self, start: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        epoch, place = divmod(start, self.num_tokens)
        block_B, start_B = self._epoch(epoch)
        which = int(np.searchsorted(start_B, place, side="right")) - 1
        document_N, start_N = self._block(epoch, int(block_B[which]))
        low = place - int(start_B[which])
        high = min(low + stop - start, int(start_N[-1]))
        first = int(np.searchsorted(start_N, low, side="right")) - 1
        last = int(np.searchsorted(start_N, high, side="left"))
        from_N = np.maximum(start_N[first:last], low)
        to_N = np.minimum(start_N[first + 1 : last + 1], high)
        begin_N = self._offsets[document_N[first:last]] + from_N - start_N[first:last]
        return begin_N, to_N - from_N

    def _order_blocks(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        num_blocks = len(self._block_tokens_B)
        block_B = permute(np.arange(num_blocks), size=num_blocks, key=derive_key(self._key, epoch))
        return block_B, _starts(self._block_tokens_B[block_B])

    def _order_documents(self, epoch: int, block: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        member_N = self._members(block)
        num = len(member_N)
        document_N = member_N[permute(np.arange(num), size=num, key=derive_key(self._key, epoch, block))]
        return document_N, _starts(self._lengths(document_N))

    def _members(self, block: int) -> NDArray[np.int64]:
        first = block * self._block_documents
        place_N = np.arange(first, min(first + self._block_documents, self.num_documents))
        return permute(place_N, size=self.num_documents, key=self._key)

    def _lengths(self, document_N: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._offsets[document_N + 1] - self._offsets[document_N]


def _starts(length_N: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(length_N)])
