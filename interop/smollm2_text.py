"""SmolLM2-135M-Instruct, upcycled and exported, writes the same greedy text as the dense model.

python -m interop.smollm2_text FOLDER: writes the checkpoints, and the dense model's text as tokens, into FOLDER, and
compares transformers, and llama.cpp where `llama_cpp` is on PYTHONPATH; `vllm_text` then compares vLLM.
"""

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

import moesaic
from interop.models import smollm2
from moesaic.loading import load_tokenizer

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):",
    "Water boils at a temperature of",
    "Once upon a time, in a small village,",
    "The three primary colours are",
)
NEW_TOKENS = 64
METHODS: dict[str, dict[str, Any]] = {
    "virtual_group": {"method": "virtual_group", "experts": 4, "shards": 2, "top_k": 2},
    "divmoe": {"method": "divmoe", "shards": 2, "top_k": 2},
}


def greedy(path: Path, prompts: list[list[int]]) -> list[list[int]]:
    """The 64 most likely next tokens of each prompt, step by step, in fp32; the end of text does not stop it."""
    model: Any = moesaic.load(path, dtype="float32")
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    found = model.generate(
        ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
    )
    return found[:, longest:].tolist()


def llama_greedy(gguf: Path, prompts: list[list[int]], banned: list[int]) -> list[list[int]]:
    """The same in llama.cpp."""
    from moesaic.exporting.check import open_llama

    engine = open_llama(gguf, context=128)
    texts = []
    for prompt in prompts:
        engine.reset()
        engine.eval(prompt)
        text: list[int] = []
        for _ in range(NEW_TOKENS):
            scores = engine.scores[engine.n_tokens - 1].copy()
            scores[banned] = -float("inf")
            text.append(int(scores.argmax()))
            engine.eval(text[-1:])
        texts.append(text)
    return texts


def report(name: str, found: list[list[int]], expected: list[list[int]]) -> bool:
    """Print how many texts are equal; whether all are."""
    same = sum(one == other for one, other in zip(found, expected, strict=True))
    print(f"{name:44} {same} of {len(expected)} texts of {NEW_TOKENS} tokens equal the dense model's", flush=True)
    return same == len(expected)


def main(out: Path) -> int:
    """Make the models, compare, and return 1 if a text differs."""
    logging.disable_progress_bar()
    dense = smollm2()
    tokenizer = load_tokenizer(dense)
    prompts = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    expected = greedy(dense, prompts)
    for prompt, text in zip(PROMPTS, expected, strict=True):
        print(json.dumps(prompt + str(tokenizer.decode(text))), flush=True)
    out.mkdir(parents=True, exist_ok=True)
    (out / "texts.json").write_text(json.dumps({"prompts": prompts, "texts": expected}), encoding="utf-8")
    good = True
    for name, settings in METHODS.items():
        specialists = {"a": dense, "b": dense} if settings["method"] == "divmoe" else None
        moesaic.upcycle(dense, out / name, overwrite=True, specialists=specialists, **settings)
        good &= report(f"{name}, our architecture, transformers", greedy(out / name, prompts), expected)
    moesaic.export(out / "virtual_group", out / "mixtral", to="mixtral", dtype="float32", overwrite=True)
    good &= report("virtual_group as mixtral, transformers", greedy(out / "mixtral", prompts), expected)
    if importlib.util.find_spec("llama_cpp") and os.environ.get("MOESAIC_LLAMA_CPP"):
        moesaic.export(out / "mixtral", out / "gguf", to="gguf", dtype="float32", overwrite=True)
        stop = moesaic.load(dense).generation_config.eos_token_id
        banned = stop if isinstance(stop, list) else [stop]
        found = llama_greedy(out / "gguf" / "model-f32.gguf", prompts, banned)
        good &= report("virtual_group as mixtral, llama.cpp", found, expected)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
