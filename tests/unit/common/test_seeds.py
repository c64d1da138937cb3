"""Keys and draws. The numbers written here must never change: bytes of results and resumed runs depend on them."""

import itertools
import math
import subprocess
import sys
from typing import cast

import numpy as np
import pytest
import torch

from moesaic.common import seeds


def test_streams_differ_by_seed_and_purpose():
    purposes = itertools.product((0, 1), ("a", "b"), (1, 11), ("expert",), (1, 11))
    keys = [seeds.key(*purpose) for purpose in purposes]
    assert len(set(keys)) == len(keys)
    assert seeds.key(0, "a", 1, 11) != seeds.key(0, "a", 11, 1)
    assert seeds.key(0, "a1", 1) != seeds.key(0, "a", 11)


def test_the_hash_is_part_of_the_format():
    """The same recipe must give the same bytes in every version: this number must never change."""
    assert seeds.key(0, "drop", 3, "expert", 7) == 18135049956645438473


def test_normal_has_the_moments_and_the_dtype():
    values = seeds.normal((2_500, 1_000), 0.5, seeds.generator(0, "x"), mean=2.0, dtype=torch.bfloat16)
    assert values.dtype == torch.bfloat16
    assert values.float().mean() == pytest.approx(2.0, abs=0.01)
    assert values.float().std() == pytest.approx(0.5, rel=0.01)


def test_blocks_are_what_normal_stores():
    count = 2_300_000
    stored = seeds.normal((count,), 1.0, seeds.generator(3, "x"))
    for start, block in seeds.normal_blocks(count, 1.0, seeds.generator(3, "x")):
        assert torch.equal(stored[start : start + len(block)], block)
    assert len(torch.unique(stored[:: 1 << 20])) == 3  # blocks are not repeats of the first


@pytest.mark.parametrize(("count", "total"), [(0, 5), (3, 5), (5, 5)])
def test_subset_gives_that_many_different_numbers(count, total):
    chosen = seeds.subset(count, total, seeds.generator(0, "x")).tolist()
    assert len(chosen) == count
    assert chosen == sorted(set(chosen))
    assert all(0 <= number < total for number in chosen)


def test_subset_is_uniform():
    counts = torch.zeros(6)
    for seed in range(3_000):
        counts[seeds.subset(3, 6, seeds.generator(seed, "x"))] += 1
    assert (counts / 3_000 - 0.5).abs().max() < 0.04


def test_documents_are_ordered_by_fixed_numbers():
    """Samples, splits and selections of earlier versions are those of this one."""
    assert seeds.order("split", 0, 7) == 5113921249446912097
    assert seeds.order("select", 3, 11) == 8224395306948452432


def test_a_share_of_the_records_is_taken():
    taken = sum(seeds.within(0.25, "split", 1, number) for number in range(20_000))
    assert taken == pytest.approx(5_000, abs=300)
    assert all(seeds.within(1.0, "split", 1, number) for number in range(100))
    assert not any(seeds.within(0.0, "split", 1, number) for number in range(100))


def test_importing_brings_no_large_library():
    code = "import sys, moesaic.common.seeds; print({'torch', 'numpy', 'xxhash'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 255, 256, 257, 5000])
def test_permute_is_a_permutation(size):
    image = seeds.permute(np.arange(size), size=size, key=7)
    assert sorted(image.tolist()) == list(range(size))


def test_permute_of_a_part_is_the_part_of_the_permutation():
    whole = seeds.permute(np.arange(1000), size=1000, key=3)
    assert seeds.permute(np.array([999, 4, 4]), size=1000, key=3).tolist() == [whole[999], whole[4], whole[4]]


def test_permute_works_on_sizes_that_no_array_could_have():
    size = 10**15 + 7
    image = seeds.permute(np.arange(size - 1000, size), size=size, key=1)
    assert len(set(image.tolist())) == 1000
    assert image.min() >= 0
    assert image.max() < size
    assert abs(image.mean() / size - 0.5) < 0.05


def test_permute_places_every_item_everywhere_equally_often():
    size, keys = 10, 4000
    counts = np.zeros((size, size))
    for key in range(keys):
        counts[np.arange(size), seeds.permute(np.arange(size), size=size, key=seeds.permutation_key(key))] += 1
    expected = keys / size
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < 81 + 5 * np.sqrt(2 * 81)  # 81 degrees of freedom, five standard deviations


def test_permute_does_not_keep_neighbours_together():
    image = seeds.permute(np.arange(100_000), size=100_000, key=11)
    assert abs(np.corrcoef(image[:-1], image[1:])[0, 1]) < 0.02
    assert (np.abs(np.diff(image)) == 1).mean() < 1e-3


def test_values_are_fixed_for_ever():
    """Resuming an old run with a newer version must give the same data."""
    assert seeds.permute(np.arange(8), size=8, key=5).tolist() == [4, 5, 3, 7, 1, 0, 2, 6]
    assert seeds.permutation_key(1, 2, 3) == 14700578081025370612


def test_numpy_integers_give_the_same_permutation_key():
    assert (
        seeds.permutation_key(cast(int, np.int64(1)), 2) == seeds.permutation_key(1, 2) != seeds.permutation_key(2, 1)
    )


def surprise(counts: torch.Tensor) -> float:
    """Chi-square against equal counts, in standard deviations from what chance gives."""
    expected = counts.sum() / len(counts)
    freedom = len(counts) - 1
    return float(((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom)


def test_is_splitmix64():
    """The published first outputs of splitmix64 started at 0 and at 1234567."""
    keys = torch.tensor([0, 1, 2])
    for start, outputs in (
        (0, [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]),
        (1234567, [6457827717110365317, 3203168211198807973, 9817491932198370423]),
    ):
        expected = [(output & ((1 << 63) - 1)) % 1000003 for output in outputs]
        assert seeds.draw_integers(keys, 0, 1000002, stream=start).tolist() == expected


@pytest.mark.parametrize(("low", "high"), [(8, 127), (2, 5), (1, 64), (0, 1), (3, 1000)])
def test_draws_are_uniform(low, high):
    draws = seeds.draw_integers(torch.arange(200_000), low, high, stream=seeds.fold_key(1, 2, 3))
    assert int(draws.min()) == low
    assert int(draws.max()) == high
    assert abs(surprise(torch.bincount(draws - low, minlength=high - low + 1))) < 4


@pytest.mark.parametrize("varied", ["seed", "step", "layer", "document"])
def test_draws_are_uniform_along_every_part_of_the_key(varied):
    """One draw each from many seeds, steps, layers or documents; and pairs of neighbours, against dependence."""
    draws = []
    for i in range(4000):
        key = {"seed": 0, "step": 0, "layer": 0, "document": 0, varied: i}
        stream = seeds.fold_key(key["seed"], key["step"], key["layer"])
        draws.append(seeds.draw_integers(torch.tensor([key["document"]]), 0, 7, stream=stream))
    drawn = torch.cat(draws)
    assert abs(surprise(torch.bincount(drawn, minlength=8))) < 4
    assert abs(surprise(torch.bincount(drawn[:-1] * 8 + drawn[1:], minlength=64))) < 4


def test_keys_do_not_collide():
    streams = {seeds.fold_key(seed, step, layer) for seed in range(8) for step in range(100) for layer in range(-1, 30)}
    assert len(streams) == 8 * 100 * 31
    assert seeds.fold_key(1, 2) != seeds.fold_key(2, 1)
    assert seeds.fold_key(0) != seeds.fold_key(0, 0)
