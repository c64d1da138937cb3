"""Log-probabilities of vLLM's CPU build against those of transformers. Run in vLLM's environment by `make interop`:
python vllm_parity.py FOLDER [CASE...], where FOLDER is what `vllm_models` wrote.

Each case runs in a process of its own: vLLM does not give memory back.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

LIMIT = 1e-4


def measure(folder: Path, name: str, kind: str) -> float:
    """Largest difference of log-probabilities over all positions and tokens."""
    import torch
    from safetensors.torch import load_file
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    expected = load_file(folder / "logits.safetensors")
    tokens = expected["tokens"][0].tolist()
    engine = LLM(
        str(folder / name),
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=1,
        max_logprobs=-1,
        trust_remote_code=kind == "remote code",
    )
    parameters = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=-1, detokenize=False)
    (result,) = engine.generate([{"prompt_token_ids": tokens}], parameters, use_tqdm=False)
    largest = 0.0
    for position, found in enumerate(result.prompt_logprobs[1:]):
        row = torch.full((expected[name].shape[1],), torch.inf)
        for token, value in found.items():
            row[token] = value.logprob
        largest = max(largest, (row - expected[name][position]).abs().max().item())
    return largest


def main(folder: Path, chosen: list[str]) -> int:
    """Run the cases, print a table, and return 1 if one misses."""
    cases = json.loads((folder / "cases.json").read_text(encoding="utf-8"))
    bad = 0
    for name, kind in cases.items():
        if chosen and name not in chosen:
            continue
        plugins = {} if kind == "plugin" else {"VLLM_PLUGINS": ""}
        environment = {
            "VLLM_LOGGING_LEVEL": "ERROR",
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            **os.environ,
        }
        command = [sys.executable, __file__, "--one", str(folder), name, kind]
        done = subprocess.run(command, capture_output=True, text=True, env=environment | plugins, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith("largest ")]
        if done.returncode == 0 and lines:
            value = float(lines[-1].split()[1])
            verdict = "ok" if value <= LIMIT else "MISSED"
            print(f"{name:28} {kind:12} {value:.2g}: {verdict}", flush=True)
        else:
            errors = [line for line in done.stderr.splitlines() if "Error" in line] or done.stderr.splitlines()[-1:]
            verdict = "FAILED"
            print(f"{name:28} {kind:12} FAILED: {errors[-1][-300:] if errors else done.returncode}", flush=True)
        bad += verdict != "ok"
    return 1 if bad else 0


if __name__ == "__main__":
    if sys.argv[1] == "--one":
        print("largest", measure(Path(sys.argv[2]), sys.argv[3], sys.argv[4]))
    else:
        sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
