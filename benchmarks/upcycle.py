"""`moesaic upcycle` beside mergekit-moe and a plain copy of the same bytes, in one run.

    python benchmarks/upcycle.py --mergekit /path/to/venv/bin/mergekit-moe [--layers 8] [--repeats 3] [--work DIR]

The work: a base and four specialists (bf16 Llama, hidden 2048, FFN 8192, eight layers, 0.69 B parameters each, 1 GB
shards) become four experts with top-2 routing and a random router. Without `--mergekit` only our side and the copy run.
mergekit lives in an environment of its own:

    python3 -m venv /opt/mk && /opt/mk/bin/pip install torch==2.13.0 mergekit==0.1.5

The runs are interleaved and each is a fresh process; the table shows the fastest wall time and the largest resident
memory of any run.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HIDDEN, INTERMEDIATE, VOCABULARY = 2048, 8192, 36_864


def make_checkpoint(folder: Path, *, seed: int, layers: int) -> None:
    """Write a random bf16 Llama with a small tokenizer, in shards of 1 GB."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=16,
        vocab_size=VOCABULARY,
        dtype=torch.bfloat16,
    )
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config)
    model = model.to(dtype=torch.bfloat16).to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.normal_(std=0.02)
    model.save_pretrained(folder, max_shard_size="1GB")
    words = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", eos_token="w2").save_pretrained(folder)


def prepare(work: Path, layers: int) -> list[Path]:
    """The base and the four specialists below `work`, made once.

    In processes of their own: the peak memory that Linux reports for a command starts with its parent's.
    """
    folders = [work / f"source-{layers}-{seed}" for seed in range(5)]
    for seed, folder in enumerate(folders):
        if not (folder / "config.json").exists():
            options = {"folder": folder, "seed": seed, "layers": layers}
            process = multiprocessing.get_context("spawn").Process(target=make_checkpoint, kwargs=options)
            process.start()
            process.join()
            assert process.exitcode == 0, folder
    return folders


def measured(command: list[str]) -> tuple[float, float]:
    """Wall seconds and peak resident GB of a command in a process of its own."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    errors = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{command[0]} failed:\n{errors.decode()[-2000:]}")
    return seconds, usage.ru_maxrss * 1024 / 1e9


def weight_bytes(folder: Path) -> int:
    """Bytes in the safetensors files of `folder`."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def moesaic_command(folders: list[Path], out: Path) -> list[str]:
    """The same work with our command."""
    specialists = [part for i, folder in enumerate(folders[1:]) for part in ("--specialist", f"d{i}={folder}")]
    return [
        str(Path(sys.executable).parent / "moesaic"), "upcycle", str(folders[0]), str(out),
        "--method", "btx", "--top-k", "2", "--router-init", "random", "--shared-weights", "base", "--quiet",
        *specialists,
    ]  # fmt: skip


def mergekit_command(program: str, folders: list[Path], out: Path, work: Path) -> list[str]:
    """The same work with mergekit-moe."""
    recipe = {
        "base_model": str(folders[0]),
        "gate_mode": "random",
        "dtype": "bfloat16",
        "experts": [{"source_model": str(folder), "positive_prompts": [""]} for folder in folders[1:]],
    }
    file = work / "mergekit.yml"
    file.write_text(json.dumps(recipe))
    return [program, str(file), str(out)]


def main() -> None:
    """Run the comparison and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mergekit", help="mergekit-moe program (0.1.5)")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--work",
        type=Path,
        default=Path(tempfile.gettempdir()) / "moesaic-bench",
        help="folder for the 7 GB of sources",
    )
    arguments = parser.parse_args()
    work: Path = arguments.work
    folders = prepare(work, arguments.layers)
    ours, theirs, copy = work / "ours", work / "mergekit", work / "copy"
    commands = {
        "moesaic upcycle": moesaic_command(folders, ours),
        "interpreter + import torch": [sys.executable, "-c", "import torch"],
        "plain copy (cp)": ["cp", "-r", str(ours), str(copy)],
    }
    if arguments.mergekit:
        commands["mergekit-moe"] = mergekit_command(arguments.mergekit, folders, theirs, work)
    results: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    written = 0
    for _ in range(arguments.repeats):
        shutil.rmtree(ours, ignore_errors=True)
        for name, command in commands.items():
            for folder in (copy, theirs):
                shutil.rmtree(folder, ignore_errors=True)
            results[name].append(measured(command))
            written = weight_bytes(ours)
    for folder in (copy, theirs):
        shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(ours, ignore_errors=True)
    fastest_copy = min(seconds for seconds, _ in results["plain copy (cp)"])
    print(
        f"{arguments.layers} layers, {written / 1e9:.2f} GB written, best of {arguments.repeats}, {os.cpu_count()} CPUs"
    )
    print(f"{'':28} {'seconds':>8} {'/ copy':>7} {'peak GB':>8}")
    for name, runs in results.items():
        seconds, peak = min(run[0] for run in runs), max(run[1] for run in runs)
        print(f"{name:28} {seconds:8.2f} {seconds / fastest_copy:7.2f} {peak:8.2f}")


if __name__ == "__main__":
    main()
