"""Seeded random streams that do not depend on the order of the work or on the number of workers."""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor


def generator(seed: int, *purpose: str | int) -> torch.Generator:
    """A CPU generator of its own for one purpose, such as `("drop", layer, "expert", 3)`.

    The stream is keyed by a hash of the seed and the purpose, so two purposes never share one.
    """
    key = "\x1f".join(str(part) for part in (seed, *purpose))
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big"))


def normal(
    shape: Sequence[int],
    std: float,
    generator: torch.Generator,
    *,
    mean: float = 0.0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Independent draws from N(mean, std)."""
    return torch.empty(tuple(shape), dtype=dtype).normal_(mean, std, generator=generator)


def choose(count: int, total: int, generator: torch.Generator) -> Tensor:
    """`count` different numbers below `total`, sorted, every set equally likely."""
    return torch.randperm(total, generator=generator)[:count].sort().values
