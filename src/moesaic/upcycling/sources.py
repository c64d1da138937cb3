"""Dense FFNs of one layer, cut on demand: from memory (tests, verify) and from files (conversion)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.checkpoint.reader import TORCH_DTYPES, read_tensor
from moesaic.families.dense import DenseFFN, RowRange
from moesaic.upcycling.experts import ExpertWeights
from moesaic.upcycling.method import Shard

BLOCK_BYTES = 4 << 20
"""Read, changed and written at a time."""


@dataclass(frozen=True, kw_only=True)
class MemorySources:
    """FFNs that are in memory anyway: `ffns[0]` is the base's, `ffns[1 + i]` specialist i's."""

    ffns: tuple[ExpertWeights, ...]
    shards: int
    """M."""

    @property
    def dtype(self) -> torch.dtype:
        """The FFNs' own precision."""
        return self.ffns[0].gate_ID.dtype

    def shard(self, shard: Shard) -> ExpertWeights:
        """A copy of the shard."""
        return self.ffns[shard.source].slice(shard.number, self.shards).map(lambda _, value: value.clone())


@dataclass(frozen=True, kw_only=True)
class DiskSources:
    """FFNs of one layer in safetensors files; only the rows and columns of the shard are kept in memory."""

    ffns: tuple[DenseFFN, ...]
    shards: int
    """M."""
    output_dtype: torch.dtype

    @property
    def dtype(self) -> torch.dtype:
        """The narrowest precision that holds both the base's weights and the result's."""
        return torch.promote_types(_stored_dtype(self.ffns[0].down), self.output_dtype)

    def shard(self, shard: Shard) -> ExpertWeights:
        """Read one shard."""
        ffn = self.ffns[shard.source]

        def part(rows: RowRange | None) -> Tensor | None:
            return None if rows is None else read_rows(shard_rows(rows, shard.number, self.shards)).to(self.dtype)

        gate, up = part(ffn.gate), part(ffn.up)
        assert gate is not None
        assert up is not None
        wide = torch.promote_types(self.dtype, torch.float32)  # a third of a bias rounds in bf16
        bias = None if ffn.down_bias is None else read_rows(ffn.down_bias).to(wide) / self.shards
        return ExpertWeights(
            gate_ID=gate,
            up_ID=up,
            down_DI=self._columns(ffn.down, shard.number),
            gate_bias_I=part(ffn.gate_bias),
            up_bias_I=part(ffn.up_bias),
            down_bias_D=bias,
        )

    def _columns(self, rows: RowRange, number: int) -> Tensor:
        """Columns of one shard, from blocks of whole rows: a few MB more than the result."""
        hidden, width = rows.stop - rows.start, rows.info.shape[1] // self.shards
        columns = torch.empty(hidden, width, dtype=self.dtype)
        for start, stop in row_blocks(rows):
            block = read_tensor(rows.info, start, stop)
            columns[start - rows.start : stop - rows.start] = block[:, number * width : (number + 1) * width]
        return columns


def shard_rows(rows: RowRange, number: int, shards: int) -> RowRange:
    """The rows of shard `number` of `shards` within a range of rows."""
    width = (rows.stop - rows.start) // shards
    return RowRange(info=rows.info, start=rows.start + number * width, stop=rows.start + (number + 1) * width)


def read_rows(rows: RowRange) -> Tensor:
    """The rows in the file's dtype."""
    return read_tensor(rows.info, rows.start, rows.stop)


def row_blocks(rows: RowRange, block_bytes: int = BLOCK_BYTES) -> Sequence[tuple[int, int]]:
    """Cut a range of rows into blocks of about `block_bytes`, at least one row each: (start, stop) pairs."""
    row_bytes = max(rows.info.nbytes // max(rows.info.shape[0], 1), 1)
    step = max(block_bytes // row_bytes, 1)
    return [(start, min(start + step, rows.stop)) for start in range(rows.start, rows.stop, step)]


def _stored_dtype(rows: RowRange) -> torch.dtype:
    return TORCH_DTYPES[rows.info.dtype]
