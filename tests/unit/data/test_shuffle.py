from typing import cast

import numpy as np
import pytest

from moesaic.data.shuffle import derive_key, permute


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 255, 256, 257, 5000])
def test_permute_is_a_permutation(size):
    image = permute(np.arange(size), size=size, key=7)
    assert sorted(image.tolist()) == list(range(size))


def test_permute_of_a_part_is_the_part_of_the_permutation():
    whole = permute(np.arange(1000), size=1000, key=3)
    assert permute(np.array([999, 4, 4]), size=1000, key=3).tolist() == [whole[999], whole[4], whole[4]]


def test_permute_works_on_sizes_that_no_array_could_have():
    size = 10**15 + 7
    image = permute(np.arange(size - 1000, size), size=size, key=1)
    assert len(set(image.tolist())) == 1000
    assert image.min() >= 0
    assert image.max() < size
    assert abs(image.mean() / size - 0.5) < 0.05


def test_permute_places_every_item_everywhere_equally_often():
    size, keys = 10, 4000
    counts = np.zeros((size, size))
    for key in range(keys):
        counts[np.arange(size), permute(np.arange(size), size=size, key=derive_key(key))] += 1
    expected = keys / size
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < 81 + 5 * np.sqrt(2 * 81)  # 81 degrees of freedom, five standard deviations


def test_permute_does_not_keep_neighbours_together():
    image = permute(np.arange(100_000), size=100_000, key=11)
    assert abs(np.corrcoef(image[:-1], image[1:])[0, 1]) < 0.02
    assert (np.abs(np.diff(image)) == 1).mean() < 1e-3


def test_values_are_fixed_for_ever():
    """Resuming an old run with a newer version must give the same data."""
    assert permute(np.arange(8), size=8, key=5).tolist() == [4, 5, 3, 7, 1, 0, 2, 6]
    assert derive_key(1, 2, 3) == 14700578081025370612


def test_numpy_integers_give_the_same_key():
    assert derive_key(cast(int, np.int64(1)), 2) == derive_key(1, 2) != derive_key(2, 1)
