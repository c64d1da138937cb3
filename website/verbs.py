"""For the API reference: a verb's signature and docstring as Python has them, made from its recipe class by `@verb`."""

import importlib
import inspect
from typing import Any

import griffe


class Verbs(griffe.Extension):
    """Takes what is read from the source of a verb for what the imported function says of itself."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Replace parameters and docstring of a verb."""
        if not any(str(decorator.value).startswith("verb(") for decorator in func.decorators):
            return
        public = getattr(importlib.import_module(func.module.path), func.name)
        func.docstring = griffe.Docstring(public.__doc__, parent=func, parser="google")
        func.parameters = griffe.Parameters(*map(_parameter, inspect.signature(public).parameters.values()))


def _parameter(one: inspect.Parameter) -> griffe.Parameter:
    required = one.default is inspect.Parameter.empty
    return griffe.Parameter(
        one.name,
        kind=griffe.ParameterKind(one.kind.description),
        annotation=inspect.formatannotation(one.annotation).replace("moesaic.", "").replace("typing.", ""),
        default=None if required else repr(one.default),
    )
