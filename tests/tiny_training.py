"""A tokenizer of characters, a few documents per domain and a recipe over them: what a training test starts from."""

import json
import random
import string
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHARACTERS = string.ascii_lowercase + string.digits + " .,;"
VOCABULARY = 48

DENSE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
MOE: dict[str, Any] = {"experts": 8, "top_k": 2, "intermediate_size": 24, "shared_experts": 1, "weighting": "all"}


def save_tokenizer(folder: Path) -> Path:
    """One token per character; ids 0 to 2 are padding, end and unknown."""
    names = ["<pad>", "<eos>", "<unk>", *CHARACTERS]
    backend = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    )
    tokenizer.save_pretrained(folder)
    return folder


def write_documents(path: Path, domain: str, *, number: int, seed: int) -> Path:
    """Documents of words that each domain makes from its own few letters, 10 to 60 characters long."""
    letters = random.Random(domain).sample(string.ascii_lowercase, 5)
    draw = random.Random(f"{domain}-{seed}")
    with path.open("w") as file:
        for _ in range(number):
            words = ["".join(draw.choices(letters, k=draw.randint(2, 5))) for _ in range(draw.randint(4, 12))]
            file.write(json.dumps({"text": " ".join(words)}) + "\n")
    return path


def tiny_recipe(folder: Path, **changes: Any) -> dict[str, Any]:
    """Plain values of a recipe that trains a MoE from scratch for 8 steps of 4 sequences; files go into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = folder / "tokenizer"
    if not tokenizer.exists():
        save_tokenizer(tokenizer)
        for domain in ("math", "code"):
            write_documents(folder / f"{domain}.jsonl", domain, number=60, seed=0)
            write_documents(folder / f"{domain}.valid.jsonl", domain, number=6, seed=1)
    recipe = {
        "model": {"family": "llama", "config": DENSE, "moe": MOE},
        "tokenizer": str(tokenizer),
        "data": {
            "sequence_length": 32,
            "sources": [{"path": str(folder / f"{domain}.jsonl"), "domain": domain} for domain in ("math", "code")],
            "validation": [{"path": str(folder / "math.valid.jsonl"), "domain": "math"}],
        },
        "losses": {"balance": {"coefficient": 0.1}, "router_z": 0.001},
        "optimizer": {"lr": 1e-2, "warmup_steps": 2, "min_lr": 1e-3},
        "batch": {"tokens": 128, "micro_sequences": 2},
        "budget": {"steps": 8},
        "precision": "fp32",
    }
    return recipe | changes
