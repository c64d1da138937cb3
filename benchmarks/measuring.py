"""What the benchmarks share: commands measured in processes of their own, random MoE checkpoints of any size, text."""

import json
import multiprocessing
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import IO, Any, NamedTuple

MOESAIC = str(Path(sys.executable).parent / "moesaic")

QWEN3_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "vocab_size": 151_936,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
"""The shapes of Qwen3-30B-A3B, six of its 48 layers."""

VOCABULARY = 32_768
"""Of the checkpoints that `prepared` makes."""

SIZES: dict[str, dict[str, int]] = {
    "large": {"num_hidden_layers": 2},
    "small": {
        "num_hidden_layers": 4,
        "hidden_size": 1024,
        "moe_intermediate_size": 512,
        "num_experts": 64,
        "num_attention_heads": 16,
    },
}
"""2.7 GB of Qwen3-30B-A3B's shapes; 1.0 GB of half as many experts and half the width, for what runs in memory."""

_POOL = 1 << 23
"""Normal numbers; all weights are stretches of them from random places, because drawing gigabytes takes minutes."""


class Measured(NamedTuple):
    """One run of a command."""

    seconds: float
    """Wall time."""
    peak_gb: float
    """Largest resident memory."""
    output: str


def measured(command: list[str], *, data_limit: int | None = None) -> Measured:
    """Run a command in a process of its own.

    `data_limit`: bytes of private writable memory that it may have (RLIMIT_DATA, `ulimit -d`); beyond, it fails.
    """
    limit = None if data_limit is None else lambda: resource.setrlimit(resource.RLIMIT_DATA, (data_limit, data_limit))
    start = time.perf_counter()
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, stdout=output, stderr=errors, preexec_fn=limit)
        _, status, usage = os.wait4(process.pid, 0)
        texts = [_read(file) for file in (output, errors)]
    seconds = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{' '.join(command[:2])} failed:\n{texts[1][-2000:]}")
    return Measured(seconds, usage.ru_maxrss * 1024 / 1e9, texts[0])


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode()


def start_command() -> list[str]:
    """What every verb that moves tensors pays before it does anything."""
    return [sys.executable, "-c", "import torch"]


def best(command: list[str], *, repeats: int, fresh: Path | None = None) -> Measured:
    """The fastest of some runs with the largest peak of any; `fresh` is removed before each."""
    runs = []
    for _ in range(repeats):
        if fresh is not None:
            shutil.rmtree(fresh, ignore_errors=True)
        runs.append(measured(command))
    fastest = min(runs, key=lambda run: run.seconds)
    return fastest._replace(peak_gb=max(run.peak_gb for run in runs))


def apart(function: Callable[..., None], **arguments: Any) -> None:
    """Run a function in a process of its own: the peak that Linux reports for a command starts with its parent's."""
    process = multiprocessing.get_context("spawn").Process(target=function, kwargs=arguments)
    process.start()
    process.join()
    assert process.exitcode == 0, function


def prepared(work: Path, size: str) -> Path:
    """A checkpoint of one of `SIZES` below `work`, made once."""
    folder = work / size
    if not (folder / "tokenizer.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
        apart(make_moe, folder=folder, vocab_size=VOCABULARY, **SIZES[size])
    return folder


def weight_bytes(folder: Path) -> int:
    """Bytes in the safetensors files of `folder`."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def write_text(file: Path, *, documents: int, words: int, vocabulary: int, seed: int = 0) -> None:
    """Documents of random words of `save_words`' tokenizer, one token each."""
    draw = random.Random(seed)
    texts = (" ".join(f"w{draw.randrange(3, vocabulary)}" for _ in range(words)) for _ in range(documents))
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")


def save_words(folder: Path, vocabulary: int) -> None:
    """A tokenizer of the words w0, w1, ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", eos_token="w2").save_pretrained(folder)


def make_moe(folder: Path, **changes: Any) -> None:
    """Write a random bf16 Qwen3-MoE with a tensor per expert and a tokenizer, each tensor cut from normal numbers."""
    import torch

    from moesaic.checkpoint.writer import CheckpointWriter, OutputTensor, plan_files

    config = QWEN3_MOE | changes
    tensors = [OutputTensor(name=name, dtype="BF16", shape=shape) for name, shape in _tensors(config)]
    folder.mkdir(parents=True)
    pool_P = torch.empty(_POOL, dtype=torch.bfloat16).normal_(std=0.02, generator=torch.Generator().manual_seed(0))
    draw = random.Random(0)
    with CheckpointWriter(folder, plan_files(tensors, 2_000_000_000)) as writer:
        for tensor in tensors:
            size = prod(tensor.shape)
            if "norm" in tensor.name:
                writer.write(tensor.name, torch.ones(size, dtype=torch.bfloat16))
                continue
            for start in range(0, size, _POOL // 2):
                length, offset = min(_POOL // 2, size - start), draw.randrange(_POOL // 2)
                writer.write(tensor.name, pool_P[offset : offset + length], start)
        writer.finish()
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_words(folder, config["vocab_size"])


def _tensors(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a Qwen3-MoE as it is published."""
    hidden, inner, head = config["hidden_size"], config["moe_intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}{name}.weight", (hidden,)
        for name, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
            yield f"{prefix}self_attn.{name}.weight", (rows, hidden)
        yield f"{prefix}self_attn.o_proj.weight", (hidden, queries)
        for name in ("q_norm", "k_norm"):
            yield f"{prefix}self_attn.{name}.weight", (head,)
        yield f"{prefix}mlp.gate.weight", (config["num_experts"], hidden)
        for expert in range(config["num_experts"]):
            for name in ("gate_proj", "up_proj"):
                yield f"{prefix}mlp.experts.{expert}.{name}.weight", (inner, hidden)
            yield f"{prefix}mlp.experts.{expert}.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], hidden)
