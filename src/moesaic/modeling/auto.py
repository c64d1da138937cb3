"""Make transformers' auto classes, and vLLM, know the MoE architectures, importing none of them before it is used.

``AutoConfig.register`` and ``AutoModel.register`` want classes, so using them would import torch, generation and every
base family whenever a program merely loads a tokenizer (two seconds). transformers' own mappings hold names instead and
import a module when a name is looked up; the entries below are of that kind, and the module is ``moesaic.modeling``.
"""

import sys
from types import ModuleType

from wrapt import register_post_import_hook

from moesaic.families.dense_table import FAMILIES
from moesaic.modeling.names import AUTO_CLASSES, MOE_BASES, STEMS

_AUTO = "transformers.models.auto"


def register() -> None:
    """Register the architectures as soon as transformers' auto classes are imported, or now if they already are."""
    register_post_import_hook(_register_configs, f"{_AUTO}.configuration_auto")
    register_post_import_hook(_register_models, f"{_AUTO}.modeling_auto")


def _stems() -> dict[str, str]:
    """Base -> stem of its class names; of a base with experts it is transformers' own."""
    known = sys.modules[f"{_AUTO}.configuration_auto"].CONFIG_MAPPING_NAMES
    return STEMS | {base: known[base].removesuffix("Config") for base in MOE_BASES if base in known}


def _register_configs(configuration_auto: ModuleType) -> None:
    mapping = configuration_auto.CONFIG_MAPPING
    for base, stem in _stems().items():
        model_type = f"moesaic_{base}"
        configuration_auto.CONFIG_MAPPING_NAMES[model_type] = f"Moesaic{stem}Config"
        mapping._modules[model_type] = sys.modules["moesaic.modeling"]


def _register_models(modeling_auto: ModuleType) -> None:
    for auto, kind in AUTO_CLASSES.items():
        if auto == "AutoConfig":
            continue
        mapping = getattr(modeling_auto, auto)._model_mapping
        names = mapping._model_mapping
        for base, stem in _stems().items():
            model_type = f"moesaic_{base}"
            names[model_type] = f"Moesaic{stem}{kind}"
            mapping._modules[model_type] = sys.modules["moesaic.modeling"]
            mapping._reverse_config_mapping[f"Moesaic{stem}Config"] = model_type


_VLLM_BACKEND = "vllm.model_executor.models.transformers:TransformersMoEForCausalLM"


def register_in_vllm() -> None:
    """vLLM plugin (entry point `vllm.general_plugins`): our architectures run there without `--trust-remote-code`.

    They run in vLLM's transformers backend for mixtures of experts, which learns their names here and imports nothing
    before one of them is used; may run more than once. Only bases whose log-probabilities were compared with
    transformers (`make interop`): the backend silently leaves out the multipliers of Granite's and Gemma's models, so
    others must be shown to be right before their row says so.
    """
    from vllm import ModelRegistry  # pyright: ignore[reportMissingImports]

    known = ModelRegistry.get_supported_archs()
    for row in FAMILIES.values():
        name = f"Moesaic{row.stem}ForCausalLM"
        if row.in_vllm and name not in known:
            ModelRegistry.register_model(name, _VLLM_BACKEND)
