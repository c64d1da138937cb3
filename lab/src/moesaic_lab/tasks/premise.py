"""What a premise is judged by: losses of models that know frequencies only, and of a model whose FFNs say nothing."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import moesaic
from moesaic.data.cache import open_cache
from moesaic.data.dataset import ValidationSet
from moesaic.data.recipe import DataRecipe, SourceRecipe
from moesaic.data.tokenise import prepare
from moesaic.loading import load_tokenizer
from moesaic.modeling.cross_entropy import IGNORED
from moesaic_lab.rows import Row
from moesaic_lab.tasks.losses import held_out_loss, held_out_sets
from moesaic_lab.writing import train_file

_DISCOUNT = 0.75
"""Taken off the count of every pair that was seen: absolute discounting, usually with 0.75 (Chen and Goodman 1999)."""


@dataclass(frozen=True, kw_only=True)
class Premise:
    """Settings of the task."""

    checkpoint: str
    """The model that must be worth something: the experiment's dense base, or its smallest model."""
    rows: str
    """File to write."""
    domains: tuple[str, ...]
    sequence_length: int
    seed: int


def run(settings: Premise) -> Iterator[Row]:
    """Per domain the loss of a unigram model, a bigram model, the checkpoint, and the checkpoint without its FFNs."""
    tokenizer = load_tokenizer(settings.checkpoint)
    held_out = held_out_sets(settings.domains, tokenizer, sequence_length=settings.sequence_length)
    unigram_V, bigram_VV = frequencies(pairs(settings.domains, tokenizer))
    model = moesaic.load(settings.checkpoint, device="cpu")
    for domain, one in held_out.items():
        common = {"domain": domain, "seed": settings.seed}
        before_N, after_N = _targets(one)
        yield {**common, "measure": "unigram_loss", "value": float(-np.log(unigram_V[after_N]).mean())}
        yield {**common, "measure": "bigram_loss", "value": float(-np.log(bigram_VV[before_N, after_N]).mean())}
        yield {**common, "measure": "premise_loss", "value": held_out_loss(model, one).loss}
        with without_ffns(model):
            yield {**common, "measure": "without_ffns_loss", "value": held_out_loss(model, one).loss}


def pairs(domains: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> NDArray[np.int64]:
    """How often each token follows each other one in the training documents of all domains: (V, V)."""
    size = len(tokenizer)
    counts_VV = np.zeros(size * size, dtype=np.int64)
    sources = tuple(SourceRecipe(path=train_file(domain), domain=domain) for domain in domains)
    for folder in prepare(DataRecipe(sequence_length=2, sources=sources), tokenizer, quiet=True).sources:
        cache = open_cache(folder)
        ids_N = np.asarray(cache.tokens, dtype=np.int64)
        pair_N = ids_N[:-1] * size + ids_N[1:]
        pair_N = np.delete(pair_N, cache.offsets[1:-1] - 1)  # the last token of a document says nothing of the next
        counts_VV += np.bincount(pair_N, minlength=size * size)
    return counts_VV.reshape(size, size)


def frequencies(counts_VV: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """A unigram model (one added to every count), and a bigram model that backs off to it.

    p(w | v) = (max(c(vw) - d, 0) + d * n(v) * p(w)) / c(v), with d = 0.75 and n(v) different followers of v; p(w) for a
    v that was never seen.
    """
    unigram_V = counts_VV.sum(axis=0) + 1.0
    unigram_V /= unigram_V.sum()
    total_V1 = counts_VV.sum(axis=1, keepdims=True)
    kinds_V1 = (counts_VV > 0).sum(axis=1, keepdims=True)
    seen_VV = np.maximum(counts_VV - _DISCOUNT, 0) + _DISCOUNT * kinds_V1 * unigram_V
    return unigram_V, np.where(total_V1 > 0, seen_VV / np.maximum(total_V1, 1), unigram_V)


def _targets(held_out: ValidationSet) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Every token that is predicted, and the one before it."""
    before, after = [], []
    for batch in held_out.batches(64):
        predicted_BS = batch.labels_BS[:, 1:] != IGNORED
        before.append(batch.input_ids_BS[:, :-1][predicted_BS])
        after.append(batch.labels_BS[:, 1:][predicted_BS])
    return torch.cat(before).numpy(), torch.cat(after).numpy()


@contextmanager
def without_ffns(model: PreTrainedModel) -> Iterator[None]:
    """Let every FFN, dense or MoE, add nothing to the residual stream."""

    def nothing(_module: Any, inputs: tuple[torch.Tensor, ...], _output: Any) -> torch.Tensor:
        return torch.zeros_like(inputs[0])

    with ExitStack() as stack:
        for layer in model.model.layers:
            stack.callback(layer.mlp.register_forward_hook(nothing).remove)
        yield
