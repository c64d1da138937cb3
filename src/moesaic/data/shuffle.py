"""Permutations of any size that are computed, not stored, and do not change with NumPy's version."""

import numpy as np
import xxhash
from numpy.typing import NDArray

ROUNDS = 6


def derive_key(*parts: int) -> int:
    """A 64-bit key that depends on all of the integers and on their order."""
    return xxhash.xxh3_64_intdigest(repr([int(part) for part in parts]).encode())


def permute(index_N: NDArray[np.integer], *, size: int, key: int) -> NDArray[np.int64]:
    """The images of `index_N` under a pseudorandom permutation of `range(size)` chosen by `key`.

    A balanced Feistel network over the next even number of bits, walked along its cycles until it is back in range (at
    most four times the size, so four rounds on average). Time and memory: O(len(index_N)), whatever the size.
    """
    assert size > 0
    half = np.uint64((max(2, (size - 1).bit_length()) + 1) // 2)
    keys = [np.uint64(derive_key(key, number)) for number in range(ROUNDS)]
    image_N = _feistel(index_N.astype(np.uint64), half, keys)
    outside_M = np.flatnonzero(image_N >= np.uint64(size))
    while len(outside_M):
        image_M = _feistel(image_N[outside_M], half, keys)
        image_N[outside_M] = image_M
        outside_M = outside_M[image_M >= np.uint64(size)]
    return image_N.astype(np.int64)


def _feistel(value_N: NDArray[np.uint64], half: np.uint64, keys: list[np.uint64]) -> NDArray[np.uint64]:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left_N, right_N = value_N >> half, value_N & mask
    for key in keys:
        left_N, right_N = right_N, left_N ^ (_mix(right_N ^ key) & mask)
    return (left_N << half) | right_N


def _mix(value_N: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Every bit of the result depends on every bit of the value (a multiply-xorshift hash; overflow is wanted)."""
    value_N = (value_N ^ (value_N >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value_N = (value_N ^ (value_N >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value_N ^ (value_N >> np.uint64(31))
