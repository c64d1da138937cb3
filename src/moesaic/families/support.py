"""What each family of mixtures of experts can be used for: the table that `moesaic families` and docs/families.md show.

A cell is "yes", or why not. Every cell is run on a tiny checkpoint: most in tests/integration/test_families.py, GGUF
and vLLM in `make interop`. Torch-free.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from moesaic.families.moe_table import MOE_FAMILIES

COLUMNS = ("read", "train", "expand", "select", "extract", "write fused", "write per-expert", "GGUF", "vLLM")

YES = "yes"


@dataclass(frozen=True, kw_only=True)
class FamilySupport:
    """One row: the model type, what it is, and a cell per column."""

    model_type: str
    about: str
    cells: Mapping[str, str]
    notes: str = ""
    """Where the family comes from, or what is special about it; one line."""

    def to_json(self) -> dict[str, object]:
        """Plain values, for `--json`."""
        return {
            "model_type": self.model_type,
            "about": self.about,
            "cells": {column: self.cells[column] for column in COLUMNS},
            "notes": self.notes,
        }


_NATIVE = dict.fromkeys(COLUMNS, YES)

_VLLM_LATENT = "not in the CPU build (0.32), whose latent attention is off by 0.17; all the rest agrees"
_STACKED_ONLY = "no: published with stacked experts only"

_ABOUT: Mapping[str, tuple[str, dict[str, str], str]] = {
    "olmoe": ("OLMoE", {"GGUF": "where norm_topk_prob is false and rms_norm_eps 1e-5"}, ""),
    "flex_olmo": ("FlexOlmo", {"GGUF": "no: llama.cpp has no FlexOlmo"}, ""),
    "qwen2_moe": (
        "Qwen1.5-MoE, Qwen2-MoE, and what mergekit-moe makes of Qwen2",
        {"GGUF": "where norm_topk_prob is false"},
        "its shared expert has a gate",
    ),
    "qwen3_moe": ("Qwen3-MoE", {"GGUF": "where norm_topk_prob is true"}, ""),
    "mixtral": ("Mixtral, and what mergekit-moe makes of Llama and Mistral", {"GGUF": "without sliding window"}, ""),
    "gpt_oss": (
        "GPT-OSS",
        {
            "train": "no: transformers does not keep its packed documents apart by their position ids",
            "write per-expert": "no: its stacked matrices interleave gate and up, and nothing reads single experts",
            "GGUF": "with logits off by 5e-4: llama.cpp rounds the range of YaRN (truncate: false)",
            "vLLM": "not in the CPU build (0.32), which has no kernel for experts with biases",
        },
        "MXFP4 checkpoints are refused: use a bf16 release",
    ),
    "granitemoe": ("Granite-MoE", {"write per-expert": _STACKED_ONLY}, ""),
    "granitemoeshared": ("Granite-MoE with shared experts", {"write per-expert": _STACKED_ONLY}, ""),
    "deepseek_v2": (
        "DeepSeek-V2",
        {"GGUF": "without groups, where norm_topk_prob is false", "vLLM": _VLLM_LATENT},
        "",
    ),
    "deepseek_v3": ("DeepSeek-V3, R1", {"vLLM": _VLLM_LATENT}, "FP8 checkpoints are refused: use a bf16 release"),
    "glm4_moe": ("GLM-4.5, GLM-4.6", {"GGUF": "without groups"}, ""),
    "moesaic_*": (
        "our architecture on 29 dense families",
        {
            "write per-expert": "no: modeling_moesaic.py reads stacked experts only; export to a native family has it",
            "GGUF": "where it is exactly a native family that llama.cpp runs",
            "vLLM": "on Llama, Mistral, Qwen2, Qwen3, OLMo 2 and 3, SmolLM3, Phi-3; wrong on Gemma and Granite",
        },
        "what upcycle writes; in vLLM by the plugin or with --trust-remote-code",
    ),
    "emo": (
        "released EMO checkpoints",
        dict.fromkeys(("train", "expand", "select", "extract"), "after `moesaic export CHECKPOINT OUT --to moesaic`")
        | {"GGUF": "as qwen2_moe, on the way", "vLLM": "after export, as qwen2_moe or our architecture"},
        "read by export only: its own code no longer imports on current transformers",
    ),
}


def support() -> tuple[FamilySupport, ...]:
    """All rows, the native families in the order of `moe_table` first."""
    rows = (*MOE_FAMILIES, "moesaic_*", "emo")
    return tuple(
        FamilySupport(model_type=name, about=about, cells=_NATIVE | cells, notes=notes)
        for name in rows
        for about, cells, notes in [_ABOUT[name]]
    )


def markdown() -> str:
    """The table of docs/families.md, with the reasons below it."""
    reasons: dict[str, int] = {}
    lines = [f"| model_type | what | {' | '.join(COLUMNS)} |", "|" + "---|" * (len(COLUMNS) + 2)]
    for row in support():
        cells = [
            "yes" if row.cells[column] == YES else f"({reasons.setdefault(row.cells[column], len(reasons) + 1)})"
            for column in COLUMNS
        ]
        lines.append(f"| `{row.model_type}` | {row.about} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(f"({number}) {reason}  " for reason, number in reasons.items())])
