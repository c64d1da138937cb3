"""Tasks that measure checkpoints: held-out losses and sizes, what premises are judged by, accuracy.

Each gives rows without seed and labels, which `moesaic lab task` adds.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import moesaic
from moesaic.checkpoint.source import open_checkpoint
from moesaic.data.cache import open_cache
from moesaic.data.prepare import prepare
from moesaic.data.recipe import DataRecipe, SourceRecipe
from moesaic.data.validation import ValidationSet, validation_sets
from moesaic.loading import load_tokenizer
from moesaic.routing.cross_entropy import IGNORED, token_losses
from moesaic.training.validate import add_losses, ratio_with_error
from moesaic_lab.plan import train_file, valid_file
from moesaic_lab.results import Row, read_lines

_DISCOUNT = 0.75
"""Taken off the count of every pair that was seen: absolute discounting, usually with 0.75 (Chen and Goodman 1999)."""


def held_out_sets(
    domains: Sequence[str], tokenizer: PreTrainedTokenizerBase, *, sequence_length: int
) -> dict[str, ValidationSet]:
    """The held-out documents of each domain, packed as `train` packs them."""
    held_out = tuple(SourceRecipe(path=valid_file(domain), domain=domain) for domain in domains)
    recipe = DataRecipe(sequence_length=sequence_length, sources=held_out, validation=held_out)
    return {one.domain: one for one in validation_sets(prepare(recipe, tokenizer, quiet=True))}


@torch.no_grad()
def held_out_loss(model: PreTrainedModel, held_out: ValidationSet, *, sequences: int = 8) -> Row:
    """Loss of one held-out set in nats per predicted token, with its standard error over documents."""
    sums_2N = torch.zeros(2, held_out.num_documents, dtype=torch.float64)
    for batch in held_out.batches(sequences):
        add_losses(model, batch, sums_2N)
    loss = ratio_with_error(*sums_2N)
    return {"domain": held_out.domain, "value": loss.loss, "standard_error": loss.standard_error}


def measure(*, checkpoints: Mapping[str, str], domains: Sequence[str], sequence_length: int) -> Iterator[Row]:
    """A row per checkpoint and domain, and one with the number of parameters.

    Args:
        checkpoints: name in the results -> folder; all with the same tokenizer.
        domains: whose held-out documents are measured.
        sequence_length: that these are packed to.
    """
    tokenizer = load_tokenizer(next(iter(checkpoints.values())))
    held_out = held_out_sets(domains, tokenizer, sequence_length=sequence_length)
    for order, (name, folder) in enumerate(checkpoints.items()):
        common = {"model": name, "order": order}
        model = moesaic.load(folder, device="cpu")
        yield from ({**common, "measure": "measured_loss", **held_out_loss(model, one)} for one in held_out.values())
        tensors = open_checkpoint(folder).tensors.values()
        yield {**common, "measure": "parameters", "value": sum(math.prod(tensor.shape) for tensor in tensors)}


def premise(*, checkpoint: str, domains: Sequence[str], sequence_length: int) -> Iterator[Row]:
    """Per domain the loss of a unigram model, a bigram model, the checkpoint, and the checkpoint without its FFNs."""
    tokenizer = load_tokenizer(checkpoint)
    held_out = held_out_sets(domains, tokenizer, sequence_length=sequence_length)
    unigram_V, bigram_VV = frequencies(pairs(domains, tokenizer))
    model = moesaic.load(checkpoint, device="cpu")
    for domain, one in held_out.items():
        before_N, after_N = _targets(one)
        unigram, bigram = -np.log(unigram_V[after_N]), -np.log(bigram_VV[before_N, after_N])
        yield {"domain": domain, "measure": "unigram_loss", "value": float(unigram.mean())}
        yield {"domain": domain, "measure": "bigram_loss", "value": float(bigram.mean())}
        yield {"measure": "premise_loss", **held_out_loss(model, one)}
        with without_ffns(model):
            yield {"measure": "without_ffns_loss", **held_out_loss(model, one)}


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


def accuracy(*, checkpoints: Mapping[str, str], domains: Sequence[str]) -> Iterator[Row]:
    """Multiple-choice accuracy on the generated domains' held-out questions: a row per model and domain."""
    questions = {domain: read_lines(Path(f"data/{domain}.choice.jsonl")) for domain in domains}
    for name, folder in checkpoints.items():
        model, tokenizer = moesaic.load(folder, device="cpu"), load_tokenizer(folder)
        for domain, rows in questions.items():
            right = sum(predicted(model, tokenizer, row) == row["answer"] for row in rows)
            value = right / len(rows)
            yield {"measure": "accuracy", "model": name, "domain": domain, "value": value, "questions": len(rows)}


@torch.no_grad()
def predicted(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, row: dict[str, Any]) -> int:
    """Index of the choice with the lowest loss per byte after the question (lm-eval's `acc_norm`)."""
    prompt = tokenizer(f"Question: {row['question']}\nAnswer:")["input_ids"]
    answers = [tokenizer(f" {choice}")["input_ids"] for choice in row["choices"]]
    losses = _losses(model, prompt, answers)
    scores = [loss / len(choice.encode()) for loss, choice in zip(losses, row["choices"], strict=True)]
    return scores.index(min(scores))


def _losses(model: PreTrainedModel, prompt: list[int], answers: Sequence[list[int]]) -> list[float]:
    """Loss of each answer after the prompt, summed over its tokens."""
    length = len(prompt) + max(map(len, answers))
    ids_AS = torch.zeros(len(answers), length, dtype=torch.int64)
    labels_AS = torch.full((len(answers), length), IGNORED)
    for ids_S, labels_S, answer in zip(ids_AS, labels_AS, answers, strict=True):
        end = len(prompt) + len(answer)
        ids_S[:end] = torch.tensor(prompt + answer)
        labels_S[len(prompt) - 1 : end - 1] = torch.tensor(answer)
    # Padding comes after the answers, and attention looks back only.
    positions_AS = torch.arange(length).expand(len(answers), -1)
    logits = model(input_ids=ids_AS, position_ids=positions_AS, use_cache=False).logits
    losses_T, _ = token_losses(logits.flatten(0, 1), labels_AS.flatten())
    return losses_T.view(labels_AS.shape).double().sum(dim=1).tolist()
