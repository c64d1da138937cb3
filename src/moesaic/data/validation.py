"""Held-out documents of one domain, each whole and by itself."""

from collections.abc import Iterator

import numpy as np

from moesaic.data.batch import PackedBatch
from moesaic.data.cache import open_cache
from moesaic.data.packing import Layout, fill
from moesaic.data.prepare import PreparedData, refuse_unpredicted


class ValidationSet:
    """All documents of the validation sources of one domain, in their order, every token once.

    Documents are not cut unless they are longer than a sequence: a document goes into the current sequence if it fits
    and starts a new one otherwise; what stays free is padding. A longer document continues in the next sequences
    under the same id. The ids count the documents of the set, so a loss per document, and its standard error over
    documents, is a sum by `document_ids_BS` over all batches. Raises `MoesaicError` for a source in which nothing is
    predicted.
    """

    def __init__(self, data: PreparedData, domain: str) -> None:
        chosen = [index for index, source in enumerate(data.recipe.validation) if source.domain == domain]
        assert chosen, domain
        self.domain = domain
        self._domain_id = data.recipe.domains.index(domain)
        self._padding_id = data.padding_id
        self._caches = [open_cache(data.validation[index]) for index in chosen]
        self._layout = _next_fit([cache.offsets for cache in self._caches], data.recipe.sequence_length)
        self.paths = [data.recipe.validation[index].path for index in chosen]
        self.cache_names = [data.validation[index].name for index in chosen]
        for number, (path, cache) in enumerate(zip(self.paths, self._caches, strict=True)):
            pieces = self._layout.source_N == number
            refuse_unpredicted(path, cache, self._layout.begin_N[pieces], self._layout.length_N[pieces])
        self.num_documents = sum(cache.num_documents for cache in self._caches)
        self.num_tokens = sum(cache.num_tokens for cache in self._caches)
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


def validation_sets(data: PreparedData) -> tuple[ValidationSet, ...]:
    """One set per domain that has validation sources, in the order of the recipe."""
    domains = dict.fromkeys(source.domain for source in data.recipe.validation)
    return tuple(ValidationSet(data, domain) for domain in domains)


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
    table = np.array(pieces, dtype=np.int64)
    return Layout(**dict(zip(Layout.__dataclass_fields__, table.T, strict=True)))
