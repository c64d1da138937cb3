"""The batches of a run: training data, of which a step is a function of seed and step alone, and held-out documents."""

from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from moesaic.common.errors import MoesaicError
from moesaic.data.cache import TokenCache, open_cache
from moesaic.data.mixing import DocumentStream, Pieces, Schedule, integer_shares
from moesaic.data.packing import Layout, PackedBatch, cut, fill, layout_of
from moesaic.data.tokenise import PreparedData, refuse_unpredicted


class PackedDataset:
    """Mixed, shuffled sequences, packed or of one document each; any step of any rank at once, so resuming is asking
    for the next step.

    Each source is a stream of its documents, reshuffled every epoch; sequence n of a source is the tokens nS to
    (n+1)S of its stream, so every token of an epoch comes exactly once before any comes again, and a sequence may
    hold the end of one epoch and the start of the next. A fixed schedule says which source each sequence of the run
    comes from: after any number of sequences each source has had its share of them within less than one.

    Without packing the same holds of documents in the place of tokens: sequence n of a source is document n of its
    stream, whole, padded to the longest document of the step.
    """

    def __init__(self, data: PreparedData, *, seed: int, sequences_per_step: int) -> None:
        """`sequences_per_step`: sequences in the batch of all ranks and micro-steps together."""
        if sequences_per_step < 1:
            raise MoesaicError("batch.tokens is less than data.sequence_length; a step needs at least one sequence")
        recipe = data.recipe
        self.domains = recipe.domains
        self.sequence_length = recipe.sequence_length
        self.sequences_per_step = sequences_per_step
        self._padding_id = data.padding_id
        self._folders = data.sources
        self._caches = [open_cache(folder) for folder in data.sources]
        self._domain_ids = [self.domains.index(source.domain) for source in recipe.sources]
        self._packing = recipe.packing
        if not recipe.packing:
            for source, cache in zip(recipe.sources, self._caches, strict=True):
                _refuse_longer(source.name, cache, recipe.sequence_length)
        # A stream counts tokens, and without packing documents.
        counted = [cache.offsets if recipe.packing else np.arange(cache.num_documents + 1) for cache in self._caches]
        self._per_sequence = self.sequence_length if recipe.packing else 1
        self._streams = [DocumentStream(offsets, seed=seed, stream=index) for index, offsets in enumerate(counted)]
        self._ends: list[int] | None = None
        shares = integer_shares([source.weight for source in recipe.sources])
        if recipe.epochs is not None:
            self._ends = [recipe.epochs * stream.num_tokens for stream in self._streams]
            shares = tuple(-(-end // self._per_sequence) for end in self._ends)
        self.num_sequences = None if self._ends is None else sum(shares)
        self._schedule = Schedule(shares)
        # The last two steps are kept, for their other micro-steps and a prefetching thread.
        self._layout = lru_cache(maxsize=2)(self._make_layout)

    @property
    def cache_names(self) -> list[str]:
        """What identifies the content of every source, and how it was tokenised."""
        return [folder.name for folder in self._folders]

    @property
    def num_steps(self) -> int | None:
        """Steps until `epochs` are through, the last one padded to a whole batch; None where the data repeats."""
        return None if self.num_sequences is None else -(-self.num_sequences // self.sequences_per_step)

    @property
    def tokens_per_step(self) -> int:
        """Positions in the batch of a step, padding included."""
        return self.sequences_per_step * self.sequence_length

    def batch(
        self, step: int, *, micro_step: int = 0, num_micro_steps: int = 1, rank: int = 0, world_size: int = 1
    ) -> PackedBatch:
        """The part of a step's batch for one micro-step on one rank.

        The batch of a step is `sequences_per_step` consecutive sequences. A micro-step takes consecutive ones of
        these, a rank consecutive ones of the micro-step's. Document ids count through the whole batch of the step, so
        they do not depend on the cut. `world_size` counts the ranks that read *different* data. Raises `MoesaicError`
        where the batch cannot be cut into equal parts, and after the last of `num_steps`.
        """
        assert step >= 0
        assert 0 <= micro_step < num_micro_steps
        assert 0 <= rank < world_size
        rows, rest = divmod(self.sequences_per_step, num_micro_steps * world_size)
        if rest:
            raise MoesaicError(
                f"batch.tokens gives {self.sequences_per_step} sequences of {self.sequence_length} tokens, which "
                f"{num_micro_steps} micro-steps on {world_size} ranks cannot share equally; make it a multiple of "
                f"{num_micro_steps * world_size * self.sequence_length}"
            )
        if self.num_steps is not None and step >= self.num_steps:
            raise MoesaicError(f"step {step} is past the end of the data: data.epochs gives {self.num_steps} steps")
        first_row = (micro_step * world_size + rank) * rows
        layout = self._layout(step)
        return fill(
            layout.rows(first_row, first_row + rows),
            num_rows=rows,
            length=self.sequence_length if self._packing else max(2, int((layout.column_N + layout.length_N).max())),
            caches=self._caches,
            domains=self._domain_ids,
            padding_id=self._padding_id,
        )

    def _make_layout(self, step: int) -> Layout:
        first = step * self.sequences_per_step
        last = first + self.sequences_per_step
        if self.num_sequences is not None:
            last = min(last, self.num_sequences)
        source_R, number_R = self._schedule.assign(np.arange(first, last))
        parts = []
        for source in np.unique(source_R).tolist():
            row_R = np.flatnonzero(source_R == source)
            number = int(number_R[row_R[0]])  # of the first; the others follow without a gap
            start, stop = number * self._per_sequence, (number + len(row_R)) * self._per_sequence
            if self._ends is not None:
                stop = min(stop, self._ends[source])
            pieces, sequence_N, column_N = cut(self._streams[source].pieces(start, stop), self._per_sequence)
            if not self._packing:
                pieces = _documents(self._caches[source], pieces.begin_N)
            source_N = np.full(len(column_N), source)
            parts.append((source_N, pieces.begin_N, pieces.length_N, row_R[sequence_N], column_N))
        *columns, row_N, column_N = (np.concatenate(part) for part in zip(*parts, strict=True))
        order_N = np.lexsort((column_N, row_N))
        return layout_of(*(values_N[order_N] for values_N in (*columns, row_N, column_N)), np.arange(len(order_N)))


def _documents(cache: TokenCache, document_N: NDArray[np.int64]) -> Pieces:
    """Whole documents by their numbers."""
    begin_N = cache.offsets[document_N]
    return Pieces(begin_N=begin_N, length_N=cache.offsets[document_N + 1] - begin_N)


def _refuse_longer(name: str, cache: TokenCache, length: int) -> None:
    """Refuse documents that do not fit into a sequence of their own: what is cut would be the answer."""
    length_N = np.diff(cache.offsets)
    longer = int((length_N > length).sum())
    if longer:
        raise MoesaicError(
            f"{name}: {longer:,} of {cache.num_documents:,} documents are longer than data.sequence_length "
            f"({length:,}), the longest has {int(length_N.max()):,} tokens; raise it, as data.packing: false cuts none"
        )


class ValidationSet:
    """All documents of the validation sources of one domain, in their order, every token once.

    Documents are not cut unless they are longer than a sequence: a document goes into the current sequence if it fits
    and starts a new one otherwise; what stays free is padding. A longer document continues in the next sequences
    under the same id. The ids count the documents of the set, so a loss per document, and its standard error over
    documents, is a sum by `document_ids_BS` over all batches. Raises `MoesaicError` for a source in which nothing is
    predicted.
    """

    def __init__(self, data: PreparedData, domain: str, *, limit: int | None = None) -> None:
        """With a limit, of the first documents only."""
        chosen = [index for index, source in enumerate(data.recipe.validation) if source.domain == domain]
        assert chosen, domain
        self.domain = domain
        self._domain_id = data.recipe.domains.index(domain)
        self._padding_id = data.padding_id
        self._caches = [open_cache(data.validation[index]) for index in chosen]
        offsets = _first([cache.offsets for cache in self._caches], limit)
        self._layout = _next_fit(offsets, data.recipe.sequence_length)
        self.paths = [data.recipe.validation[index].name for index in chosen]
        self.cache_names = [data.validation[index].name for index in chosen]
        for number, (path, cache) in enumerate(zip(self.paths, self._caches, strict=True)):
            pieces = self._layout.source_N == number
            if pieces.any():
                refuse_unpredicted(path, cache, self._layout.begin_N[pieces], self._layout.length_N[pieces])
        self.num_documents = sum(len(offset_N) - 1 for offset_N in offsets)
        self.num_tokens = int(sum(offset_N[-1] - offset_N[0] for offset_N in offsets))
        self.num_sequences = int(self._layout.row_N[-1]) + 1

    def batches(self, sequences: int, *, rank: int = 0, world_size: int = 1) -> Iterator[PackedBatch]:
        """Batches of `sequences` sequences for one rank, just wide enough for the documents in them.

        Every rank gets the same number of batches of the same shapes; where sequences run out they are all padding.
        """
        assert 0 <= rank < world_size
        for first in range(0, self.num_sequences, sequences * world_size):
            group = self._layout.rows(first, first + sequences * world_size)
            yield fill(
                group.rows(rank * sequences, (rank + 1) * sequences),
                num_rows=sequences,
                length=max(2, int((group.column_N + group.length_N).max())),
                caches=self._caches,
                domains=[self._domain_id] * len(self._caches),
                padding_id=self._padding_id,
            )


def validation_sets(data: PreparedData, *, limit: int | None = None) -> tuple[ValidationSet, ...]:
    """One set per domain that has validation sources, in the order of the recipe; `limit` documents of each."""
    domains = dict.fromkeys(source.domain for source in data.recipe.validation)
    return tuple(ValidationSet(data, domain, limit=limit) for domain in domains)


def _first(offsets: list[np.ndarray], limit: int | None) -> list[np.ndarray]:
    """The offsets of the first documents over all sources."""
    if limit is None:
        return offsets
    before = accumulate((len(offset_N) - 1 for offset_N in offsets), initial=0)
    return [offset_N[: max(0, limit - count) + 1] for offset_N, count in zip(offsets, before, strict=False)]


def _next_fit(offsets: list[np.ndarray], length: int) -> Layout:
    pieces = []  # source, begin, length, row, column, document
    row, column, document = 0, 0, 0
    for source, offset_N in enumerate(offsets):
        for begin, end in zip(offset_N[:-1].tolist(), offset_N[1:].tolist(), strict=True):
            if column and column + min(end - begin, length) > length:
                row, column = row + 1, 0
            for start in range(begin, end, length):
                if column == length:
                    row, column = row + 1, 0
                size = min(length, end - start)
                pieces.append((source, start, size, row, column, document))
                column += size
            document += 1
    return layout_of(*np.array(pieces, dtype=np.int64).T)
