"""Names of the architectures and the place of their code; imports neither torch nor transformers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moesaic.common.errors import MoesaicError

# model type of a dense base (all of moesaic.families.dense_table) -> the stem of its class names
STEMS = {
    "llama": "Llama",
    "mistral": "Mistral",
    "ministral": "Ministral",
    "ministral3": "Ministral3",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "gemma": "Gemma",
    "gemma2": "Gemma2",
    "gemma3_text": "Gemma3Text",
    "vaultgemma": "VaultGemma",
    "olmo": "Olmo",
    "olmo2": "Olmo2",
    "olmo3": "Olmo3",
    "smollm3": "SmolLM3",
    "granite": "Granite",
    "granite_swa": "GraniteSWA",
    "phi3": "Phi3",
    "glm": "Glm",
    "glm4": "Glm4",
    "cohere": "Cohere",
    "cohere2": "Cohere2",
    "ernie4_5": "Ernie4_5",
    "exaone4": "Exaone4",
    "hunyuan_v1_dense": "HunYuanDenseV1",
    "helium": "Helium",
    "seed_oss": "SeedOss",
    "stablelm": "StableLm",
    "cwm": "Cwm",
    "diffllama": "DiffLlama",
}


def class_names(base_model_type: str) -> dict[str, Any]:
    """Return the entries of ``config.json`` that name the MoE classes made from a dense base.

    The keys are ``model_type``, ``architectures`` and ``auto_map``. Raises ``MoesaicError`` for a base without an MoE
    architecture.
    """
    if base_model_type not in STEMS:
        raise MoesaicError(
            f"model_type {base_model_type!r} has no MoE architecture; the bases that have one are {', '.join(STEMS)}"
        )
    stem = STEMS[base_model_type]
    return {
        "model_type": f"moesaic_{base_model_type}",
        "architectures": [f"Moesaic{stem}ForCausalLM"],
        "auto_map": {
            "AutoConfig": f"modeling_moesaic.Moesaic{stem}Config",
            "AutoModel": f"modeling_moesaic.Moesaic{stem}Model",
            "AutoModelForCausalLM": f"modeling_moesaic.Moesaic{stem}ForCausalLM",
        },
    }


def modeling_file() -> Path:
    """Return the path of the self-contained modeling file, which is copied next to every checkpoint."""
    return Path(__file__).with_name("modeling_moesaic.py")


def code_files(config: Mapping[str, Any]) -> dict[str, str]:
    """Name and text of the code that a checkpoint with this config brings along: none where the family is not ours."""
    if not str(config.get("model_type")).startswith("moesaic_"):
        return {}
    return {modeling_file().name: modeling_file().read_text(encoding="utf-8")}
