"""vLLM plugin (entry point `vllm.general_plugins`): our architectures run in vLLM without `--trust-remote-code`.

They run in vLLM's transformers backend for mixtures of experts. Importing moesaic has made transformers' auto classes
know the configs and models; here vLLM learns the names, and imports nothing before one of them is used.

Only bases whose log-probabilities were compared with transformers (`make interop`): the backend silently leaves out the
multipliers of Granite's and Gemma's models, so others must be shown to be right before they are added.
"""

from moesaic.modeling.names import STEMS

BACKEND = "vllm.model_executor.models.transformers:TransformersMoEForCausalLM"

CHECKED = ("llama", "mistral", "qwen2", "qwen3", "olmo2", "olmo3", "smollm3", "phi3")
"""Bases that were found equal."""


def register() -> None:
    """Make vLLM's registry know `Moesaic<Base>ForCausalLM` for the checked bases; may run more than once."""
    from vllm import ModelRegistry  # pyright: ignore[reportMissingImports]

    known = ModelRegistry.get_supported_archs()
    for base in CHECKED:
        name = f"Moesaic{STEMS[base]}ForCausalLM"
        if name not in known:
            ModelRegistry.register_model(name, BACKEND)
