import dataclasses

import numpy as np
import pytest
import torch

from moesaic.common.errors import MoesaicError
from moesaic.data.cache import open_cache
from moesaic.data.dataset import validation_sets
from moesaic.data.tokenise import refuse_untrainable

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
    data = make_data(LENGTHS, sequence_length=16)
    merged = tuple(dataclasses.replace(source, domain="domain1") for source in data.recipe.validation)
    data = dataclasses.replace(data, recipe=dataclasses.replace(data.recipe, validation=merged))
    (held_out,) = validation_sets(data)
    assert held_out.num_documents == 11
    assert {int(batch.domain_ids_BS.max()) for batch in held_out.batches(4)} == {1}


def test_a_limit_takes_the_first_documents_of_a_domain(make_data):
    data = make_data(LENGTHS, sequence_length=16)
    for limit in (1, 2, len(LENGTHS[0]), 100):
        for held_out, lengths in zip(validation_sets(data, limit=limit), LENGTHS, strict=True):
            assert held_out.num_documents == min(limit, len(lengths))
            assert held_out.num_tokens == sum(lengths[:limit])
            ids = {int(one) for batch in held_out.batches(3) for one in batch.document_ids_BS.unique()}
            assert ids - {-1} == set(range(min(limit, len(lengths))))
    merged = tuple(dataclasses.replace(source, domain="domain1") for source in data.recipe.validation)
    data = dataclasses.replace(data, recipe=dataclasses.replace(data.recipe, validation=merged))
    (held_out,) = validation_sets(data, limit=len(LENGTHS[0]) + 1)
    assert held_out.num_tokens == sum(LENGTHS[0]) + LENGTHS[1][0]


def test_a_batch_of_one_short_document_is_two_wide(make_data):
    (held_out,) = validation_sets(make_data([[2, 1]], sequence_length=2))
    assert [batch.num_targets for batch in held_out.batches(1)] == [1, 0]
    assert {batch.input_ids_BS.shape for batch in held_out.batches(1)} == {(1, 2)}


NOTHING = {
    "one token each": ([1, 1, 1], ()),
    "masked": ([5, 3], ((0, 5),)),
    "first tokens of pieces alone": ([17], ((0, 16),)),
}


@pytest.mark.parametrize("name", NOTHING)
def test_a_set_in_which_nothing_is_predicted_is_refused(make_data, name):
    lengths, masked = NOTHING[name]
    data = make_data([lengths], sequence_length=16, masked=masked)
    with pytest.raises(MoesaicError, match=r"^unused: no document has a token to predict") as error:
        validation_sets(data)
    assert "\n" not in str(error.value)


def test_training_data_in_which_nothing_is_predicted_are_refused(make_data):
    refuse_untrainable(make_data([[1, 2], [9]], sequence_length=16))
    with pytest.raises(MoesaicError, match="no document has a token to predict"):
        refuse_untrainable(make_data([[5], [1, 1]], sequence_length=16))
    with pytest.raises(MoesaicError, match="no document has a token to predict"):
        refuse_untrainable(make_data([[5, 5]], sequence_length=16, masked=((1, 3), (3, 5))))


@pytest.mark.parametrize("masked", [(), ((0, 2),), ((1, 3),), ((0, 1), (2, 4), (5, 7))])
def test_predicted_tokens_are_those_of_the_batches(make_data, masked):
    data = make_data([[9, 8, 20, 7]], sequence_length=16, masked=masked)
    cache = open_cache(data.sources[0])
    starts = np.array([0, 9, 17, 33, 37])  # the third document goes on in a second sequence
    predicted = cache.predicted(starts, np.diff(starts, append=44))
    batches = list(validation_sets(data)[0].batches(1))
    labels = np.concatenate([batch.labels_BS[0, :] for batch in batches])
    documents = np.concatenate([batch.document_ids_BS[0, :] for batch in batches])
    expected = [int((labels[documents == document] != -100).sum()) for document in range(4)]
    assert [predicted[0], predicted[1], predicted[2] + predicted[3], predicted[4]] == expected
