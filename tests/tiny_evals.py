"""Local rows of a few benchmarks in the form of shared/data/evals, and tiny models with a tokenizer to ask."""

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from moesaic.data.mmlu import CATEGORIES
from tests.tiny_models import randomize, tiny_config
from tests.tiny_moes import save_tiny_moe
from tests.tiny_training import VOCABULARY, save_tokenizer

_LETTERS = "abcdefghij"


def write_rows(file: Path, rows: Iterable[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def words(draw: random.Random, number: int) -> str:
    return " ".join("".join(draw.choices(_LETTERS, k=draw.randint(1, 4))) for _ in range(number))


def choice_rows(number: int, *, choices: int = 4, seed: int = 0, **more: Any) -> list[dict[str, Any]]:
    draw = random.Random(f"{choices}-{seed}-{sorted(more.items())}")
    return [
        {
            "id": str(index),
            "question": words(draw, 4),
            "choices": [words(draw, draw.randint(1, 3)) for _ in range(choices)],
            "answer": draw.randrange(choices),
            **more,
        }
        for index in range(number)
    ]


def write_evals(folder: Path, *, rows: int = 6) -> Path:
    """ARC-easy with train rows, PIQA, BoolQ, OpenBookQA, HellaSwag, MMLU (three subjects) and GSM8K."""
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "arc_easy.test.jsonl", choice_rows(rows))
    write_rows(folder / "arc_easy.train.jsonl", choice_rows(8, seed=1))
    write_rows(folder / "openbookqa.test.jsonl", choice_rows(rows, seed=2))
    write_rows(folder / "piqa.validation.jsonl", choice_rows(rows, choices=2, seed=3))
    write_rows(folder / "hellaswag.validation_1000.jsonl", choice_rows(rows, seed=4))
    yes_no = [
        row | {"choices": ["yes", "no"], "context": f"title -- {row['question']}"}
        for row in choice_rows(rows, choices=2, seed=5)
    ]
    write_rows(folder / "boolq.validation.jsonl", yes_no)
    subjects = (*CATEGORIES["engineering"], *CATEGORIES["geography"], "abstract_algebra")
    for split, number in (("test_some", rows), ("dev", 5)):
        write_rows(
            folder / f"mmlu.{split}.jsonl",
            [row for subject in subjects for row in choice_rows(number, seed=6, subject=subject)],
        )
    draw = random.Random(7)
    write_rows(
        folder / "gsm8k.test.jsonl",
        [{"id": str(n), "question": words(draw, 5), "answer": f"so #### {n}"} for n in range(rows)],
    )
    return folder


def save_tiny_dense(folder: Path, *, reach: int = 512) -> Path:
    """A tiny Llama with a tokenizer of characters."""
    config = tiny_config("llama", vocab_size=VOCABULARY, max_position_embeddings=reach)
    model = AutoModelForCausalLM.from_config(config)
    randomize(model, 0)
    model.save_pretrained(folder)
    return save_tokenizer(folder)


def save_tiny_routed(folder: Path, *, seed: int = 0) -> Path:
    """A tiny OLMoE, 8 experts of which 2 are active, with a tokenizer of characters."""
    save_tiny_moe(folder, "olmoe", vocab_size=VOCABULARY, max_position_embeddings=512, seed=seed)
    return save_tokenizer(folder)


def naive_document_loss(folder: Path, text: str, window: int) -> tuple[float, int]:
    """Sum of -log p over the tokens of a text after the end token, a forward pass per window, and their number."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    before = [tokenizer.eos_token_id, *tokenizer(text)["input_ids"]]
    total = 0.0
    for begin in range(0, len(before) - 1, window):
        end = min(begin + window, len(before) - 1)
        with torch.no_grad():
            logs = model(input_ids=torch.tensor([before[max(0, end - window) : end]])).logits[0].log_softmax(-1)
        for place in range(begin, end):
            total -= float(logs[place - end, before[place + 1]])
    return total, len(before) - 1
