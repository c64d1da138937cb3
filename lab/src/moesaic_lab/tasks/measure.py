"""Held-out losses and sizes of checkpoints, trained or not."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import moesaic
from moesaic.checkpoint.source import open_checkpoint
from moesaic.loading import load_tokenizer
from moesaic_lab.rows import Row
from moesaic_lab.tasks.losses import held_out_loss, held_out_sets


@dataclass(frozen=True, kw_only=True)
class Measure:
    """Settings of the task."""

    checkpoints: dict[str, str]
    """Name in the results -> folder; all with the same tokenizer."""
    rows: str
    """File to write."""
    domains: tuple[str, ...]
    sequence_length: int
    seed: int


def run(settings: Measure) -> Iterator[Row]:
    """A row per checkpoint and domain, and one with the number of parameters."""
    tokenizer = load_tokenizer(next(iter(settings.checkpoints.values())))
    held_out = held_out_sets(settings.domains, tokenizer, sequence_length=settings.sequence_length)
    for order, (name, folder) in enumerate(settings.checkpoints.items()):
        common = {"model": name, "order": order, "seed": settings.seed}
        model = moesaic.load(folder, device="cpu")
        for domain, one in held_out.items():
            loss = held_out_loss(model, one)
            measured = {"domain": domain, "value": loss.loss, "standard_error": loss.standard_error}
            yield common | {"measure": "measured_loss"} | measured
        tensors = open_checkpoint(folder).tensors.values()
        yield common | {"measure": "parameters", "value": sum(math.prod(tensor.shape) for tensor in tensors)}
