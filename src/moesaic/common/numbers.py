"""Numbers that are measured or absent: None in data and a dash for people where one is not finite."""

import math
from collections.abc import Mapping
from typing import Any

from moesaic.common.errors import MoesaicError

CHECK_FAILED = 1


class NotFiniteError(MoesaicError):
    """A model gives NaN or infinity, so there is no result; names the layer and the module. Exit status 1."""

    status = CHECK_FAILED


def finite_only(value: Any) -> Any:
    """Plain values with None for every number that JSON does not have: NaN and the infinities."""
    if isinstance(value, Mapping):
        return {str(key): finite_only(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite_only(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def is_measured(value: Any) -> bool:
    """Whether a value of a document is a number; NaN, which Python's JSON takes, is none."""
    return isinstance(value, int | float) and math.isfinite(value)


def shown(value: float | None, form: str) -> str:
    """A number in a format, or a dash for one that was not measured.

    >>> shown(0.5, ".2f"), shown(float("nan"), ".2f"), shown(None, ".2f")
    ('0.50', '-', '-')
    """
    return "-" if value is None or not math.isfinite(value) else format(value, form)
