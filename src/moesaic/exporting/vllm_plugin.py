"""vLLM plugin (entry point `vllm.general_plugins`): our architectures run in vLLM without `--trust-remote-code`.

They run in vLLM's transformers backend for mixtures of experts. Importing moesaic has made transformers' auto classes
know the configs and models; here vLLM learns the names, and imports nothing before one of them is used.
"""

from moesaic.modeling.names import STEMS

BACKEND = "vllm.model_executor.models.transformers:TransformersMoEForCausalLM"


def register() -> None:
    """Make vLLM's registry know `Moesaic<Base>ForCausalLM` for every base; may run more than once."""
    from vllm import ModelRegistry  # pyright: ignore[reportMissingImports]

    known = ModelRegistry.get_supported_archs()
    for stem in STEMS.values():
        if f"Moesaic{stem}ForCausalLM" not in known:
            ModelRegistry.register_model(f"Moesaic{stem}ForCausalLM", BACKEND)
