"""Every random number of Moesaic comes from a key: a function of a seed and of what the number is for, never of order.

So neither the number of workers or ranks nor a resumed run changes a number, and two purposes never share a stream.

- `key`, `generator`, `normal`, `normal_blocks`, `subset`: weights, router rows, which neurons or experts are meant.
  The key is BLAKE2b of (seed, purpose); torch's CPU generator is seeded with it. NumPy and `random` take `key` too.
- `order`, `within`: which documents or records are taken, and in which order (xxh3 of "purpose/seed/number").
- `permutation_key`, `permute`: a permutation of any size that is computed, not stored (xxh3 keys, a Feistel network).
- `fold_key`, `draw_integers`: integers for a tensor of keys on any device, without state (splitmix64): document pools.

There are two hash functions, and two forms of text under xxh3, because the bytes of results and the data of resumed
runs depend on them: these numbers must never change. No torch or NumPy is imported before a function needs it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

_NORMAL_BLOCK = 1 << 20
"""Numbers drawn at a time. Part of the format: another block size gives other numbers from the same seed."""

_FEISTEL_ROUNDS = 6

# splitmix64 (Steele, Lea, Flood 2014): a counter times an odd constant, then a finaliser that mixes all 64 bits. A
# generator with state would have to be advanced by every rank for documents it never sees, and would stop the device.
_GAMMA = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
_ALL_BITS = (1 << 64) - 1


# --- streams of torch's generator, one for each purpose ---------------------------------------------------------------


def key(seed: int, *purpose: str | int) -> int:
    """Return 64 bits for one purpose, such as `("drop", layer, "expert", 3)`; no two purposes share a key."""
    text = "\x1f".join(str(part) for part in (seed, *purpose))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def generator(seed: int, *purpose: str | int) -> torch.Generator:
    """A CPU generator of its own for one purpose (see `key`)."""
    import torch

    return torch.Generator().manual_seed(key(seed, *purpose))


def normal_blocks(
    count: int, std: float, generator: torch.Generator, *, mean: float = 0.0
) -> Iterator[tuple[int, Tensor]]:
    """Yield `count` independent draws from N(mean, std) by float32 blocks: (number of the first, draws).

    A block is overwritten by the next one.
    """
    import torch

    block = torch.empty(min(_NORMAL_BLOCK, count))
    for start in range(0, count, _NORMAL_BLOCK):
        yield start, block[: count - start].normal_(mean, std, generator=generator)


def normal(
    shape: Sequence[int],
    std: float,
    generator: torch.Generator,
    *,
    mean: float = 0.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Independent draws from N(mean, std), stored in `dtype` (default: float32)."""
    import torch

    values = torch.empty(math.prod(shape), dtype=dtype or torch.float32)
    for start, part in normal_blocks(len(values), std, generator, mean=mean):
        values[start : start + len(part)] = part
    return values.view(tuple(shape))


def subset(count: int, total: int, generator: torch.Generator) -> Tensor:
    """`count` different numbers below `total`, sorted, every set equally likely."""
    import torch

    return torch.randperm(total, generator=generator)[:count].sort().values


# --- hashes that order and split documents ----------------------------------------------------------------------------


def order(purpose: str, seed: int, number: int | str) -> int:
    """64 bits for record `number`, or for a content by its digest: the n records with the smallest are a uniform
    sample; also a seed for NumPy."""
    import xxhash

    return xxhash.xxh3_64_intdigest(f"{purpose}/{seed}/{number}".encode())


def within(share: float, purpose: str, seed: int, number: int | str) -> bool:
    """Whether record `number`, or a content, is in the `share` (0 to 1) of all; an integer is compared, so nothing is
    rounded."""
    return order(purpose, seed, number) < share * 2**64


# --- permutations that are computed -----------------------------------------------------------------------------------


def permutation_key(*parts: int) -> int:
    """A 64-bit key that depends on all of the integers and on their order."""
    import xxhash

    return xxhash.xxh3_64_intdigest(repr([int(part) for part in parts]).encode())


def permute(index_N: NDArray[np.integer], *, size: int, key: int) -> NDArray[np.int64]:
    """The images of `index_N` under a pseudorandom permutation of `range(size)` chosen by `key`.

    A balanced Feistel network over the next even number of bits, walked along its cycles until it is back in range (at
    most four times the size, so four rounds on average). Time and memory: O(len(index_N)), whatever the size. NumPy's
    own permutations are stored whole and may change with its version.
    """
    import numpy as np

    assert size > 0
    half = np.uint64((max(2, (size - 1).bit_length()) + 1) // 2)
    keys = [np.uint64(permutation_key(key, number)) for number in range(_FEISTEL_ROUNDS)]
    image_N = _feistel(index_N.astype(np.uint64), half, keys)
    outside_M = np.flatnonzero(image_N >= np.uint64(size))
    while len(outside_M):
        image_M = _feistel(image_N[outside_M], half, keys)
        image_N[outside_M] = image_M
        outside_M = outside_M[image_M >= np.uint64(size)]
    return image_N.astype(np.int64)


def _feistel(value_N: NDArray[np.uint64], half: np.uint64, keys: list[np.uint64]) -> NDArray[np.uint64]:
    import numpy as np

    mask = (np.uint64(1) << half) - np.uint64(1)
    left_N, right_N = value_N >> half, value_N & mask
    for round_key in keys:
        left_N, right_N = right_N, left_N ^ (_finalise_array(right_N ^ round_key) & mask)
    return (left_N << half) | right_N


# --- splitmix64 -------------------------------------------------------------------------------------------------------


def fold_key(*parts: int) -> int:
    """Mix integers of any sign into one 64-bit key; the order of the parts matters."""
    folded = 0
    for part in parts:
        folded = _finalise_int((((folded + _GAMMA) & _ALL_BITS) ^ (part & _ALL_BITS)) & _ALL_BITS)
    return folded


def draw_integers(keys_N: Tensor, low: int, high: int, *, stream: int) -> Tensor:
    """Draw one integer from {low..high} for each int64 key, on the keys' device.

    `stream` (see `fold_key`) selects an independent sequence. The remainder of 63 random bits is uniform up to
    (high - low + 1) / 2**63, far below what any number of draws could show.
    """
    bits_N = _finalise_tensor((keys_N + 1) * _signed(_GAMMA) + _signed(stream))
    return low + (bits_N & ((1 << 63) - 1)) % (high - low + 1)


# The same finaliser three times: Python's integers are never cut, NumPy's uint64 is, and torch has only int64.


def _finalise_int(value: int) -> int:
    value = ((value ^ (value >> 30)) * _FIRST) & _ALL_BITS
    value = ((value ^ (value >> 27)) * _SECOND) & _ALL_BITS
    return value ^ (value >> 31)


def _finalise_array(value_N: NDArray[np.uint64]) -> NDArray[np.uint64]:
    import numpy as np

    value_N = (value_N ^ (value_N >> np.uint64(30))) * np.uint64(_FIRST)
    value_N = (value_N ^ (value_N >> np.uint64(27))) * np.uint64(_SECOND)
    return value_N ^ (value_N >> np.uint64(31))


def _finalise_tensor(value: Tensor) -> Tensor:
    value = (value ^ _logical_shift(value, 30)) * _signed(_FIRST)
    value = (value ^ _logical_shift(value, 27)) * _signed(_SECOND)
    return value ^ _logical_shift(value, 31)


def _logical_shift(value: Tensor, bits: int) -> Tensor:
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    """The two's complement reading of 64 bits: torch has no arithmetic on uint64, and int64 wraps around the same."""
    return value - (1 << 64) if value >> 63 else value
