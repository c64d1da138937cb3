"""Random integers that are a function of a key alone, so ranks, micro-batches and a second pass cannot change them.

splitmix64 (Steele, Lea, Flood 2014): a counter times an odd constant, then a finaliser that mixes all 64 bits. A
stateful generator would have to be advanced by every rank for documents it never sees, and would synchronise the host.
"""

from torch import Tensor

_GAMMA = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
_ALL_BITS = (1 << 64) - 1


def _signed(value: int) -> int:
    """The two's complement reading of 64 bits: torch has no arithmetic on uint64, and int64 wraps around the same."""
    return value - (1 << 64) if value >> 63 else value


def _finalise_int(value: int) -> int:
    value = ((value ^ (value >> 30)) * _FIRST) & _ALL_BITS
    value = ((value ^ (value >> 27)) * _SECOND) & _ALL_BITS
    return value ^ (value >> 31)


def _logical_shift(value: Tensor, bits: int) -> Tensor:
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _finalise(value: Tensor) -> Tensor:
    value = (value ^ _logical_shift(value, 30)) * _signed(_FIRST)
    value = (value ^ _logical_shift(value, 27)) * _signed(_SECOND)
    return value ^ _logical_shift(value, 31)


def fold_key(*parts: int) -> int:
    """Mix integers of any sign into one 64-bit key; the order of the parts matters."""
    key = 0
    for part in parts:
        key = _finalise_int((((key + _GAMMA) & _ALL_BITS) ^ (part & _ALL_BITS)) & _ALL_BITS)
    return key


def draw_integers(keys_N: Tensor, low: int, high: int, *, stream: int) -> Tensor:
    """Draw one integer from {low..high} for each int64 key, on the keys' device.

    `stream` (see `fold_key`) selects an independent sequence. The remainder of 63 random bits is uniform up to
    (high - low + 1) / 2**63, far below what any number of draws could show.
    """
    bits_N = _finalise((keys_N + 1) * _signed(_GAMMA) + _signed(stream))
    return low + (bits_N & ((1 << 63) - 1)) % (high - low + 1)
