"""A quarter of a gpt-oss-shaped MXFP4 checkpoint: peak memory and time of `extract`, and whether its bytes are moved.

    python benchmarks/quantised.py FOLDER [--layers 48]

Makes a checkpoint with the shape of gpt-oss-20b and more layers (48: 20 GB) of repeated random blocks in FOLDER, cuts
it to 8 of 32 experts in a process of its own under a limit of 2 GB of data (`ulimit -d`), compares every expert's bytes
and deletes both. Prints one JSON object.
"""

import argparse
import json
import math
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from moesaic.checkpoint.headers import TensorInfo
from moesaic.checkpoint.source import open_checkpoint

HIDDEN, WIDTH, EXPERTS, HEADS, KEYS, HEAD, VOCABULARY = 2880, 2880, 32, 64, 8, 64, 201088
KEPT = [1, 4, 9, 12, 17, 22, 27, 31]
LIMIT = 2_000_000_000
BLOCK = os.urandom(1 << 20)

CHILD = """
import sys
from pathlib import Path
import moesaic
source, selection, out = sys.argv[1:]
moesaic.extract(source, selection, out, workers=2)
print(next(line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line).split()[1])
"""


def layer_tensors(layer: int) -> dict[str, tuple[str, list[int]]]:
    """Name -> dtype and shape, as gpt-oss-20b has them."""
    attention, mlp = f"model.layers.{layer}.self_attn.", f"model.layers.{layer}.mlp."
    own = {
        f"{attention}q_proj.weight": [HEADS * HEAD, HIDDEN],
        f"{attention}k_proj.weight": [KEYS * HEAD, HIDDEN],
        f"{attention}v_proj.weight": [KEYS * HEAD, HIDDEN],
        f"{attention}o_proj.weight": [HIDDEN, HEADS * HEAD],
        f"{attention}q_proj.bias": [HEADS * HEAD],
        f"{attention}k_proj.bias": [KEYS * HEAD],
        f"{attention}v_proj.bias": [KEYS * HEAD],
        f"{attention}o_proj.bias": [HIDDEN],
        f"{attention}sinks": [HEADS],
        f"model.layers.{layer}.input_layernorm.weight": [HIDDEN],
        f"model.layers.{layer}.post_attention_layernorm.weight": [HIDDEN],
        f"{mlp}router.weight": [EXPERTS, HIDDEN],
        f"{mlp}router.bias": [EXPERTS],
        f"{mlp}experts.gate_up_proj_bias": [EXPERTS, 2 * WIDTH],
        f"{mlp}experts.down_proj_bias": [EXPERTS, HIDDEN],
    }
    codes = {
        f"{mlp}experts.gate_up_proj_blocks": [EXPERTS, 2 * WIDTH, HIDDEN // 32, 16],
        f"{mlp}experts.gate_up_proj_scales": [EXPERTS, 2 * WIDTH, HIDDEN // 32],
        f"{mlp}experts.down_proj_blocks": [EXPERTS, HIDDEN, WIDTH // 32, 16],
        f"{mlp}experts.down_proj_scales": [EXPERTS, HIDDEN, WIDTH // 32],
    }
    return {name: ("BF16", shape) for name, shape in own.items()} | {
        name: ("U8", shape) for name, shape in codes.items()
    }


def write_file(file: Path, tensors: dict[str, tuple[str, list[int]]]) -> None:
    """A safetensors file of repeated random blocks (bf16: of 0x3c3c, a finite number)."""
    header, at = {}, 0
    for name, (dtype, shape) in tensors.items():
        nbytes = (2 if dtype == "BF16" else 1) * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for number, (name, entry) in enumerate(header.items()):
            left = entry["data_offsets"][1] - entry["data_offsets"][0]
            block = b"\x3c" * len(BLOCK) if entry["dtype"] == "BF16" else BLOCK
            turn = number * 4097 % len(BLOCK)  # no two tensors begin alike
            block = block[turn:] + block[:turn] + name.encode() if entry["dtype"] == "U8" else block
            while left:
                left -= stream.write(memoryview(block)[:left])


def make(folder: Path, layers: int) -> int:
    """Bytes of the weight files."""
    folder.mkdir()
    ends = {
        "model.embed_tokens.weight": ("BF16", [VOCABULARY, HIDDEN]),
        "model.norm.weight": ("BF16", [HIDDEN]),
        "lm_head.weight": ("BF16", [VOCABULARY, HIDDEN]),
    }
    places = {}
    for number in range(layers + 1):
        name = f"model-{number:05}-of-{layers:05}.safetensors"
        tensors = ends if number == layers else layer_tensors(number)
        write_file(folder / name, tensors)
        places |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    config = {
        "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "hidden_size": HIDDEN,
        "intermediate_size": WIDTH, "num_hidden_layers": layers, "num_local_experts": EXPERTS,
        "num_experts_per_tok": 4, "num_attention_heads": HEADS, "num_key_value_heads": KEYS, "head_dim": HEAD,
        "vocab_size": VOCABULARY, "sliding_window": 128, "dtype": "bfloat16", "tie_word_embeddings": False,
        "quantization_config": {"quant_method": "mxfp4"},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def blocks_of(info: TensorInfo, start: int, nbytes: int) -> Iterator[bytes]:
    with info.file.open("rb") as stream:
        stream.seek(info.offset + start)
        for at in range(0, nbytes, 1 << 22):
            yield stream.read(min(1 << 22, nbytes - at))


def moved(before: Path, after: Path) -> int:
    """Number of experts' tensors whose bytes were moved; the first that differs ends the comparison."""
    full, part = (open_checkpoint(path, as_stored=True).tensors for path in (before, after))
    same = 0
    for name in (name for name in part if name.endswith(("_blocks", "_scales"))):
        one, other = full[name].nbytes // EXPERTS, part[name].nbytes // len(KEPT)
        assert one == other, name
        for number, expert in enumerate(KEPT):
            pairs = zip(blocks_of(full[name], expert * one, one), blocks_of(part[name], number * one, one), strict=True)
            assert all(ours == theirs for ours, theirs in pairs), (name, expert)
            same += 1
    return same


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=48)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as work:
        source, out, selection = Path(work, "source"), Path(work, "out"), Path(work, "selection.json")
        nbytes = make(source, arguments.layers)
        import moesaic

        content = moesaic.select(str(source), keep=len(KEPT), method="random").to_dict()
        selection.write_text(json.dumps({**content, "kept": [KEPT] * arguments.layers}))
        started = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-c", CHILD, str(source), str(selection), str(out)],
            check=True,
            capture_output=True,
            text=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (LIMIT, LIMIT)),
        )
        seconds = time.monotonic() - started
        config = json.loads((out / "config.json").read_text())
        report = {
            "source_bytes": nbytes,
            "result_bytes": sum(file.stat().st_size for file in out.glob("*.safetensors")),
            "peak_bytes": int(done.stdout.split()[-1]) * 1024,
            "data_limit_bytes": LIMIT,
            "seconds": round(seconds, 1),
            "expert_tensors_with_the_same_bytes": moved(source, out),
            "quantization_config": config["quantization_config"],
        }
        shutil.rmtree(out)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
