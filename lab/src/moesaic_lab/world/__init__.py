"""Four small generated domains: the lab's data for users who have none. The same bytes everywhere.

Questions have answers that can be checked. A tenth of all possible questions is held out by a hash of its words, so no
held-out question is in the training text; its wordings, numbers and names are.
"""

import json
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from moesaic_lab.world import arithmetic, causes, facts, programs
from moesaic_lab.world.items import Draw, Item, draw_item

DOMAINS: Mapping[str, Draw] = {
    "arithmetic": arithmetic.draw,
    "programs": programs.draw,
    "facts": facts.draw,
    "causes": causes.draw,
}
"""Name of a domain -> what draws its questions."""

_PASSAGES: Mapping[str, Callable[[random.Random], str]] = {"facts": facts.passage}
"""Text that comes before the questions of a document, where a domain has some."""


_STEPS_FIRST = 1 / 3


def documents(domain: str, number: int, *, held_out: bool) -> Iterator[str]:
    """Documents of three to six questions with their worked answers; the first n of more are the same n."""
    for index in range(number):
        rng = random.Random(f"{domain}/{'held out' if held_out else 'training'}/{index}")
        items = [draw_item(DOMAINS[domain], rng, held_out=held_out) for _ in range(rng.randint(3, 6))]
        parts = [_asked(item, rng) for item in items]
        if domain in _PASSAGES:
            parts.insert(0, _PASSAGES[domain](rng))
        yield "\n".join(parts)


def _asked(item: Item, rng: random.Random) -> str:
    """The answer first, as tasks want it, or the steps first."""
    if rng.random() < _STEPS_FIRST:
        return f"Question: {item.question}\nSteps: {item.worked}\nAnswer: {item.answer}"
    return f"Question: {item.question}\nAnswer: {item.answer}\nBecause: {item.worked}"


def choice_rows(domain: str, number: int) -> Iterator[dict[str, Any]]:
    """Held-out multiple-choice rows: id, question, choices, answer (index), subject."""
    for index, item in enumerate(_held_out_items(domain, number, "choice")):
        choices = [item.answer, *item.wrong]
        random.Random(f"{domain}/order/{index}").shuffle(choices)
        yield {
            "id": f"{domain}-choice-{index}",
            "question": item.question,
            "choices": choices,
            "answer": choices.index(item.answer),
            "subject": domain,
        }


def generation_rows(domain: str, number: int) -> Iterator[dict[str, Any]]:
    """Held-out rows to be answered in words: id, question, answer, subject."""
    for index, item in enumerate(_held_out_items(domain, number, "generation")):
        yield {
            "id": f"{domain}-generation-{index}",
            "question": item.question,
            "answer": item.answer,
            "subject": domain,
        }


def _held_out_items(domain: str, number: int, purpose: str) -> Iterator[Item]:
    """Different questions."""
    rng, seen = random.Random(f"{domain}/{purpose}"), set[str]()
    while len(seen) < number:
        item = draw_item(DOMAINS[domain], rng, held_out=True)
        if item.question not in seen:
            seen.add(item.question)
            yield item


def write_world(folder: Path, *, train: int, valid: int, tasks: int) -> tuple[str, ...]:
    """Write `DOMAIN.{train,valid}.jsonl` with that many documents, and `DOMAIN.{choice,generation}.jsonl` with tasks.

    Returns the names of the domains.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for domain in DOMAINS:
        for split, number in (("train", train), ("valid", valid)):
            texts = documents(domain, number, held_out=split == "valid")
            rows = ({"text": text, "domain": domain, "id": f"{domain}-{split}-{i}"} for i, text in enumerate(texts))
            _write(folder / f"{domain}.{split}.jsonl", rows)
        _write(folder / f"{domain}.choice.jsonl", choice_rows(domain, tasks))
        _write(folder / f"{domain}.generation.jsonl", generation_rows(domain, tasks))
    return tuple(DOMAINS)


def _write(file: Path, rows: Iterator[dict[str, Any]]) -> None:
    with file.open("w", encoding="utf-8") as out:
        out.writelines(json.dumps(row) + "\n" for row in rows)
