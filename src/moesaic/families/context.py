"""How far a model reaches, by its config. Torch-free."""

from typing import Any


def trained_context(config: Any) -> int | None:
    """Most positions that a model (a config of transformers) was trained for; None where its config does not say."""
    reach = getattr(config.get_text_config(), "max_position_embeddings", None)
    return reach if reach and reach > 0 else None
