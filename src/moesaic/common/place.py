"""Whether a path can be what a verb writes: one check for every verb, before any work. Torch-free."""

import errno
import os
from pathlib import Path
from typing import Literal

from moesaic.common.errors import MoesaicError

Kind = Literal["folder", "file"]


def check_place(target: str | Path, kind: Kind = "folder") -> Path:
    """The path, absolute; refuses one that can be no output, whatever a verb would do with what is there already.

    Args:
        target: what the user gave.
        kind: what the verb makes there.

    Raises:
        MoesaicError: an empty path, one that ends in `.` or `..`, a device, a path below a file or in a place that
            cannot be written.
    """
    path = Path(target)
    if path.name in ("", ".."):
        said = str(target) if str(target).strip(".") else f"OUT {str(target)!r}"
        raise MoesaicError(f"{said}: not the name of a new {kind}")
    if "\0" in str(path):
        raise MoesaicError(f"OUT {str(target)!r}: has a NUL character, which no path has; choose another name")
    final = path.absolute()
    _refuse_kind(final, path, kind)
    nearest = final if final.is_dir() else next(folder for folder in final.parents if os.path.lexists(folder))
    if not nearest.is_dir():
        raise MoesaicError(f"{path}: {nearest} is a file, not a folder; choose another target")
    space = os.statvfs(nearest)
    if space.f_flag & os.ST_RDONLY:
        raise MoesaicError(f"{path}: the file system of {nearest} is read-only; choose a target on another one")
    if not space.f_blocks:
        raise MoesaicError(f"{path}: {nearest} is not on a disk (it has no space at all); choose another target")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise MoesaicError(f"{path}: permission denied in {nearest}; check who owns it, or choose another folder")
    return final


def _refuse_kind(final: Path, said: Path, kind: Kind) -> None:
    """Refuse what is there and is neither file nor folder, a folder for a file, and names that no disk takes."""
    try:
        os.lstat(final)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        why = "the name is too long" if error.errno == errno.ENAMETOOLONG else error.strerror
        raise MoesaicError(f"{said}: {why}; choose another name") from error
    if final.exists() and not (final.is_file() or final.is_dir()):
        raise MoesaicError(f"{said}: is a device, not a {kind}; choose another target")
    if kind == "file" and final.is_dir():
        raise MoesaicError(f"{said}: is a folder; name a file")
