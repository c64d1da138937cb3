"""Held-out losses of a loaded model, as training measures them."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from moesaic.data.dataset import ValidationSet, validation_sets
from moesaic.data.recipe import DataRecipe, SourceRecipe
from moesaic.data.tokenise import prepare
from moesaic.modeling.cross_entropy import DomainLoss, ratio_with_error
from moesaic.training.step import add_losses
from moesaic_lab.writing import valid_file


def held_out_sets(
    domains: Sequence[str], tokenizer: PreTrainedTokenizerBase, *, sequence_length: int
) -> dict[str, ValidationSet]:
    """The held-out documents of each domain, packed as `train` packs them."""
    held_out = tuple(SourceRecipe(path=valid_file(domain), domain=domain) for domain in domains)
    recipe = DataRecipe(sequence_length=sequence_length, sources=held_out, validation=held_out)
    prepared = prepare(recipe, tokenizer, quiet=True)
    return {one.domain: one for one in validation_sets(prepared)}


@torch.no_grad()
def held_out_loss(model: PreTrainedModel, held_out: ValidationSet, *, sequences: int = 8) -> DomainLoss:
    """Loss of one held-out set in nats per predicted token, with its standard error over documents."""
    sums_2N = torch.zeros(2, held_out.num_documents, dtype=torch.float64)
    for batch in held_out.batches(sequences):
        add_losses(model, batch, sums_2N)
    return ratio_with_error(*sums_2N)
