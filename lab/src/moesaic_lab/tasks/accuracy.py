"""Multiple-choice accuracy on the generated domains' held-out questions."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import moesaic
from moesaic.loading import load_tokenizer
from moesaic.modeling.cross_entropy import IGNORED, token_losses
from moesaic_lab.rows import Row, read_lines


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """Settings of the task."""

    checkpoints: dict[str, str]
    """Name in the results -> folder."""
    rows: str
    """File to write."""
    domains: tuple[str, ...]
    seed: int


def run(settings: Accuracy) -> Iterator[Row]:
    """One row per model and domain."""
    questions = {domain: read_lines(Path(f"data/{domain}.choice.jsonl")) for domain in settings.domains}
    for name, folder in settings.checkpoints.items():
        model, tokenizer = moesaic.load(folder, device="cpu"), load_tokenizer(folder)
        for domain, rows in questions.items():
            right = sum(predicted(model, tokenizer, row) == row["answer"] for row in rows)
            yield {
                "measure": "accuracy",
                "model": name,
                "domain": domain,
                "seed": settings.seed,
                "value": right / len(rows),
                "questions": len(rows),
            }


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
