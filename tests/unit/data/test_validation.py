import pytest
import torch

from moesaic.data.validation import ValidationSet, validation_sets

LENGTHS = [[5, 9, 1, 30, 4, 8, 8, 12], [3, 2, 50]]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_token_once_whatever_the_number_of_ranks(make_data, world_size):
    data = make_data(LENGTHS, sequence_length=16)
    for held_out, of_domain, first in zip(validation_sets(data), LENGTHS, (1, 78), strict=True):
        tokens, documents = [], []
        per_rank = [list(held_out.batches(2, rank=rank, world_size=world_size)) for rank in range(world_size)]
        assert len({len(batches) for batches in per_rank}) == 1
        for batches in zip(*per_rank, strict=True):
            assert len({batch.input_ids_BS.shape for batch in batches}) == 1
            for batch in batches:
                real = batch.document_ids_BS >= 0
                tokens += batch.input_ids_BS[real].tolist()
                documents += batch.document_ids_BS[real].tolist()
                assert (batch.labels_BS[~real] == -100).all()
        assert tokens == list(range(first, first + sum(of_domain)))
        assert documents == [index for index, length in enumerate(of_domain) for _ in range(length)]
        assert (held_out.num_documents, held_out.num_tokens) == (len(of_domain), sum(of_domain))


def test_documents_that_fit_are_not_cut(make_data):
    data = make_data(LENGTHS, sequence_length=16)
    rows_of = {}
    for row, batch in enumerate(validation_sets(data)[0].batches(1)):
        for document in batch.document_ids_BS[batch.document_ids_BS >= 0].unique().tolist():
            rows_of.setdefault(document, []).append(row)
    assert {document: len(rows) for document, rows in rows_of.items()} == {
        document: 2 if length > 16 else 1 for document, length in enumerate(LENGTHS[0])
    }


def test_nothing_is_predicted_across_documents(make_data):
    for held_out in validation_sets(make_data(LENGTHS, sequence_length=16)):
        for batch in held_out.batches(3):
            same = (batch.document_ids_BS[:, 1:] == batch.document_ids_BS[:, :-1]) & (batch.document_ids_BS[:, 1:] >= 0)
            assert ((batch.labels_BS[:, 1:] != -100) == same).all()
            starts = batch.position_ids_BS[:, 1:] == 0
            assert torch.equal(starts, batch.document_ids_BS[:, 1:] != batch.document_ids_BS[:, :-1])


def test_sources_of_one_domain_are_one_set(make_data, tmp_path):
    import dataclasses

    data = make_data(LENGTHS, sequence_length=16)
    merged = tuple(dataclasses.replace(source, domain="domain1") for source in data.recipe.validation)
    data = dataclasses.replace(data, recipe=dataclasses.replace(data.recipe, validation=merged))
    (held_out,) = validation_sets(data)
    assert held_out.num_documents == 11
    assert {int(batch.domain_ids_BS.max()) for batch in held_out.batches(4)} == {1}


def test_a_set_of_one_short_document(make_data):
    (held_out,) = validation_sets(make_data([[1]], sequence_length=16))
    (batch,) = held_out.batches(4)
    assert batch.input_ids_BS.shape == (4, 2)
    assert batch.num_targets == 0
    assert isinstance(held_out, ValidationSet)
