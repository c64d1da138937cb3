"""The packed training data: what a step contains is a function of the seed and the step alone."""

from collections import OrderedDict

import numpy as np

from moesaic.common.errors import MoesaicError
from moesaic.data.batch import PackedBatch
from moesaic.data.cache import open_cache
from moesaic.data.packing import Layout, cut, fill
from moesaic.data.prepare import PreparedData
from moesaic.data.schedule import Schedule, integer_shares
from moesaic.data.stream import DocumentStream


class PackedDataset:
    """Packed, mixed, shuffled sequences; any step of any rank at once, so resuming is asking for the next step.

    Each source is a stream of its documents, reshuffled every epoch; sequence n of a source is the tokens nS to
    (n+1)S of its stream, so every token of an epoch comes exactly once before any comes again, and a sequence may
    hold the end of one epoch and the start of the next. A fixed schedule says which source each sequence of the run
    comes from: after any number of sequences each source has had its share of them within less than one.
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
        self._streams = [
            DocumentStream(cache.offsets, seed=seed, stream=index) for index, cache in enumerate(self._caches)
        ]
        self._ends: list[int] | None = None
        shares = integer_shares([source.weight for source in recipe.sources])
        if recipe.epochs is not None:
            self._ends = [recipe.epochs * stream.num_tokens for stream in self._streams]
            shares = tuple(-(-end // self.sequence_length) for end in self._ends)
        self.num_sequences = None if self._ends is None else sum(shares)
        self._schedule = Schedule(shares)
        self._layouts: OrderedDict[int, Layout] = OrderedDict()

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
        return fill(
            self._layout(step).rows(first_row, first_row + rows),
            num_rows=rows,
            length=self.sequence_length,
            caches=self._caches,
            domains=self._domain_ids,
            padding_id=self._padding_id,
        )

    def _layout(self, step: int) -> Layout:
        """The layout of a whole step; the last two are kept for the other micro-steps and a prefetching thread."""
        layout = self._layouts.get(step)
        if layout is None:
            layout = self._layouts[step] = self._make_layout(step)
            while len(self._layouts) > 2:
                self._layouts.popitem(last=False)
        return layout

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
            start, stop = number * self.sequence_length, (number + len(row_R)) * self.sequence_length
            if self._ends is not None:
                stop = min(stop, self._ends[source])
            pieces, sequence_N, column_N = cut(self._streams[source].pieces(start, stop), self.sequence_length)
            source_N = np.full(len(column_N), source)
            parts.append((source_N, pieces.begin_N, pieces.length_N, row_R[sequence_N], column_N))
        source_N, begin_N, length_N, row_N, column_N = (np.concatenate(part) for part in zip(*parts, strict=True))
        order_N = np.lexsort((column_N, row_N))
        return Layout(
            source_N=source_N[order_N],
            begin_N=begin_N[order_N],
            length_N=length_N[order_N],
            row_N=row_N[order_N],
            column_N=column_N[order_N],
            document_N=np.arange(len(order_N)),
        )
