"""The type checker that conftest gives to jaxtyping: it looks at annotations of tensor shapes and nothing else.

Everything else is pyright's to check. At run time beartype would refuse to look at imports made for type checkers only,
at `Self` and at protocols, all of which are fine in the package.
"""

import re
from collections.abc import Callable
from typing import Any

from beartype import beartype

_SHAPE = re.compile(r"jaxtyping|\b(Float|Int|Bool|Integer|Inexact|Num|Shaped|Real|U?Int\d+|B?Float\d+)\[")


def check_shapes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` with checks of its arguments and result whose annotations are jaxtyping's."""
    hints = dict(function.__annotations__)
    shapes = {
        name: hint for name, hint in hints.items() if _SHAPE.search(hint if isinstance(hint, str) else repr(hint))
    }
    if not shapes:
        return function
    function.__annotations__ = shapes
    checked = beartype(function)
    function.__annotations__ = hints
    checked.__annotations__ = hints
    return checked
