"""Four small domains from what every Python carries, and a tokenizer for them: data for a demo without downloads."""

import importlib
import inspect
import json
import pkgutil
import pydoc_data.topics
import unicodedata
from collections.abc import Iterator
from pathlib import Path

from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast

VOCABULARY = 1024
_PACKAGES = ("asyncio", "json", "email", "html", "http", "logging", "importlib", "unittest", "concurrent", "xml")
_DOCUMENTED = (
    "argparse", "ast", "asyncio", "bisect", "calendar", "collections", "configparser", "csv", "datetime", "decimal",
    "difflib", "email.message", "enum", "functools", "heapq", "html", "http.client", "inspect", "itertools", "json",
    "logging", "math", "operator", "os", "pathlib", "pickle", "random", "re", "shutil", "socket", "statistics",
    "string", "struct", "subprocess", "tarfile", "tempfile", "textwrap", "threading", "time", "tokenize", "traceback",
    "types", "typing", "unittest", "urllib.parse", "uuid", "weakref", "zipfile",
)  # fmt: skip
_LENGTH = 2000
"""Characters of a document, at most."""


def _source_files() -> Iterator[str]:
    """Python code: the modules of a few packages of the standard library."""
    for package in _PACKAGES:
        for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
            spec = module.module_finder.find_spec(module.name, None)  # pyright: ignore[reportCallIssue]
            if spec is not None and spec.origin is not None and spec.origin.endswith(".py"):
                yield Path(spec.origin).read_text(encoding="utf-8")


def _docstrings() -> Iterator[str]:
    """Short prose: what the functions and classes of common modules say of themselves."""
    for name in _DOCUMENTED:
        for value in vars(importlib.import_module(name)).values():
            if (inspect.isroutine(value) or inspect.isclass(value)) and (text := inspect.getdoc(value)):
                yield text


def _topics() -> Iterator[str]:
    """Long prose: the language reference, as `help()` shows it."""
    yield from pydoc_data.topics.topics.values()


def _characters() -> Iterator[str]:
    """Facts with a regular form: Unicode characters, 24 to a document."""
    named = [(code, unicodedata.name(chr(code), "")) for code in range(0x20, 0x3000)]
    lines = [
        f"U+{code:04X} is {name.lower()}, category {unicodedata.category(chr(code))}." for code, name in named if name
    ]
    yield from ("\n".join(lines[start : start + 24]) for start in range(0, len(lines), 24))


DOMAINS = {"code": _source_files, "docstrings": _docstrings, "reference": _topics, "characters": _characters}


def write_corpus(folder: Path) -> dict[str, Path]:
    """Write `DOMAIN.train.jsonl` and `DOMAIN.valid.jsonl` (every tenth document); returns the training files."""
    folder.mkdir(parents=True, exist_ok=True)
    for domain, read in DOMAINS.items():
        pieces = [text[at : at + _LENGTH] for text in read() for at in range(0, len(text), _LENGTH)]
        for split, keep in (("train", lambda i: i % 10 != 0), ("valid", lambda i: i % 10 == 0)):
            lines = [json.dumps({"text": piece}) for i, piece in enumerate(dict.fromkeys(pieces)) if keep(i)]
            (folder / f"{domain}.{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return {domain: folder / f"{domain}.train.jsonl" for domain in DOMAINS}


def train_tokenizer(corpus: dict[str, Path], folder: Path) -> Path:
    """Train a byte-level BPE of 1,024 tokens on the corpus and save it."""
    texts = (json.loads(line)["text"] for file in corpus.values() for line in file.open(encoding="utf-8"))
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, vocab_size=VOCABULARY, special_tokens=["<eos>"], show_progress=False)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer, eos_token="<eos>", pad_token="<eos>")
    wrapped.save_pretrained(folder)
    return folder
