"""Held-out loss per domain, with its standard error over documents."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from moesaic.data.dataset import ValidationSet
from moesaic.data.packing import PackedBatch
from moesaic.routing.cross_entropy import IGNORED, token_losses
from moesaic.training.parallel import reshard
from moesaic.training.step import Trainable, shifted_labels


@dataclass(frozen=True, kw_only=True)
class DomainLoss:
    """Loss of one held-out set, in nats per predicted token."""

    loss: float
    """Total loss over total tokens."""
    standard_error: float | None
    """Of `loss`, with documents as the units that were drawn; `None` for a single document."""
    documents: int
    """Documents with at least one predicted token."""
    tokens: int
    """Predicted tokens."""


def ratio_with_error(losses_N: Tensor, tokens_N: Tensor) -> DomainLoss:
    """Total loss over total tokens of N documents, and the standard error of that ratio.

    Documents differ in length, so the error is that of a ratio estimator (Cochran, Sampling Techniques, 6.4): the
    root of N/(N-1) * sum (loss_i - ratio * tokens_i)^2, over the total number of tokens.
    """
    predicted = tokens_N > 0
    losses_N, tokens_N = losses_N[predicted], tokens_N[predicted]
    number, total = len(tokens_N), float(tokens_N.sum())
    ratio = float(losses_N.sum()) / total if total else math.nan
    error = None
    if number > 1:
        spread = float((losses_N - ratio * tokens_N).square().sum())
        error = math.sqrt(number / (number - 1) * spread) / total
    return DomainLoss(loss=ratio, standard_error=error, documents=number, tokens=int(total))


def validate(trainable: Trainable, sets: Sequence[ValidationSet]) -> dict[str, DomainLoss]:
    """Run every held-out set through the model in evaluation mode: routing as at inference, without pools."""
    found = document_losses(trainable, sets)
    return {domain: ratio_with_error(losses_N, tokens_N) for domain, (losses_N, tokens_N) in found.items()}


def document_losses(trainable: Trainable, sets: Sequence[ValidationSet]) -> dict[str, tuple[Tensor, Tensor]]:
    """The same, as total loss and number of predicted tokens of each document (float64, on the CPU), by domain."""
    model = trainable.model.model
    model.eval()
    try:
        return {held_out.domain: _run(trainable, held_out) for held_out in sets}
    finally:
        model.train()
        reshard(model)


@torch.no_grad()
def _run(trainable: Trainable, held_out: ValidationSet) -> tuple[Tensor, Tensor]:
    world = trainable.world
    sums_2N = torch.zeros(2, held_out.num_documents, dtype=torch.float64, device=world.device)
    batches = held_out.batches(trainable.recipe.batch.micro_sequences, rank=world.rank, world_size=world.size)
    for batch in batches:
        add_losses(trainable.model.model, batch.to(world.device), sums_2N)
    losses_N, tokens_N = world.sum(sums_2N).cpu()
    return losses_N, tokens_N


def add_losses(model: PreTrainedModel, batch: PackedBatch, sums_2N: Tensor) -> None:
    """Add the total loss and the number of predicted tokens of each of the N documents of a held-out batch."""
    output = model(input_ids=batch.input_ids_BS, position_ids=batch.position_ids_BS, use_cache=False)
    labels_T = shifted_labels(batch)
    losses_T, _ = token_losses(output.logits.flatten(0, 1), labels_T)
    documents_T = batch.document_ids_BS.flatten().clamp_min(0)  # padding adds 0 to the first
    sums_2N[0].index_add_(0, documents_T, losses_T.double())
    sums_2N[1].index_add_(0, documents_T, (labels_T != IGNORED).double())
