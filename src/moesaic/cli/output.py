"""What the command line prints: results on stdout, everything else on stderr, one document with `--json`."""

import json
import math
import sys
from collections.abc import Iterable, Mapping
from typing import Any


def print_result(lines: Iterable[str], document: Mapping[str, Any], *, as_json: bool) -> None:
    """Print a verb's result: lines for people, or one JSON document."""
    if as_json:
        print_json(document)
    else:
        for line in lines:
            print(line)


def print_json(document: Mapping[str, Any]) -> None:
    """Print one JSON document; numbers that JSON cannot write (NaN, Infinity) become null."""
    print(json.dumps(_finite(document), indent=2, ensure_ascii=False, allow_nan=False, default=str))


def print_error(message: str, *, kind: str = "error", as_json: bool = False) -> None:
    """Print one line on stderr, and with `--json` also a document with the key `error` on stdout."""
    line = " ".join(message.split())
    if as_json:
        print_json({"error": line})
    print(f"moesaic: {kind}: {line}", file=sys.stderr)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
