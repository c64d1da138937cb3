"""The order of training: which source each sequence comes from, and the order of the documents in a source.

Both are functions of the position alone, so a run that resumes, or asks with other ranks and workers, gets the bytes
that an unbroken run gets; neither goes through what lies before. Random draws by weight would not do: they give the
shares on the average only, and 1,000 sequences of a source with 1% would be 10, give or take 6.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from moesaic.common import seeds

MAX_PERIOD = 100_000
"""Shares are exact to 1 in so many; the table of a period then takes 0.5 MB."""
BLOCK_DOCUMENTS = 65_536


def integer_shares(weights: Sequence[float], *, limit: int = MAX_PERIOD) -> tuple[int, ...]:
    """Weights as whole numbers in the same proportion, their sum at most `limit`.

    Weights are taken as the decimals that were written, so 0.35 and 0.65 become 7 and 13. Where the sum would exceed
    the limit, shares are rounded to multiples of 1/limit (each at least one).
    """
    exact = [Fraction(repr(float(weight))) for weight in weights]
    scale = math.lcm(*(value.denominator for value in exact))
    whole = [int(value * scale) for value in exact]
    divisor = math.gcd(*whole)
    shares = tuple(value // divisor for value in whole)
    if sum(shares) <= limit:
        return shares
    total = sum(exact)
    return tuple(max(1, math.floor(value / total * limit)) for value in exact)


class Schedule:
    """A periodic sequence of sources in which source i has `shares[i]` places per period.

    After any number n of sequences, every source has had its exact share of them within less than one sequence: at most
    1 - 1/(2k - 2) for k sources (R. Tijdeman, "The chairman assignment problem", Discrete Mathematics 32, 1980).
    The table of one period is kept (5 bytes a place), so any position is found without going through those before.
    """

    def __init__(self, shares: Sequence[int]) -> None:
        divisor = math.gcd(*shares)
        self.shares_K = np.array([share // divisor for share in shares], dtype=np.int64)
        self.period = int(self.shares_K.sum())
        self._source_P = _assign([int(share) for share in self.shares_K])
        self._place_P = np.empty(self.period, dtype=np.int32)
        for source, share in enumerate(self.shares_K):
            self._place_P[self._source_P == source] = np.arange(share, dtype=np.int32)

    def assign(self, sequence_N: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """For each sequence number: its source, and how many earlier sequences came from that source."""
        period_N, place_N = np.divmod(sequence_N, self.period)
        source_N = self._source_P[place_N].astype(np.int64)
        return source_N, period_N * self.shares_K[source_N] + self._place_P[place_N]


def _assign(shares: list[int]) -> NDArray[np.uint16]:
    """Tijdeman's rule in whole numbers: of the sources that are owed enough, the one whose turn is most urgent."""
    period, num = sum(shares), len(shares)
    table_P = np.zeros(period, dtype=np.uint16)
    if num == 1:
        return table_P
    scale = 2 * num - 2
    owed = [0] * num  # scale * (share * position - period * places had)
    for position in range(period):
        best, urgency = -1, math.inf
        for source, share in enumerate(shares):
            owed[source] += scale * share
            if owed[source] >= period:
                slack = (period * (scale - 1) - owed[source]) / share
                if slack < urgency:
                    best, urgency = source, slack
        assert best >= 0
        owed[best] -= scale * period
        table_P[position] = best
    return table_P


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
        self._key = seeds.permutation_key(seed, stream)
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
        block_B = seeds.permute(np.arange(num_blocks), size=num_blocks, key=seeds.permutation_key(self._key, epoch))
        return block_B, _starts(self._block_tokens_B[block_B])

    def _order_documents(self, epoch: int, block: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        member_N = self._members(block)
        num = len(member_N)
        document_N = member_N[
            seeds.permute(np.arange(num), size=num, key=seeds.permutation_key(self._key, epoch, block))
        ]
        return document_N, _starts(self._lengths(document_N))

    def _members(self, block: int) -> NDArray[np.int64]:
        first = block * self._block_documents
        place_N = np.arange(first, min(first + self._block_documents, self.num_documents))
        return seeds.permute(place_N, size=self.num_documents, key=self._key)

    def _lengths(self, document_N: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._offsets[document_N + 1] - self._offsets[document_N]


def _starts(length_N: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(length_N)])
