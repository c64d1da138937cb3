"""Data of an experiment: given documents, or four small generated domains; held-out documents; a tokenizer.

The generated domains are for users who have no data: the same bytes everywhere, questions with answers that can be
checked. A tenth of all possible questions is held out by a hash of its words, so no held-out question is in the
training text; its wordings, numbers and names are.
"""

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from moesaic.common.errors import MoesaicError
from moesaic.common.files import write_file
from moesaic_lab.plan import TOKENIZER, train_file, valid_file
from moesaic_lab.questions import Draw, Item, draw_arithmetic, draw_item, draw_program
from moesaic_lab.stories import draw_cause, draw_fact, passage

DOMAINS: Mapping[str, Draw] = {
    "arithmetic": draw_arithmetic,
    "programs": draw_program,
    "facts": draw_fact,
    "causes": draw_cause,
}
"""Name of a domain -> what draws its questions."""

_PASSAGES: Mapping[str, Callable[[random.Random], str]] = {"facts": passage}
"""Text that comes before the questions of a document, where a domain has some."""
_STEPS_FIRST = 1 / 3
_TOKENIZER_CHARACTERS = 3_000_000
"""Characters of each domain that the tokenizer learns from."""
_SHORTEST = 150
"""Characters that every generated document has."""


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


def prepare(
    *,
    data: str | None,
    domains: Sequence[str],
    documents: int,
    tasks: int,
    held_out_size: int,
    held_out_characters: int,
    vocabulary: int,
) -> None:
    """Fill `data/` in the current folder: training files, held-out documents of bounded length, a tokenizer.

    Args:
        data: folder with DOMAIN.train.jsonl and DOMAIN.valid.jsonl; None is the generated domains.
        domains: of the experiment.
        documents: training documents of a generated domain.
        tasks: questions of a generated domain and kind.
        held_out_size: characters of held-out text of a domain, in whole documents.
        held_out_characters: first characters of a held-out document that are used.
        vocabulary: tokens of the tokenizer.
    """
    folder = Path("data")
    folder.mkdir(exist_ok=True)
    if data is None:
        write_world(folder, train=documents, valid=held_out_size // _SHORTEST + 1, tasks=tasks)
    else:
        for domain in domains:
            link = Path(train_file(domain))
            link.unlink(missing_ok=True)
            link.symlink_to((Path(data) / link.name).resolve())
    for domain in domains:
        source = (folder if data is None else Path(data)) / Path(valid_file(domain)).name
        texts = list(_held_out(source, held_out_size, held_out_characters))
        write_file(Path(valid_file(domain)), "".join(json.dumps({"text": text}) + "\n" for text in texts))
    _train_tokenizer(domains, vocabulary)


def texts_of(file: Path) -> Iterator[str]:
    """The field `text` of every line."""
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                text = json.loads(line)["text"]
            except (ValueError, KeyError, TypeError) as error:
                raise MoesaicError(f"{file}:{number}: not a JSON object with a field `text`") from error
            if text:
                yield text


def _held_out(file: Path, size: int, characters: int) -> Iterator[str]:
    """The beginnings of the first documents, until there is enough."""
    found = 0
    for text in texts_of(file):
        if found >= size:
            return
        yield text[:characters]
        found += min(len(text), characters)


def _train_tokenizer(domains: Sequence[str], vocabulary: int) -> None:
    """Train a byte-level BPE and save it; special tokens are `<pad>` and `<eos>`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<pad>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (text for domain in domains for text in _first_characters(Path(train_file(domain))))
    backend.train_from_iterator(texts, trainer)
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>").save_pretrained(TOKENIZER)


def _first_characters(file: Path) -> Iterator[str]:
    left = _TOKENIZER_CHARACTERS
    for text in texts_of(file):
        yield text[:left]
        left -= len(text)
        if left <= 0:
            return
