"""What two models are compared on: up to 1,000 tokens (a text every Python has, a file, or random ids), and logits."""

import importlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from moesaic.checkpoint.headers import TOKENIZER_FILES
from moesaic.checkpoint.record import side_files
from moesaic.checkpoint.source import Checkpoint
from moesaic.common.errors import MoesaicError
from moesaic.loading import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_TOKENS = 1000
"""Tokens that logits and hidden states are kept for."""

SEQUENCE_LENGTH = 250
"""Tokens of one sequence; `MAX_TOKENS` make four."""

# Modules with long prose in their docstrings; all are part of every Python.
_MODULES = (
    "difflib",
    "heapq",
    "random",
    "statistics",
    "textwrap",
    "unittest",
    "doctest",
    "argparse",
    "pickle",
    "bisect",
)


def default_text() -> str:
    """Return the docstrings of a few modules of Python's own library: English prose, the same on every run."""
    parts = []
    for name in _MODULES:
        module = importlib.import_module(name)
        parts.append(inspect.getdoc(module) or "")
        members = sorted(vars(module).items())
        public = [value for key, value in members if not key.startswith("_") and inspect.isroutine(value)]
        parts += [inspect.getdoc(value) or "" for value in public]
    return "\n\n".join(part for part in parts if part)


def read_text(path: Path | str) -> str:
    """Return the content of a UTF-8 text file."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise MoesaicError(f"--text {path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise MoesaicError(f"--text {path}: is not UTF-8 text ({error.reason} at byte {error.start})") from error
    if not text.strip():
        raise MoesaicError(f"--text {path}: is empty; give a text of a few hundred words")
    return text


def text_tokens(tokenizer: "PreTrainedTokenizerBase", text: str) -> Int[Tensor, "sequences length"]:
    """Return the first `MAX_TOKENS` tokens of a text, cut into equal sequences; what is left over is dropped."""
    # Four characters a token are usual; twenty are enough for any text, and a book need not be read to its end.
    ids = tokenizer(text[: 20 * MAX_TOKENS], verbose=False)["input_ids"]
    return _cut(torch.tensor(ids)[:MAX_TOKENS])


def random_tokens(vocab: int, seed: int = 0) -> Int[Tensor, "sequences length"]:
    """Return `MAX_TOKENS` random token ids, for checkpoints without a tokenizer."""
    return _cut(torch.randint(vocab, (MAX_TOKENS,), generator=torch.Generator().manual_seed(seed)))


def tokens_for(
    source: Checkpoint, target: Checkpoint, text: Path | str | None, *, vocab: int
) -> tuple[Int[Tensor, "sequences length"], str]:
    """Return the tokens that two models are compared on, by the first tokenizer there is, and what they are."""
    content = default_text() if text is None else read_text(text)
    name = "Python's docstrings" if text is None else str(text)
    for checkpoint in (source, target):
        # Without any file transformers makes up an empty tokenizer for some families.
        if side_files(checkpoint, TOKENIZER_FILES):
            return text_tokens(load_tokenizer(checkpoint.path), content), name
    if text is not None:
        raise MoesaicError(
            f"--text {text}: neither {source.name} nor {target.name} has a tokenizer; leave --text out to "
            "measure on random tokens"
        )
    return random_tokens(vocab), "random token ids (there is no tokenizer)"


def _cut(ids: Tensor) -> Tensor:
    if len(ids) < 2:
        raise MoesaicError("--text: has fewer than two tokens; give a text of a few hundred words")
    length = min(SEQUENCE_LENGTH, len(ids))
    return ids[: len(ids) // length * length].reshape(-1, length)


@torch.no_grad()
def run_logits(
    model: nn.Module, tokens_BL: Tensor, batch_size: int, tick: Callable[[float], None]
) -> Iterator[Float[Tensor, "sequences length vocab"]]:
    """Yield the logits of a model, batch by batch, in fp32 on the CPU."""
    device = next(model.parameters()).device
    for batch in tokens_BL.split(batch_size):
        yield model(input_ids=batch.to(device), use_cache=False).logits.float().cpu()
        tick(batch.numel())
