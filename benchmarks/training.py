"""Time and peak memory of a training step: our MoE, a dense model of the same active size, and transformers' Trainer.

    python benchmarks/training.py --threads 2 --precision fp32 bf16 --experts 16/2 64/8

Four contestants on the same packed batches, each in a process of its own, taking turns:

- `dense`: a Qwen3 whose FFN has the size of the active experts, in our loop
- `moesaic`: our MoE made from that Qwen3, in our loop (the limit to reach is `dense`)
- `native`: transformers' Qwen3-MoE with grouped_mm, the same sizes, in our loop
- `trainer`: the same Qwen3-MoE under `transformers.Trainer` (the peer), with its own auxiliary loss, fused AdamW, the
  same clipping and the same documents kept apart; bf16 as the Trainer does it (autocast over fp32 weights)

Printed: the median and the smallest time of the steps of all turns (the first of a turn is left out), their ratio to
`dense`, and the peak resident memory of the process, start-up included.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HIDDEN, LAYERS, VOCABULARY, LENGTH, SEQUENCES = 512, 4, 4096, 512, 4
CONTESTANTS = ("dense", "moesaic", "native", "trainer")


@dataclass(frozen=True, kw_only=True)
class Size:
    """E experts of width I, K of them active."""

    experts: int
    active: int
    width: int


SIZES = {
    "16/2": Size(experts=16, active=2, width=512),
    "64/8": Size(experts=64, active=8, width=256),
}


def write_inputs(folder: Path, *, sequences: int) -> None:
    """Documents of token ids (lengths as in text: many short, some long), and a tokenizer with that many words."""
    import numpy as np
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    random = np.random.default_rng(0)
    left, lines = sequences * LENGTH, []
    while left > 0:
        size = int(min(left, 2 * LENGTH, random.lognormal(5.0, 1.0) + 8))
        lines.append(json.dumps({"ids": random.integers(2, VOCABULARY, size).tolist()}))
        left -= size
    (folder / "documents.jsonl").write_text("\n".join(lines) + "\n")
    words = {"<pad>": 0, "<eos>": 1} | {f"w{index}": index for index in range(2, VOCABULARY)}
    backend = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>").save_pretrained(folder)


def base_config() -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": 2 * LENGTH,
        "tie_word_embeddings": False,
    }


def model_of(contestant: str, size: Size) -> dict[str, Any]:
    dense = base_config() | {"intermediate_size": size.active * size.width}
    if contestant == "dense":
        return {"family": "qwen3", "config": dense}
    if contestant == "moesaic":
        moe = {"experts": size.experts, "top_k": size.active, "intermediate_size": size.width}
        return {"family": "qwen3", "config": dense, "moe": moe}
    return {
        "family": "qwen3_moe",
        "config": dense
        | {
            "num_experts": size.experts,
            "num_experts_per_tok": size.active,
            "moe_intermediate_size": size.width,
            "norm_topk_prob": True,
        },
    }


def recipe_of(contestant: str, size: Size, precision: str, inputs: Path, steps: int) -> dict[str, Any]:
    recipe: dict[str, Any] = {
        "model": model_of(contestant, size),
        "tokenizer": str(inputs),
        "data": {
            "sequence_length": LENGTH,
            "sources": [{"path": str(inputs / "documents.jsonl"), "domain": "all", "tokens": "ids"}],
        },
        "optimizer": {"lr": 1e-4, "min_lr": 1e-5, "warmup_steps": 1, "clip": 1.0},
        "batch": {"tokens": LENGTH * SEQUENCES, "micro_sequences": SEQUENCES},
        "budget": {"steps": steps},
        "precision": precision,
    }
    if contestant != "dense":
        recipe["losses"] = {"balance": {"coefficient": 0.01, "scope": "global"}}
    return recipe


def run_ours(recipe: dict[str, Any], folder: Path) -> list[float]:
    """Seconds of each step of our loop."""
    import moesaic

    moesaic.train(recipe, folder / "out", overwrite=True)
    lines = map(json.loads, (folder / "out" / "metrics.jsonl").read_text().splitlines())
    tokens = recipe["batch"]["tokens"]
    return [tokens / line["timing"]["tokens_per_second"] for line in lines if "loss" in line]


def run_trainer(recipe: dict[str, Any], folder: Path) -> list[float]:
    """Seconds of each step of transformers' Trainer on the batches that our loop would take."""
    import torch
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoTokenizer,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    from moesaic.data.dataset import PackedDataset
    from moesaic.data.tokenise import prepare
    from moesaic.training.recipe import load_train_recipe

    loaded = load_train_recipe(recipe, ())
    prepared = prepare(loaded.data, AutoTokenizer.from_pretrained(recipe["tokenizer"]), quiet=True)
    packed = PackedDataset(prepared, seed=0, sequences_per_step=SEQUENCES)
    rows = []
    for step in range(recipe["budget"]["steps"]):
        batch = packed.batch(step)
        for row in range(SEQUENCES):
            rows.append(
                {
                    "input_ids": batch.input_ids_BS[row],
                    "labels": batch.labels_BS[row],
                    "position_ids": batch.position_ids_BS[row],
                }
            )
    values = recipe["model"]["config"] | {
        "output_router_logits": True,
        "router_aux_loss_coef": 0.01,
        "use_cache": False,
    }
    torch.manual_seed(0)
    config = AutoConfig.for_model(recipe["model"]["family"], **values)
    model = AutoModelForCausalLM.from_config(config, experts_implementation="grouped_mm")
    seconds: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.start = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds.append(time.perf_counter() - self.start)

    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"),
        use_cpu=True,
        bf16=recipe["precision"] == "bf16",
        per_device_train_batch_size=SEQUENCES,
        max_steps=recipe["budget"]["steps"],
        learning_rate=1e-4,
        optim="adamw_torch_fused",
        max_grad_norm=1.0,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
    )
    Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[Clock()]).train()  # pyright: ignore[reportArgumentType]
    return seconds


def child(request: dict[str, Any], folder: Path) -> None:
    import torch

    torch.set_num_threads(request["threads"])
    run = run_trainer if request["contestant"] == "trainer" else run_ours
    seconds = run(request["recipe"], folder)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"seconds": seconds[1:], "peak": peak}))


def call_child(request: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        environment = os.environ | {"OMP_NUM_THREADS": str(request["threads"]), "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, __file__, "--child", json.dumps(request), "--folder", scratch]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr)
        return json.loads(done.stdout.splitlines()[-1])


def measure(name: str, precision: str, options: argparse.Namespace, inputs: Path) -> None:
    seconds: dict[str, list[float]] = {contestant: [] for contestant in CONTESTANTS}
    peaks: dict[str, float] = dict.fromkeys(CONTESTANTS, 0.0)
    for _ in range(options.turns):
        for contestant in CONTESTANTS:
            recipe = recipe_of(contestant, SIZES[name], precision, inputs, options.steps)
            result = call_child({"contestant": contestant, "recipe": recipe, "threads": options.threads})
            seconds[contestant] += result["seconds"]
            peaks[contestant] = max(peaks[contestant], result["peak"])
    least = min(seconds["dense"])
    for contestant in CONTESTANTS:
        best, middle = min(seconds[contestant]), statistics.median(seconds[contestant])
        print(
            f"| {name} | {precision} | {contestant} | {middle:.2f} | {best:.2f} | {best / least:.2f} "
            f"| {peaks[contestant] / 1e9:.2f} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--precision", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(json.loads(options.child), options.folder)
        return
    print(f"{LAYERS} layers, hidden {HIDDEN}, {LENGTH * SEQUENCES} tokens a step, {options.threads} threads")
    print("| experts | precision | contestant | median s | best s | best, against dense | peak GB |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        inputs = Path(folder)
        write_inputs(inputs, sequences=SEQUENCES * options.steps)
        for name in options.experts:
            for precision in options.precision:
                measure(name, precision, options, inputs)


if __name__ == "__main__":
    main()
