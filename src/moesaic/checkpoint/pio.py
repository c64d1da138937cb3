"""Positional reads and writes that finish what they start, and errors of the file system in words. Torch-free."""

import ctypes
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moesaic.common.errors import MoesaicError
from moesaic.common.place import check_place

_LIBC = ctypes.CDLL(None, use_errno=True)
_FLUSH_ASYNC = 2  # SYNC_FILE_RANGE_WRITE: start writing dirty pages, do not wait

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


@contextmanager
def opened(file: Path) -> Iterator[int]:
    """An open file descriptor for reading; a file that is gone since its header was read is a MoesaicError."""
    try:
        fd = os.open(file, os.O_RDONLY)
    except FileNotFoundError as error:
        raise MoesaicError(f"{file}: not on this machine; download the checkpoint first") from error
    except OSError as error:
        raise MoesaicError(f"{file}: cannot be read ({error.strerror})") from error
    try:
        yield fd
    finally:
        os.close(fd)


def read_into(fd: int, view: memoryview, offset: int, path: Path) -> None:
    """Fill `view` (bytes) from `offset` of an open file; one call may return less than asked (2 GiB at most)."""
    with explained(path):
        while len(view):
            count = os.preadv(fd, [view], offset)
            if count == 0:
                raise MoesaicError(f"{path}: ends early, it was cut while it was being read; fetch the file again")
            view = view[count:]
            offset += count


def write_all(fd: int, view: memoryview, offset: int, path: Path) -> None:
    """Write all of `view` (bytes) at `offset`; one call may write less than asked."""
    with explained(path):
        while len(view):
            count = os.pwrite(fd, view, offset)
            view = view[count:]
            offset += count


def allocate(fd: int, size: int, path: Path) -> None:
    """Make an open empty file `size` bytes long and reserve its blocks, so that a full disk shows at once.

    Calls fallocate(2) itself: where the file system cannot do it, posix_fallocate would write every block instead.
    """
    with explained(path):
        fallocate = getattr(_LIBC, "fallocate", None)
        if fallocate is None:
            return os.ftruncate(fd, size)
        fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
        if size and fallocate(fd, 0, 0, size) != 0:
            code = ctypes.get_errno()
            if code not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
                raise OSError(code, os.strerror(code))
            os.ftruncate(fd, size)
        return None


def start_flush(fd: int) -> None:
    """Start writing a file to disk without waiting, so that the fsync at the end finds little left to do (a hint)."""
    sync_file_range = getattr(_LIBC, "sync_file_range", None)
    if sync_file_range is not None:
        sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
        sync_file_range(fd, 0, 0, _FLUSH_ASYNC)  # a length of 0 is the whole file


def sync_path(path: Path) -> None:
    """fsync a file or a folder (which makes the names in it durable)."""
    with explained(path):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


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


def exchange(first: Path, second: Path) -> bool:
    """Swap two paths in one step (renameat2 RENAME_EXCHANGE); False where kernel or file system cannot."""
    return _renameat2(first, second, 2)


def rename_new(source: Path, target: Path) -> None:
    """Rename in one step; FileExistsError when `target` exists (RENAME_NOREPLACE).

    Where renameat2 doesn't work, plain rename: it still refuses to replace a folder that isn't empty, and a file.
    """
    if not _renameat2(source, target, 1):
        source.rename(target)


def _renameat2(source: Path, target: Path, flags: int) -> bool:
    renameat2 = getattr(_LIBC, "renameat2", None)
    if renameat2 is None:
        return False
    renameat2.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    at_cwd = -100
    if renameat2(at_cwd, os.fsencode(source), at_cwd, os.fsencode(target), flags) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), str(source), None, str(target))
