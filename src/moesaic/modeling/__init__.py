"""The MoE architectures; their classes are imported (with torch and transformers) when they are first used."""

import importlib
from typing import Any

from moesaic.modeling.auto import register
from moesaic.modeling.names import class_names, modeling_file

__all__ = ["class_names", "modeling_file", "register"]


def __getattr__(name: str) -> Any:
    if name.startswith("Moesaic"):
        return getattr(importlib.import_module("moesaic.modeling.modeling_moesaic"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
