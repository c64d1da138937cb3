from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.data.mixing import DocumentStream, Schedule, integer_shares


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=9))
def test_every_source_has_its_share_at_every_moment(shares):
    schedule = Schedule(shares)
    num = 2 * schedule.period + 3
    source_N, number_N = schedule.assign(np.arange(num))
    total = sum(shares)
    for source, share in enumerate(shares):
        had_N = np.cumsum(source_N == source)
        # |had - n * share / total| < 1, in whole numbers
        assert (np.abs(had_N * total - np.arange(1, num + 1) * share) < total).all()
        assert number_N[source_N == source].tolist() == list(range(had_N[-1]))


def test_a_dominant_source_among_many_small_ones_keeps_its_share():
    """Rounding each source by itself (divisor methods) misses by more than one here."""
    shares = [901, *([9] * 11)]
    source_N, _ = Schedule(shares).assign(np.arange(1000))
    had_N = np.cumsum(source_N == 0)
    assert np.abs(had_N - np.arange(1, 1001) * 0.901).max() < 1


def test_any_position_is_found_without_those_before():
    schedule = Schedule([3, 5, 9])
    far = 17 * 10**12
    source_N, number_N = schedule.assign(np.arange(far, far + 17))
    near_source_N, near_number_N = schedule.assign(np.arange(17))
    assert source_N.tolist() == near_source_N.tolist()
    assert (number_N - near_number_N == np.array([3, 5, 9])[source_N] * 10**12).all()


@pytest.mark.parametrize(
    ("weights", "shares"),
    [
        ([1.0], (1,)),
        ([0.35, 0.65], (7, 13)),
        ([2, 2, 4], (1, 1, 2)),
        ([0.1, 0.2, 0.3, 0.4], (1, 2, 3, 4)),
        ([1e-3, 1], (1, 1000)),
    ],
)
def test_integer_shares_are_the_written_decimals(weights, shares):
    assert integer_shares(weights) == shares


def test_integer_shares_are_rounded_only_past_the_limit():
    weights = [0.123456789, 0.3, 0.576543211, 1e-9]
    shares = integer_shares(weights)
    total = sum(Fraction(str(weight)) for weight in weights)
    assert sum(shares) <= 100_001
    assert shares[3] == 1
    assert all(abs(share / sum(shares) - weight / total) < 3e-5 for share, weight in zip(shares, weights, strict=True))


def tokens(stream: DocumentStream, start: int, stop: int) -> list[int]:
    pieces = stream.pieces(start, stop)
    return [
        token
        for begin, length in zip(pieces.begin_N.tolist(), pieces.length_N.tolist(), strict=True)
        for token in range(begin, begin + length)
    ]


def make(num_documents: int, *, seed: int = 0, stream: int = 0, block_documents: int = 7) -> DocumentStream:
    length_N = np.random.default_rng(5).integers(1, 9, num_documents)
    offset_N = np.concatenate([[0], np.cumsum(length_N)]).astype(np.int64)
    return DocumentStream(offset_N, seed=seed, stream=stream, block_documents=block_documents)


@pytest.mark.parametrize("num_documents", [1, 6, 7, 8, 50, 333])
def test_every_epoch_has_every_token_exactly_once(num_documents):
    stream = make(num_documents)
    total = stream.num_tokens
    for epoch in range(3):
        assert sorted(tokens(stream, epoch * total, (epoch + 1) * total)) == list(range(total))


def test_documents_stay_whole_and_in_order_inside():
    stream = make(50)
    pieces = stream.pieces(0, stream.num_tokens)
    assert len(pieces.begin_N) == stream.num_documents
    assert pieces.length_N.min() > 0


@pytest.mark.parametrize("step", [1, 3, 17, 100])
def test_a_range_is_the_same_however_it_is_asked_for(step):
    stream, stop = make(60), 900
    whole = tokens(stream, 0, stop)
    parts = [token for start in range(0, stop, step) for token in tokens(stream, start, min(start + step, stop))]
    assert parts == whole
    assert tokens(make(60), 451, 460) == whole[451:460]


def test_an_empty_range_has_no_pieces():
    assert tokens(make(5), 3, 3) == []


def test_the_order_differs_between_epochs_seeds_and_sources():
    stream, total = make(200), make(200).num_tokens
    orders = [
        tokens(stream, 0, total),
        tokens(stream, total, 2 * total),
        tokens(make(200, seed=1), 0, total),
        tokens(make(200, stream=1), 0, total),
        list(range(total)),
    ]
    assert len({tuple(order) for order in orders}) == len(orders)


def test_a_block_is_a_sample_of_the_whole_source():
    """A corpus sorted by subject must not be read subject by subject."""
    stream = DocumentStream(np.arange(10_001), seed=0, stream=0, block_documents=500)
    first_block = tokens(stream, 0, 500)
    share_of_first_half = np.mean(np.array(first_block) < 5000)
    assert abs(share_of_first_half - 0.5) < 0.1


def test_far_positions_are_as_quick_as_near_ones():
    stream = make(1000)
    far = 10**15
    assert len(tokens(stream, far, far + 50)) == 50
