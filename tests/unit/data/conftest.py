"""A byte-level tokenizer trained on a few sentences, and short ways to write data and caches."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from moesaic.data.cache import Document, write_cache
from moesaic.data.recipe import DataRecipe, SourceRecipe
from moesaic.data.tokenise import PreparedData

SENTENCES = [
    "The quick brown fox jumps over the lazy dog.",
    "Two and two are four, and four and four are eight.",
    "user assistant system question answer question answer",
]
SPECIAL = ["<pad>", "<eos>", "<bos>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer(template: str | None = CHATML, *, eos: str = "<eos>", extra: str = "") -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([*SENTENCES, extra], trainer)
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, pad_token="<pad>", bos_token="<bos>")
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture(scope="session")
def new_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    return make_tokenizer


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., Path]:
    def write(name: str, records: list[dict]) -> Path:
        file = tmp_path / name
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
        return file

    return write


@pytest.fixture
def make_data(tmp_path: Path) -> Callable[..., PreparedData]:
    """Prepared data of given documents (lists of token ids) without a tokenizer; token ids are all distinct."""

    def make(
        lengths: list[list[int]],
        *,
        sequence_length: int,
        weights: list[float] | None = None,
        epochs: int | None = None,
        masked: tuple[tuple[int, int], ...] = (),
    ) -> PreparedData:
        folders, sources, following = [], [], 1
        for index, of_source in enumerate(lengths):
            documents = []
            for length in of_source:
                documents.append(Document(ids=np.arange(following, following + length), masked=masked))
                following += length
            folder = tmp_path / f"cache-{len(list(tmp_path.iterdir()))}"
            folders.append(write_cache(folder, documents, vocab_size=1 << 20, meta={}).folder)
            weight = weights[index] if weights else 1.0
            sources.append(SourceRecipe(path="unused", domain=f"domain{index}", weight=weight))
        held_out = tuple(SourceRecipe(path="unused", domain=source.domain) for source in sources)
        recipe = DataRecipe(sequence_length=sequence_length, sources=tuple(sources), validation=held_out, epochs=epochs)
        return PreparedData(recipe=recipe, sources=tuple(folders), validation=tuple(folders), padding_id=0)

    return make
