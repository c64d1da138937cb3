"""The training half of the demo: a small dense model, four specialists, and the MoE that is made of them.

Every model has less than 5 M parameters and sees a few hundred thousand tokens: enough to see losses fall and experts
being used, and nothing more.
"""

import json
from pathlib import Path
from typing import Any

from rich.table import Table
from small_world import VOCABULARY, train_tokenizer, write_corpus

import moesaic

DENSE = {
    "family": "llama",
    "config": {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
    },
}


def _recipe(model: Any, tokenizer: Path, sources: list[str], corpus: Path, *, steps: int, lr: float) -> dict[str, Any]:
    """A training recipe on some domains, validated on all that it trains on."""
    return {
        "model": model,
        "tokenizer": str(tokenizer),
        "data": {
            "sequence_length": 256,
            "sources": [{"path": str(corpus / f"{domain}.train.jsonl"), "domain": domain} for domain in sources],
            "validation": [{"path": str(corpus / f"{domain}.valid.jsonl"), "domain": domain} for domain in sources],
        },
        "optimizer": {"lr": lr, "min_lr": lr / 10, "warmup_steps": 5},
        "batch": {"tokens": 2048, "micro_sequences": 8},
        "budget": {"steps": steps},
        "precision": "fp32",
    }


def run(out: Path) -> list[dict[str, Any]]:
    """Train all models; returns one row per model: what it is, held-out losses before and after, use of experts."""
    corpus = write_corpus(out / "corpus")
    domains = list(corpus)
    tokenizer = train_tokenizer(corpus, out / "tokenizer")
    folder = out / "corpus"

    def train(name: str, model: Any, sources: list[str], steps: int, lr: float, **more: Any) -> Path:
        print(f"training {name}: {steps} steps", flush=True)
        recipe = _recipe(model, tokenizer, sources, folder, steps=steps, lr=lr) | more
        moesaic.train(recipe, out / name, overwrite=True)
        return out / name

    base = train("base", DENSE, domains, 50, 4e-3)
    specialists = {domain: train(f"specialist-{domain}", str(base), [domain], 25, 2e-3) for domain in domains}
    moesaic.upcycle(base, out / "upcycled", method="divmoe", specialists=specialists, shards=2, top_k=2, overwrite=True)
    losses = {"balance": {"coefficient": 0.02, "scope": "global"}}
    moe = train("moe", str(out / "upcycled"), domains, 50, 3e-3, losses=losses)
    return [row for path in (base, *specialists.values(), moe) for row in _rows(path)]


def look_inside(out: Path, page: Path) -> Path:
    """Inspect the MoE beside what it was before training, on held-out text, and write the report on both."""
    held_out = sorted((out / "corpus").glob("*.valid.jsonl"))
    moesaic.inspect(out / "moe", out / "inside", data=held_out, against=out / "upcycled", clusters=16, overwrite=True)
    moesaic.report([out / "inside", out / "base", out / "moe"], page, title="The demo's models", overwrite=True)
    return page


def _rows(folder: Path) -> list[dict[str, Any]]:
    """One row per held-out domain of a run, from its metrics.jsonl."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    validations = [line["validation"] for line in lines if line["kind"] == "validation"]
    last = [line for line in lines if line["kind"] == "step"][-1]
    return [
        {
            "model": folder.name,
            "domain": domain,
            "before": before["loss"],
            "after": validations[-1][domain]["loss"],
            "standard_error": (before["standard_error"] ** 2 + validations[-1][domain]["standard_error"] ** 2) ** 0.5,
            "load_entropy": last.get("load_entropy"),
            "dead_experts": last.get("dead_experts"),
        }
        for domain, before in validations[0].items()
    ]


def table(rows: list[dict[str, Any]]) -> Table:
    """The rows for people."""
    result = Table(title="Held-out loss (nats per token) before and after training")
    for column in ("model", "domain", "before", "after", "std. error", "load entropy", "unused experts"):
        result.add_column(column, no_wrap=column == "model")
    for row in rows:
        entropy, dead = row["load_entropy"], row["dead_experts"]
        result.add_row(
            row["model"].partition("-")[0], row["domain"],
            f"{row['before']:.3f}", f"{row['after']:.3f}", f"{row['standard_error']:.3f}",
            "" if entropy is None else f"{entropy:.3f}", "" if dead is None else str(dead),
        )  # fmt: skip
    return result


def failures(rows: list[dict[str, Any]]) -> list[str]:
    """What the demo promises and did not show: losses that did not fall by three standard errors, experts not used."""
    return [
        f"{row['model']} on {row['domain']}: {row['before']:.3f} to {row['after']:.3f}"
        for row in rows
        if row["before"] - row["after"] < 3 * row["standard_error"]
    ] + [f"{row['model']}: {row['dead_experts']} experts are not used" for row in rows if row["dead_experts"]]
