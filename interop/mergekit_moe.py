"""What mergekit-moe makes of tiny dense models, used by our verbs. Run by `make interop`:

python -m interop.mergekit_moe MERGEKIT_MOE FOLDER, with the command `mergekit-moe` of an environment that has it.
"""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

import moesaic
from tests.tiny_models import save_tiny
from tests.tiny_training import VOCABULARY, save_tokenizer

LIMIT = 1e-5
EXPERTS, TOP_K = 3, 2

FAMILIES = {"mistral": "mixtral", "qwen2": "qwen"}
"""Dense family -> mergekit's name of the architecture."""


def merge(mergekit: str, folder: Path, base: str, architecture: str) -> Path:
    """Make dense models and merge them; Qwen2-MoE needs a shared expert."""
    for seed in range(EXPERTS):
        save_tiny(folder / f"{base}-{seed}", base, seed=seed)
        save_tokenizer(folder / f"{base}-{seed}")
    experts = [f"  - source_model: {folder}/{base}-{seed}\n    positive_prompts: [x]" for seed in range(EXPERTS)]
    if architecture == "qwen":
        experts += ["shared_experts:", experts[0] + "\n    residual_scale: 0.1"]
    settings = (
        f"base_model: {folder}/{base}-0\ngate_mode: random\ndtype: float32\narchitecture: {architecture}\nexperts:"
    )
    (folder / f"{base}.yml").write_text("\n".join([settings, *experts]), encoding="utf-8")
    subprocess.run([mergekit, str(folder / f"{base}.yml"), str(folder / base)], check=True, capture_output=True)
    return folder / base


def differences(merged: Path) -> dict[str, float]:
    """Largest difference of logits between transformers on the merged model, and what each verb makes of it."""
    tokens = torch.randint(3, VOCABULARY, (2, 20), generator=torch.Generator().manual_seed(0))

    def logits(model: Any) -> torch.Tensor:
        return model(tokens, use_cache=False).logits.detach()

    expected = logits(AutoModelForCausalLM.from_pretrained(merged))
    folders = {"load": merged}
    for layout in ("input", "fused", "family"):
        folders[f"export --layout {layout}"] = merged.with_name(f"{merged.name}-{layout}")
        moesaic.export(merged, folders[f"export --layout {layout}"], layout=layout)
    folders["expand, twice E and K"] = grown = merged.with_name(f"{merged.name}-grown")
    moesaic.expand(merged, grown, experts=2 * EXPERTS, top_k=2 * TOP_K, utility="uniform", delta=0)
    text, selection = merged.with_suffix(".jsonl"), merged.with_suffix(".json")
    text.write_text('{"text": "one two three four"}\n', encoding="utf-8")
    moesaic.select(merged, selection, data=text, keep=EXPERTS)
    folders["select and extract all"] = merged.with_name(f"{merged.name}-all")
    moesaic.extract(merged, selection, folders["select and extract all"])
    return {name: (logits(moesaic.load(folder)) - expected).abs().max().item() for name, folder in folders.items()}


def main(mergekit: str, folder: Path) -> int:
    """Run both families, print a table, and return 1 if a difference is over the limit."""
    logging.disable_progress_bar()
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier run
    bad = 0
    for base, architecture in FAMILIES.items():
        for name, found in differences(merge(mergekit, folder, base, architecture)).items():
            bad += found > LIMIT
            print(f"{architecture:8} {name:26} {found:.2g}: {'ok' if found <= LIMIT else 'MISSED'}", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
