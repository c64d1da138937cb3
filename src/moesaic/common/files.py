"""Small files: read and written whole, and errors of the file system in words. Torch-free."""

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moesaic.common.errors import MoesaicError
from moesaic.common.place import check_place
from moesaic.common.plain import refuse_unwritable

_WAYS_OUT = {
    errno.ENOSPC: "the disk is full; free space, or choose a target on another disk",
    errno.EDQUOT: "the disk quota is used up; free space, or choose a target on another disk",
    errno.EFBIG: "the file is larger than the file system or `ulimit -f` allows; use a smaller --shard-size",
    errno.EACCES: "permission denied; check who owns it, or choose another folder",
    errno.EPERM: "permission denied; check who owns it, or choose another folder",
    errno.EROFS: "the file system is read-only; choose a target on another one",
    errno.ENAMETOOLONG: "the name is too long; choose a shorter one",
}

DISK_ERRORS = frozenset(_WAYS_OUT)
"""errno values that are the user's to solve, not bugs."""


def io_error(path: Path | str, error: OSError) -> MoesaicError:
    """An OSError as one line that names the file and the way out."""
    return MoesaicError(f"{path}: {_WAYS_OUT.get(error.errno or 0) or error.strerror or error}")


@contextmanager
def explained(path: Path | str) -> Iterator[None]:
    """Turn any OSError of the block into a MoesaicError about `path`."""
    try:
        yield
    except OSError as error:
        raise io_error(path, error) from error


def write_file(path: Path, text: str | bytes) -> None:
    """Write a small file in one step, its folders too: a reader sees the old one or the new one, never half of it."""
    data = text.encode() if isinstance(text, str) else text
    aside = path.with_name(f".{path.name}.moesaic-{os.getpid()}-tmp")
    with explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with aside.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)


_START_BYTES = 200


def check_file(path: str | Path, *, replaces: str) -> None:
    """Refuse (MoesaicError) what `write_file` would refuse, for results that take long to compute.

    And a file that is there and is something else: `replaces` is what the start of one of ours has, `"moesaic-..."`.
    """
    path = check_place(path, "file")
    if path.exists():
        with explained(path), path.open("rb") as file:
            start = file.read(_START_BYTES)
        if replaces.encode() not in start:
            raise MoesaicError(f"{path}: exists and is no {replaces.partition('/')[0]} file; name another file")


def load_json(path: Path, *, halves: bool = False) -> dict[str, Any]:
    """A JSON object from a file; a MoesaicError names the file when it isn't one. `halves`: see `refuse_unwritable`."""
    try:
        value = json.loads(path.read_bytes().decode("utf-8-sig"))
    except FileNotFoundError as error:
        raise MoesaicError(f"{path}: no such file") from error
    except OSError as error:
        raise MoesaicError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise MoesaicError(f"{path}: not UTF-8 (byte {error.start}); save it as UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise MoesaicError(f"{path}: not JSON ({' '.join(str(error).split())})") from error
    if not isinstance(value, dict):
        raise MoesaicError(f"{path}: not a JSON object")
    refuse_unwritable(value, str(path), halves=halves)
    return value
