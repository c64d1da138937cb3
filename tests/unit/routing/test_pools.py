"""Pool sizes: uniform, independent, and a function of (seed, step, layer, document) alone."""

import torch

from moesaic.routing.pools import RoutingContext, draw_pool_sizes
from tests.reference.naive_routing import random_documents


def context(number: int, *, first: int = 0, seed: int = 0, step: int = 0) -> RoutingContext:
    ids = torch.arange(number)[None]
    return RoutingContext.from_sequences(ids, first_document=first, seed=seed, step=step)


def test_draws_do_not_depend_on_ranks_or_micro_batches():
    """40 documents as one micro-batch, and cut over 2 ranks and 3 micro-steps."""
    whole = draw_pool_sizes(context(40, seed=5, step=7), 2, 60, layer=4)
    parts = []
    for first, number in ((0, 3), (3, 1), (4, 11), (15, 20), (35, 0), (35, 5)):
        parts.append(draw_pool_sizes(context(number, first=first, seed=5, step=7), 2, 60, layer=4))
    assert torch.equal(torch.cat(parts), whole)
    assert len(whole.unique()) > 15


def test_per_document_draws_are_shared_by_layers_and_others_are_not():
    documents = context(200, seed=1)
    by_layer = [draw_pool_sizes(documents, 2, 60, layer=layer) for layer in range(3)]
    assert not torch.equal(by_layer[0], by_layer[1])
    assert not torch.equal(by_layer[1], by_layer[2])
    shared = draw_pool_sizes(documents, 2, 60, layer=None)
    assert torch.equal(shared, draw_pool_sizes(documents, 2, 60, layer=None))
    assert all(not torch.equal(shared, draw) for draw in by_layer)


def test_another_step_or_seed_draws_again():
    first = draw_pool_sizes(context(200), 2, 60, layer=0)
    assert not torch.equal(first, draw_pool_sizes(context(200, step=1), 2, 60, layer=0))
    assert not torch.equal(first, draw_pool_sizes(context(200, seed=1), 2, 60, layer=0))


def test_a_fixed_size_is_that_size():
    assert draw_pool_sizes(context(5), 12, 12, layer=0).tolist() == [12] * 5


def test_context_numbers_documents_of_sequences():
    ids = torch.tensor([[0, 0, 1, -1], [0, 1, 1, 2], [7, 7, -1, 7], [-1, -1, -1, -1]])
    numbered = RoutingContext.from_sequences(ids, first_document=10)
    assert numbered.document_ids_T.tolist() == [0, 0, 1, -1, 2, 3, 3, 4, 5, 5, -1, 6, -1, -1, -1, -1]
    assert numbered.document_keys_N.tolist() == list(range(10, 17))
    assert numbered.lengths_N.tolist() == [2, 1, 1, 2, 1, 2, 1]
    assert numbered.segments_T.tolist() == [0, 0, 1, 7, 2, 3, 3, 4, 5, 5, 7, 6, 7, 7, 7, 7]
    assert numbered.token_mask_T.sum() == 10


def test_context_from_a_packed_batch_is_the_same():
    """Ids that are already indices in the global batch give what counting the documents of the sequences gives."""
    counted = RoutingContext.from_sequences(random_documents(3), first_document=17)
    global_ids = torch.where(counted.token_mask_T, counted.document_ids_T + 17, -1).view(3, -1)
    taken = RoutingContext.from_packed(global_ids, first_document=17, num_documents=counted.num_documents)
    assert torch.equal(taken.document_ids_T, counted.document_ids_T)
    assert torch.equal(taken.document_keys_N, counted.document_keys_N)
