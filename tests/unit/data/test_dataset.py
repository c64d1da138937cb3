import dataclasses
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch

from moesaic.common.errors import MoesaicError
from moesaic.data.cache import open_cache
from moesaic.data.dataset import PackedDataset
from moesaic.data.packing import PackedBatch

LENGTHS = [[5, 9, 1, 30, 4, 12], [3, 3, 8, 2, 41]]
TENSORS = [field.name for field in dataclasses.fields(PackedBatch) if field.name.endswith("_BS")]


def same(first: PackedBatch, second: PackedBatch) -> bool:
    return all(torch.equal(getattr(first, name), getattr(second, name)) for name in TENSORS)


def real_tokens(dataset: PackedDataset, steps: range) -> list[int]:
    batches = [dataset.batch(step) for step in steps]
    return [token for batch in batches for token in batch.input_ids_BS[batch.document_ids_BS >= 0].tolist()]


def test_a_step_depends_on_seed_and_step_alone(make_data):
    data = make_data(LENGTHS, sequence_length=8)
    steps = [7, 0, 3, 10**9, 3]
    first = [PackedDataset(data, seed=3, sequences_per_step=6).batch(step) for step in steps]
    one = PackedDataset(data, seed=3, sequences_per_step=6)
    assert all(same(one.batch(step), batch) for step, batch in zip(steps, first, strict=True))
    assert not same(first[0], PackedDataset(data, seed=4, sequences_per_step=6).batch(7))


def test_resuming_at_any_step_continues_the_uninterrupted_run(make_data):
    data = make_data(LENGTHS, sequence_length=8)
    whole = real_tokens(PackedDataset(data, seed=0, sequences_per_step=4), range(12))
    for stop in (1, 5, 11):
        before = real_tokens(PackedDataset(data, seed=0, sequences_per_step=4), range(stop))
        assert before + real_tokens(PackedDataset(data, seed=0, sequences_per_step=4), range(stop, 12)) == whole


@pytest.mark.parametrize(("num_micro_steps", "world_size"), [(1, 2), (2, 1), (2, 2), (3, 2), (1, 12), (12, 1)])
def test_ranks_and_micro_steps_partition_the_step(make_data, num_micro_steps, world_size):
    dataset = PackedDataset(make_data(LENGTHS, sequence_length=8), seed=0, sequences_per_step=12)
    whole = dataset.batch(5)
    parts = [
        dataset.batch(5, micro_step=micro, num_micro_steps=num_micro_steps, rank=rank, world_size=world_size)
        for micro in range(num_micro_steps)
        for rank in range(world_size)
    ]
    for name in TENSORS:
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(whole, name))
    assert sum(part.num_documents for part in parts) == whole.num_documents
    assert [part.first_document for part in parts[1:]] == [
        part.first_document + part.num_documents for part in parts[:-1]
    ]
    assert sum(part.num_targets for part in parts) == whole.num_targets


def test_document_ids_are_dense_and_one_per_piece(make_data):
    batch = PackedDataset(make_data(LENGTHS, sequence_length=8), seed=0, sequences_per_step=12).batch(2)
    ids = batch.document_ids_BS.flatten()
    assert ids.unique().tolist() == list(range(batch.num_documents))
    assert (ids.diff() >= 0).all()
    for row_ids, row_positions in zip(batch.document_ids_BS, batch.position_ids_BS, strict=True):
        starts = [0, *((row_ids.diff() != 0).nonzero().flatten() + 1).tolist(), len(row_ids)]
        expected = [position for a, b in pairwise(starts) for position in range(b - a)]
        assert row_positions.tolist() == expected
    first_of_row = batch.document_ids_BS[:, 0].tolist()
    assert len(set(first_of_row)) == len(first_of_row)  # a document cut by the boundary counts as two


@pytest.mark.parametrize("weights", [[1.0, 1.0], [0.3, 0.7], [9.0, 1.0]])
def test_each_source_is_used_up_before_any_of_it_repeats(make_data, weights):
    lengths = LENGTHS
    data = make_data(lengths, sequence_length=7, weights=weights)
    dataset = PackedDataset(data, seed=0, sequences_per_step=5)
    tokens = real_tokens(dataset, range(60))
    ends = np.cumsum([sum(of_source) for of_source in lengths])
    for source, (low, high) in enumerate(pairwise([0, *ends])):
        mine = [token for token in tokens if low < token <= high]
        size = int(high - low)
        assert len(mine) > 2 * size
        for start in range(0, len(mine) - size + 1, size):
            assert Counter(mine[start : start + size]) == Counter(range(int(low) + 1, int(high) + 1)), source
        assert abs(len(mine) / 7 - 300 * weights[source] / sum(weights)) < 1


def test_epochs_end_exactly(make_data):
    data = make_data(LENGTHS, sequence_length=8, epochs=3)
    dataset = PackedDataset(data, seed=0, sequences_per_step=5)
    sizes = [sum(of_source) for of_source in LENGTHS]
    assert dataset.num_sequences == sum(-(-3 * size // 8) for size in sizes)
    assert dataset.num_steps is not None
    assert Counter(real_tokens(dataset, range(dataset.num_steps))) == dict.fromkeys(range(1, sum(sizes) + 1), 3)
    last = dataset.batch(dataset.num_steps - 1)
    padding = last.document_ids_BS == -1
    assert padding.any()
    assert (last.labels_BS[padding] == -100).all()
    assert (last.domain_ids_BS[padding] == -1).all()
    assert (last.input_ids_BS[padding] == 0).all()
    with pytest.raises(MoesaicError, match=f"step {dataset.num_steps} is past the end of the data: data.epochs"):
        dataset.batch(dataset.num_steps)


def test_padding_restarts_its_positions(make_data):
    data = make_data([[3]], sequence_length=8, epochs=1)
    batch = PackedDataset(data, seed=0, sequences_per_step=2).batch(0)
    assert batch.position_ids_BS.tolist() == [[0, 1, 2, 0, 1, 2, 3, 4], list(range(8))]
    assert batch.document_ids_BS.tolist() == [[0, 0, 0, -1, -1, -1, -1, -1], [-1] * 8]
    assert (batch.first_document, batch.num_documents, batch.num_targets, batch.num_tokens) == (0, 1, 2, 3)


def test_a_rank_with_nothing_but_padding(make_data):
    data = make_data([[3]], sequence_length=8, epochs=1)
    batch = PackedDataset(data, seed=0, sequences_per_step=2).batch(0, rank=1, world_size=2)
    assert (batch.first_document, batch.num_documents, batch.num_targets) == (0, 0, 0)
    assert (batch.document_ids_BS == -1).all()


def test_no_document_predicts_the_next(make_data):
    """Under the Hugging Face shift, the logits of a document's last token meet the label -100."""
    batch = PackedDataset(make_data(LENGTHS, sequence_length=8), seed=0, sequences_per_step=12).batch(0)
    shifted = batch.labels_BS[:, 1:]
    same_document = batch.document_ids_BS[:, 1:] == batch.document_ids_BS[:, :-1]
    assert (~same_document).any()
    assert (shifted[~same_document] == -100).all()
    assert torch.equal(shifted[same_document], batch.input_ids_BS[:, 1:][same_document])
    assert (batch.labels_BS[:, 0] == -100).all()
    assert batch.num_targets == int(same_document.sum())


def test_masked_spans_have_no_labels_even_where_a_document_is_cut(make_data):
    data = make_data([[10, 10, 10]], sequence_length=4, masked=((0, 3), (6, 7)), epochs=1)
    dataset = PackedDataset(data, seed=0, sequences_per_step=8)
    offsets = open_cache(data.sources[0]).offsets
    batch = dataset.batch(0)
    for row in range(8):
        for column in range(4):
            token = int(batch.input_ids_BS[row, column])
            place = (token - 1) - int(offsets[np.searchsorted(offsets, token - 1, side="right") - 1])
            masked = token == 0 or place in (0, 1, 2, 6) or batch.position_ids_BS[row, column] == 0
            assert (batch.labels_BS[row, column] == -100) == masked


def test_domains_are_shared_by_name(make_data):
    data = make_data(LENGTHS, sequence_length=8)
    recipe = data.recipe
    renamed = dataclasses.replace(
        recipe, sources=tuple(dataclasses.replace(source, domain="one") for source in recipe.sources), validation=()
    )
    batch = PackedDataset(dataclasses.replace(data, recipe=renamed), seed=0, sequences_per_step=4).batch(0)
    assert renamed.domains == ("one",)
    assert (batch.domain_ids_BS == 0).all()
    batch = PackedDataset(data, seed=0, sequences_per_step=4).batch(0)
    assert torch.equal(batch.domain_ids_BS, (batch.input_ids_BS > sum(LENGTHS[0])).long())


def test_a_batch_that_cannot_be_shared_is_refused(make_data):
    dataset = PackedDataset(make_data(LENGTHS, sequence_length=8), seed=0, sequences_per_step=6)
    with pytest.raises(
        MoesaicError, match=r"batch\.tokens gives 6 sequences .* 2 micro-steps on 2 ranks.*multiple of 32"
    ):
        dataset.batch(0, num_micro_steps=2, world_size=2)
    with pytest.raises(MoesaicError, match=r"batch\.tokens is less"):
        PackedDataset(make_data(LENGTHS, sequence_length=8), seed=0, sequences_per_step=0)


def test_to_moves_every_tensor(make_data):
    batch = PackedDataset(make_data(LENGTHS, sequence_length=8), seed=0, sequences_per_step=2).batch(0)
    moved = batch.to("meta")
    assert all(getattr(moved, name).device.type == "meta" for name in TENSORS)
    assert moved.num_documents == batch.num_documents


@pytest.mark.parametrize("epochs", [None, 2])
def test_without_packing_a_row_is_a_whole_document_in_the_order_of_the_stream(make_data, epochs):
    data = make_data(LENGTHS, sequence_length=41, epochs=epochs, masked=((0, 1),))
    data = dataclasses.replace(data, recipe=dataclasses.replace(data.recipe, packing=False))
    dataset = PackedDataset(data, seed=1, sequences_per_step=4)
    starts = np.cumsum([0, *(length for of_source in LENGTHS for length in of_source)]) + 1
    expected = {int(begin): list(range(begin, end)) for begin, end in pairwise(starts)}
    seen: Counter[int] = Counter()
    steps = range(6) if dataset.num_steps is None else range(dataset.num_steps)
    for step in steps:
        batch = dataset.batch(step)
        longest = 0
        for row, ids_S in enumerate(batch.input_ids_BS):
            number = int((batch.document_ids_BS[row] >= 0).sum())
            if not number:
                continue  # the last step of the epochs
            longest = max(longest, number)
            document = ids_S[:number].tolist()
            assert document == expected[document[0]]
            assert batch.position_ids_BS[row, :number].tolist() == list(range(number))
            assert batch.labels_BS[row, :number].tolist() == [-100, *document[1:]]
            assert (batch.labels_BS[row, number:] == -100).all()
            assert set(batch.document_ids_BS[row, :number].tolist()) == {row}
            seen[document[0]] += 1
        assert batch.input_ids_BS.shape == (4, max(2, longest))
        halves = [dataset.batch(step, micro_step=half, num_micro_steps=2) for half in range(2)]
        assert torch.equal(torch.cat([half.input_ids_BS for half in halves]), batch.input_ids_BS)
    if epochs is None:  # 12 of each source, by weight
        of_first = sum(number for begin, number in seen.items() if begin < starts[len(LENGTHS[0])])
        assert of_first == 12
        assert set(seen.values()) == {2, 3}
    else:
        assert seen == dict.fromkeys(expected, 2)
        assert dataset.num_steps == -(-2 * len(expected) // 4)


def test_without_packing_no_document_is_cut(make_data):
    data = make_data(LENGTHS, sequence_length=20)
    data = dataclasses.replace(data, recipe=dataclasses.replace(data.recipe, packing=False))
    with pytest.raises(MoesaicError, match=r"1 of 6 documents are longer than data.sequence_length \(20\).* 30 tokens"):
        PackedDataset(data, seed=1, sequences_per_step=4)
