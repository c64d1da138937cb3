"""What every method gives before any training, on one real dense model that is also each of its own specialists.

    python benchmarks/step0.py BASE --data ../shared/data/corpus [--tokens 4096]

Each row is one `moesaic upcycle` and the mean loss, in nats per token, on the first `--tokens` tokens of each domain's
held-out file, in sequences of 512 that see nothing of one another, in float32.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoTokenizer

import moesaic

SEQUENCE = 512
METHODS: dict[str, dict[str, Any]] = {
    "sparse, 8 experts, K=2": {"method": "sparse"},
    "sparse, 8 experts, K=1": {"method": "sparse", "top_k": 1},
    "drop, 8 experts, K=2": {"method": "drop"},
    "drop in shards, 16 experts, K=4": {"method": "drop", "experts": 16, "shards": 2, "top_k": 4},
    "drop in shards, --scale paper": {"method": "drop", "experts": 16, "shards": 2, "top_k": 4, "scale": "paper"},
    "virtual_group, 8 experts, K=2": {"method": "virtual_group"},
    "virtual_group, --scale paper": {"method": "virtual_group", "weighting": "all", "scale": "paper"},
    "btx, 4 experts, K=2": {"method": "btx"},
    "divmoe, 4 x 2 experts, K=2": {"method": "divmoe", "top_k": 2},
    "divmoe, --router-init random": {"method": "divmoe", "top_k": 2, "router_init": "random"},
    "divmoe as published": {"method": "divmoe", "top_k": 2, "router_init": "random", "scale": "paper"},
    "scratch, 8 experts, K=2": {"method": "scratch"},
}
SPECIALISTS = ("code", "general", "math", "science")


def sequences(tokenizer: Any, file: Path, tokens: int) -> Tensor:
    """The first `tokens` tokens of a file's documents, one after the other, as (sequences, SEQUENCE)."""
    ids: list[int] = []
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            ids += tokenizer(json.loads(line)["text"], add_special_tokens=False).input_ids
            if len(ids) >= tokens:
                break
    whole = min(len(ids), tokens) // SEQUENCE * SEQUENCE
    return torch.tensor(ids[:whole]).view(-1, SEQUENCE)


@torch.no_grad()
def losses(checkpoint: Path, texts: dict[str, Tensor]) -> list[float]:
    """The mean loss of a checkpoint on each of the texts, in nats per token."""
    model = moesaic.load(checkpoint, dtype="float32").eval()
    found = []
    for ids_NS in texts.values():
        total = torch.zeros((), dtype=torch.float64)
        for ids_1S in ids_NS.split(1):
            logits_SV = model(input_ids=ids_1S, use_cache=False).logits[0, :-1].float()
            total += F.cross_entropy(logits_SV, ids_1S[0, 1:], reduction="sum").double()
        found.append(total.item() / (ids_NS.shape[0] * (SEQUENCE - 1)))
    return found


def main() -> None:
    """Convert, measure and remove one model after the other, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path, help="dense checkpoint")
    parser.add_argument("--data", type=Path, required=True, help="folder with DOMAIN.valid.jsonl")
    parser.add_argument("--tokens", type=int, default=4096, help="of each domain")
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.base)
    files = sorted(arguments.data.glob("*.valid.jsonl"))
    texts = {file.name.split(".")[0]: sequences(tokenizer, file, arguments.tokens) for file in files}
    print(f"| at step 0 | {' | '.join(texts)} | mean |\n|---|{'---|' * (len(texts) + 1)}")

    def row(name: str, checkpoint: Path) -> None:
        found = losses(checkpoint, texts)
        print(f"| {name} | {' | '.join(f'{loss:.3f}' for loss in found)} | {sum(found) / len(found):.3f} |", flush=True)

    row("dense", arguments.base)
    with tempfile.TemporaryDirectory() as work:
        out = Path(work) / "moe"
        for name, options in METHODS.items():
            extra = {} if options["method"] not in ("btx", "divmoe") else {
                "specialists": dict.fromkeys(SPECIALISTS, arguments.base)
            }  # fmt: skip
            moesaic.upcycle(arguments.base, out, overwrite=True, quiet=True, **options, **extra)
            row(name, out)


if __name__ == "__main__":
    main()
