"""Write the checkpoints that `vllm_parity` runs, with the logits that transformers gives, into a folder.

Run by `make interop` in the project's own environment: python -m interop.vllm_models FOLDER.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers.utils import logging

import moesaic
from interop.models import HEADS
from moesaic.families.dense_table import FAMILIES
from tests.tiny_models import tiny_moe_model
from tests.tiny_moes import save_tiny_moe

VOCABULARY = 512
DIVMOE = {"routing_rule": "one_per_group", "expert_groups": [0, 0, 1, 1, 2, 2]}

OURS: dict[str, tuple[str, dict[str, Any]]] = {
    "divmoe-llama": ("llama", DIVMOE),
    "divmoe-qwen3": ("qwen3", DIVMOE | {"group_score": "log_mean_exp", "num_shared_experts": 1}),
    "emo": ("llama", {"routing_weighting": "all", "num_shared_experts": 1}),
    **{f"topk-{base}": (base, {}) for base, row in FAMILIES.items() if row.in_vllm},
}
EXPORTED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "exported-mixtral": ("llama", "mixtral", {}),
    "exported-qwen3_moe": ("qwen3", "qwen3_moe", {}),
    "exported-qwen2_moe": ("llama", "qwen2_moe", {"routing_weighting": "all", "num_shared_experts": 1}),
    "exported-granitemoeshared": ("llama", "granitemoeshared", {"num_shared_experts": 1}),
    "exported-flex_olmo": ("olmo2", "flex_olmo", {"routing_weighting": "all"}),
}
LATENT: dict[str, Any] = {
    "hidden_size": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32,
}  # fmt: skip
"""Sizes that vLLM's latent attention takes."""
WITHOUT_ATTENTION = ("deepseek_v2", "deepseek_v3")
"""Families whose latent attention differs from transformers' in vLLM's CPU build (by 0.17 in both): its output is zero
here, so that the rest of the model is compared. GPT-OSS is left out: no kernel there for experts with biases."""
NATIVE: dict[str, dict[str, Any]] = {
    "olmoe": HEADS | {"num_key_value_heads": 4},
    "flex_olmo": HEADS | {"num_key_value_heads": 4},
    "qwen2_moe": HEADS,
    "qwen3_moe": HEADS,
    "mixtral": HEADS,
    "granitemoe": HEADS,
    "granitemoeshared": HEADS,
    "deepseek_v2": LATENT | {"n_group": 1, "topk_group": 1},
    "deepseek_v3": LATENT | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "glm4_moe": HEADS | {"n_group": 1, "topk_group": 1},
}


def our_model(folder: Path, base: str, settings: dict[str, Any]) -> None:
    """A tiny random model of our architecture."""
    tiny_moe_model(base, **{"vocab_size": VOCABULARY, **HEADS, **settings}).save_pretrained(folder)


def native_model(folder: Path, family: str, settings: dict[str, Any]) -> None:
    """A tiny random model of a native family."""
    save_tiny_moe(folder, family, vocab_size=VOCABULARY, **settings)
    if family in WITHOUT_ATTENTION:
        tensors = load_file(folder / "model.safetensors")
        silent = {name: torch.zeros_like(tensor) for name, tensor in tensors.items() if ".o_proj." in name}
        save_file(tensors | silent, folder / "model.safetensors", metadata={"format": "pt"})


def main(out: Path) -> None:
    """Write all models, and `logits.safetensors` and `cases.json` beside them."""
    logging.disable_progress_bar()
    shutil.rmtree(out, ignore_errors=True)  # of an earlier run
    cases: dict[str, str] = {}
    for name, (base, settings) in OURS.items():
        our_model(out / name, base, settings)
        cases[name] = "plugin"
    our_model(out / "divmoe-remote-code", "llama", DIVMOE)
    cases["divmoe-remote-code"] = "remote code"
    for name, (base, family, settings) in EXPORTED.items():
        our_model(out / f"{name}-source", base, settings)
        moesaic.export(out / f"{name}-source", out / name, to=family)
        cases[name] = "native"
    for family, settings in NATIVE.items():
        native_model(out / f"native-{family}", family, settings)
        cases[f"native-{family}"] = "native"
    tokens = torch.randint(VOCABULARY, (1, 64), generator=torch.Generator().manual_seed(1))
    logits = {"tokens": tokens}
    for name in cases:
        model = moesaic.load(out / name, dtype="float32")
        logits[name] = model(input_ids=tokens, use_cache=False).logits[0].log_softmax(-1).detach().contiguous()
    save_file(logits, out / "logits.safetensors")
    (out / "cases.json").write_text(json.dumps(cases), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
