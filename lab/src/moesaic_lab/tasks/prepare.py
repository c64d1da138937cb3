"""Data of an experiment: training files, held-out documents of bounded length, a tokenizer."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from moesaic.checkpoint.pio import write_file
from moesaic.common.errors import MoesaicError
from moesaic_lab.world import write_world
from moesaic_lab.writing import TOKENIZER, train_file, valid_file

_TOKENIZER_CHARACTERS = 3_000_000
"""Characters of each domain that the tokenizer learns from."""

_SHORTEST = 150
"""Characters that every generated document has."""


@dataclass(frozen=True, kw_only=True)
class Prepare:
    """Settings of the task."""

    data: str | None
    """Folder with DOMAIN.train.jsonl and DOMAIN.valid.jsonl; None is the generated domains."""
    domains: tuple[str, ...]
    documents: int
    tasks: int
    held_out_size: int
    held_out_characters: int
    vocabulary: int


def run(settings: Prepare) -> None:
    """Fill `data/` in the current folder."""
    folder = Path("data")
    folder.mkdir(exist_ok=True)
    if settings.data is None:
        valid = settings.held_out_size // _SHORTEST + 1
        write_world(folder, train=settings.documents, valid=valid, tasks=settings.tasks)
        sources = folder
    else:
        sources = Path(settings.data)
        for domain in settings.domains:
            link = Path(train_file(domain))
            link.unlink(missing_ok=True)
            link.symlink_to((sources / link.name).resolve())
    for domain in settings.domains:
        held_out = list(_held_out(sources / Path(valid_file(domain)).name, settings))
        _write(Path(valid_file(domain)), held_out)
    _train_tokenizer(settings.domains, settings.vocabulary)


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


def _held_out(file: Path, settings: Prepare) -> Iterator[str]:
    """The beginnings of the first documents, until there is enough."""
    size = 0
    for text in texts_of(file):
        if size >= settings.held_out_size:
            return
        yield text[: settings.held_out_characters]
        size += min(len(text), settings.held_out_characters)


def _write(file: Path, texts: Iterable[str]) -> None:
    write_file(file, "".join(json.dumps({"text": text}) + "\n" for text in texts))


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
