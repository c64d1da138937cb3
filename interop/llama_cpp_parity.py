"""Logits of llama.cpp against transformers for every family, and what `export --to gguf` refuses.

Run by `make interop`; needs `llama_cpp` on PYTHONPATH and MOESAIC_LLAMA_CPP. Arguments: names of cases (default: all).
"""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers.utils import logging

import moesaic
from interop.models import glm, native, ours, some_tokens
from moesaic.exporting.check import llama_logits, open_llama

LIMIT = 5e-4

Case = tuple[Callable[..., Path], str, dict[str, Any]]

CASES: dict[str, Case] = {
    "mixtral": (native, "mixtral", {}),
    "mixtral, tied": (native, "mixtral", {"tie_word_embeddings": True}),
    "qwen3_moe": (native, "qwen3_moe", {"norm_topk_prob": True}),
    "qwen2_moe": (native, "qwen2_moe", {}),
    "qwen2_moe, tied": (native, "qwen2_moe", {"tie_word_embeddings": True}),
    "olmoe": (native, "olmoe", {}),
    "granitemoe": (native, "granitemoe", {}),
    "granitemoeshared": (native, "granitemoeshared", {}),
    "gpt_oss": (native, "gpt_oss", {}),
    "deepseek_v2": (native, "deepseek_v2", {"q_lora_rank": 16, "topk_method": "greedy"}),
    "deepseek_v3": (native, "deepseek_v3", {"q_lora_rank": 16}),
    "glm4_moe": (glm, "glm4_moe", {"n_group": 1, "topk_group": 1}),
    "moesaic_llama": (ours, "llama", {}),
    "moesaic_llama, 1 shared": (ours, "llama", {"num_shared_experts": 1}),
    "moesaic_llama, EMO's form": (ours, "llama", {"num_shared_experts": 1, "routing_weighting": "all"}),
    "moesaic_qwen3": (ours, "qwen3", {}),
    "moesaic_qwen2": (ours, "qwen2", {"routing_weighting": "all"}),
    "moesaic_granite": (ours, "granite", {}),
}

REFUSED: dict[str, Case] = {
    "qwen3_moe, not renormalised": (native, "qwen3_moe", {"norm_topk_prob": False}),
    "qwen2_moe, renormalised": (native, "qwen2_moe", {"norm_topk_prob": True}),
    "mixtral, sliding window": (native, "mixtral", {"sliding_window": 8}),
    "olmoe, other epsilon": (native, "olmoe", {"rms_norm_eps": 1e-6}),
    "flex_olmo": (native, "flex_olmo", {}),
    "deepseek_v2, groups": (
        native, "deepseek_v2", {"n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy"},
    ),
    "moesaic_qwen2, renormalised": (ours, "qwen2", {}),
    "moesaic_llama, DivMoE": (
        ours, "llama", {"routing_rule": "one_per_group", "expert_groups": [0, 0, 1, 1, 2, 2]},
    ),
}  # fmt: skip


def difference(folder: Path, case: Case) -> tuple[float, float]:
    """(largest difference of logits, largest logit) of one model in both engines."""
    make, family, settings = case
    source = make(folder / "model", family, **settings)
    moesaic.export(source, folder / "gguf", to="gguf", dtype="float32")
    tokens = some_tokens()
    expected = moesaic.load(source, dtype="float32")(input_ids=tokens, use_cache=False).logits.detach()
    engine = open_llama(folder / "gguf" / "model-f32.gguf", context=tokens.shape[1])
    found = llama_logits(engine, tokens)
    return (expected - found).abs().max().item(), expected.abs().max().item()


def main(chosen: list[str]) -> int:
    """Run the cases, print a table, and return 1 if one misses."""
    logging.disable_progress_bar()
    bad = 0
    for name, case in CASES.items():
        if chosen and name not in chosen:
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                found, largest = difference(Path(folder), case)
                verdict = "ok" if found <= LIMIT else "MISSED"
                print(f"{name:32} {found:.2g} of {largest:.3g}: {verdict}", flush=True)
            except (ValueError, moesaic.MoesaicError) as error:
                verdict = f"FAILED: {error}"
                print(f"{name:32} {verdict}", flush=True)
            bad += verdict != "ok"
    for name, (make, family, settings) in REFUSED.items():
        if chosen and name not in chosen:
            continue
        with tempfile.TemporaryDirectory() as folder:
            source = make(Path(folder) / "model", family, **settings)
            try:
                moesaic.export(source, Path(folder) / "gguf", to="gguf", dry_run=True)
                print(f"{name:32} NOT REFUSED", flush=True)
                bad += 1
            except moesaic.MoesaicError as error:
                print(f"{name:32} refused: {str(error).partition(': ')[2]}", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
