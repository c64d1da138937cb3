"""A checkpoint of several times the memory that `select` and `extract` may use.

    python benchmarks/streaming.py [--shapes olmoe|qwen3] [--layers 8] [--cap-gb 2] [--batch-size 2] [--work DIR]

The checkpoint: random bf16 weights as a Qwen3-MoE, with the sizes of OLMoE-1B-7B (64 experts of 1024, 0.8 GB a layer;
eight of its 16 layers, 6.9 GB) or of Qwen3-30B-A3B (128 experts of 768, 1.2 GB a layer). Both commands run with
RLIMIT_DATA (`ulimit -d`) at the cap: the kernel then refuses all private writable memory beyond it, touched or not, so
the cap is harder than one on resident memory. The table shows wall time and peak resident memory; the checkpoint is
removed at the end.
"""

import argparse
import os
import shutil
import tempfile
from pathlib import Path

from measuring import MOESAIC, QWEN3_MOE, apart, make_moe, measured, weight_bytes, write_text

SHAPES: dict[str, dict[str, int]] = {
    "olmoe": {"moe_intermediate_size": 1024, "num_experts": 64, "num_attention_heads": 16, "num_key_value_heads": 16,
              "vocab_size": 50_304},
    "qwen3": {},
}  # fmt: skip


def main() -> None:
    """Make the checkpoint, run both commands under the cap, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", choices=SHAPES, default="olmoe")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--cap-gb", type=float, default=2.0)
    parser.add_argument("--texts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=2, help="texts at once; their states take memory as well")
    parser.add_argument("--keep", default="25%")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "moesaic-streaming")
    arguments = parser.parse_args()
    work: Path = arguments.work
    shutil.rmtree(work, ignore_errors=True)
    moe, selection, cut, text = work / "moe", work / "selection.json", work / "cut", work / "text.jsonl"
    changes = {**SHAPES[arguments.shapes], "num_hidden_layers": arguments.layers}
    vocabulary = (QWEN3_MOE | changes)["vocab_size"]
    try:
        apart(make_moe, folder=moe, **changes)
        write_text(text, documents=arguments.texts, words=arguments.tokens, vocabulary=vocabulary)
        cap = int(arguments.cap_gb * 1e9)
        commands = {
            "moesaic select": [MOESAIC, "select", str(moe), str(selection), "--data", str(text),
                               "--keep", arguments.keep, "--batch-size", str(arguments.batch_size), "--quiet"],
            "moesaic extract": [MOESAIC, "extract", str(moe), str(selection), str(cut), "--quiet"],
        }  # fmt: skip
        print(
            f"{weight_bytes(moe) / 1e9:.2f} GB on disk, at most {arguments.cap_gb:g} GB of private memory, "
            f"{arguments.texts} texts of {arguments.tokens} tokens, {os.cpu_count()} CPUs"
        )
        print(f"{'':20} {'seconds':>8} {'peak GB':>8}")
        for name, command in commands.items():
            run = measured(command, data_limit=cap)
            print(f"{name:20} {run.seconds:8.2f} {run.peak_gb:8.2f}", flush=True)
        print(f"{weight_bytes(cut) / 1e9:.2f} GB written")
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
