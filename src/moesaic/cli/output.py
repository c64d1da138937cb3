"""What the command line prints: results on stdout, everything else on stderr, one document with `--json`."""

import json
import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from moesaic.common.errors import MoesaicError
from moesaic.common.numbers import finite_only

_MOST = 1200
"""Characters of an error: what a damaged file holds may be quoted in it."""


def print_result(lines: Iterable[str], document: Mapping[str, Any], *, as_json: bool) -> None:
    """Print a verb's result: lines for people, or one JSON document."""
    if as_json:
        print_json(document)
    else:
        print_lines(lines)


def print_lines(lines: Iterable[str]) -> None:
    """Print lines on stdout."""
    _write("".join(f"{line}\n" for line in lines))


def print_json(document: Mapping[str, Any]) -> None:
    """Print one JSON document; numbers that JSON cannot write (NaN, Infinity) become null."""
    _write(json.dumps(finite_only(document), indent=2, ensure_ascii=False, allow_nan=False, default=str) + "\n")


def _write(text: str) -> None:
    """Write and flush here, where it is known that it is stdout that fails, and not a file of the work before."""
    try:
        sys.stdout.write(text)
        flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise _stdout_failed(error) from error


def flush() -> None:
    """Flush stdout.

    Raises:
        BrokenPipeError: whoever read it has gone.
        MoesaicError: it cannot be written for another reason.
    """
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise _stdout_failed(error) from error


def discard_stdout() -> None:
    """Let all further output go nowhere; Python must not try to flush it again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _stdout_failed(error: OSError) -> MoesaicError:
    discard_stdout()
    return MoesaicError(f"standard output cannot be written ({error.strerror}); what was made before is complete")


def print_error(message: str, *, kind: str = "error", as_json: bool = False) -> None:
    """Print one line on stderr, and with `--json` also a document with the key `error` on stdout."""
    line = " ".join(message.split())
    if len(line) > _MOST:
        line = f"{line[: _MOST // 2]} ... {line[-_MOST // 2 :]}"
    if as_json:
        print_json({"error": line})
    print(f"moesaic: {kind}: {line}", file=sys.stderr)
