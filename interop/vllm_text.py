"""Greedy text of vLLM against that of the dense model in transformers: python vllm_text.py FOLDER [MODEL...].

FOLDER is what `smollm2_text` wrote. Run in vLLM's environment by `make interop`, one process per model.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

MODELS = ("mixtral", "virtual_group", "divmoe")


def texts(folder: Path, name: str, count: int) -> list[list[int]]:
    """The most likely next tokens of each prompt, in fp32."""
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    prompts = json.loads((folder / "texts.json").read_text(encoding="utf-8"))["prompts"]
    engine = LLM(str(folder / name), dtype="float32", enforce_eager=True, max_model_len=128, max_num_seqs=8)
    parameters = SamplingParams(max_tokens=count, min_tokens=count, temperature=0.0)
    found = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], parameters, use_tqdm=False)
    return [list(result.outputs[0].token_ids) for result in found]


def main(folder: Path, chosen: list[str]) -> int:
    """Run the models, and return 1 if a text differs."""
    expected = json.loads((folder / "texts.json").read_text(encoding="utf-8"))["texts"]
    bad = 0
    for name in chosen or MODELS:
        environment = {
            "VLLM_LOGGING_LEVEL": "ERROR",
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            **os.environ,
        }
        command = [sys.executable, __file__, "--one", str(folder), name, str(len(expected[0]))]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith("[[")]
        if done.returncode or not lines:
            print(f"{name:20} FAILED: {(done.stderr.splitlines() or ['no message'])[-1]}", flush=True)
            bad += 1
            continue
        same = sum(one == other for one, other in zip(json.loads(lines[-1]), expected, strict=True))
        print(f"{name:20} {same} of {len(expected)} texts in vLLM equal the dense model's", flush=True)
        bad += same != len(expected)
    return 1 if bad else 0


if __name__ == "__main__":
    if sys.argv[1] == "--one":
        print(json.dumps(texts(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))))
    else:
        sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
