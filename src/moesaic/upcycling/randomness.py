"""Random tensors from generators that are seeded per purpose."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from moesaic.upcycling.streams import stream_key

_BLOCK = 1 << 20
"""Numbers drawn at a time. Part of the format: another block size gives other numbers from the same seed."""


def generator(seed: int, *purpose: str | int) -> torch.Generator:
    """A CPU generator of its own for one purpose (see `streams.stream_key`)."""
    return torch.Generator().manual_seed(stream_key(seed, *purpose))


def normal_blocks(
    count: int, std: float, generator: torch.Generator, *, mean: float = 0.0
) -> Iterator[tuple[int, Tensor]]:
    """Yield `count` independent draws from N(mean, std) by float32 blocks: (number of the first, draws).

    A block is overwritten by the next one.
    """
    block = torch.empty(min(_BLOCK, count))
    for start in range(0, count, _BLOCK):
        yield start, block[: count - start].normal_(mean, std, generator=generator)


def normal(
    shape: Sequence[int],
    std: float,
    generator: torch.Generator,
    *,
    mean: float = 0.0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Independent draws from N(mean, std), stored in `dtype`."""
    values = torch.empty(math.prod(shape), dtype=dtype)
    for start, part in normal_blocks(len(values), std, generator, mean=mean):
        values[start : start + len(part)] = part
    return values.view(tuple(shape))


def choose(count: int, total: int, generator: torch.Generator) -> Tensor:
    """`count` different numbers below `total`, sorted, every set equally likely."""
    return torch.randperm(total, generator=generator)[:count].sort().values
