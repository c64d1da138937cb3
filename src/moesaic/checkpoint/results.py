"""results.json, which `moesaic eval` leaves with a checkpoint: how it is known, and read by others. Torch-free."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moesaic.checkpoint.headers import load_json
from moesaic.common.errors import MoesaicError

FORMAT = "moesaic-results/1"


def read_results(path: Path) -> dict[str, Any]:
    """Read a results file; one that is none is a MoesaicError."""
    document = load_json(path)
    if document.get("format") != FORMAT:
        raise MoesaicError(f"{path}: not a results file (format is {document.get('format')!r}, expected {FORMAT!r})")
    for key in ("checkpoint", "settings", "versions", "tasks", "missing", "averages"):
        if not isinstance(document.get(key), list if key == "averages" else dict):
            raise MoesaicError(f"{path}: damaged results file: {key!r} is not there; evaluate again")
    return document


def mean_error(errors: Sequence[float | None]) -> float | None:
    """Standard error of the mean of independent scores; None where one of theirs is unknown."""
    known = [error for error in errors if error is not None]
    if not errors or len(known) < len(errors):
        return None
    return math.sqrt(math.fsum(error * error for error in known)) / len(known)
