import itertools

import pytest
import torch

from moesaic.upcycling.randomness import choose, generator, normal, normal_blocks
from moesaic.upcycling.streams import stream_key


def test_streams_differ_by_seed_and_purpose():
    purposes = itertools.product((0, 1), ("a", "b"), (1, 11), ("expert",), (1, 11))
    keys = [stream_key(*purpose) for purpose in purposes]
    assert len(set(keys)) == len(keys)
    assert stream_key(0, "a", 1, 11) != stream_key(0, "a", 11, 1)
    assert stream_key(0, "a1", 1) != stream_key(0, "a", 11)


def test_the_hash_is_part_of_the_format():
    """The same recipe must give the same bytes in every version: this number must never change."""
    assert stream_key(0, "drop", 3, "expert", 7) == 18135049956645438473


def test_normal_has_the_moments_and_the_dtype():
    values = normal((2_500, 1_000), 0.5, generator(0, "x"), mean=2.0, dtype=torch.bfloat16)
    assert values.dtype == torch.bfloat16
    assert values.float().mean() == pytest.approx(2.0, abs=0.01)
    assert values.float().std() == pytest.approx(0.5, rel=0.01)


def test_blocks_are_what_normal_stores():
    count = 2_300_000
    stored = normal((count,), 1.0, generator(3, "x"))
    for start, block in normal_blocks(count, 1.0, generator(3, "x")):
        assert torch.equal(stored[start : start + len(block)], block)
    assert len(torch.unique(stored[:: 1 << 20])) == 3  # blocks are not repeats of the first


@pytest.mark.parametrize(("count", "total"), [(0, 5), (3, 5), (5, 5)])
def test_choose_gives_that_many_different_numbers(count, total):
    chosen = choose(count, total, generator(0, "x")).tolist()
    assert len(chosen) == count
    assert chosen == sorted(set(chosen))
    assert all(0 <= number < total for number in chosen)


def test_choose_is_uniform():
    counts = torch.zeros(6)
    for seed in range(3_000):
        counts[choose(3, 6, generator(seed, "x"))] += 1
    assert (counts / 3_000 - 0.5).abs().max() < 0.04
