"""Positional reads and writes that finish what they start, and renames in one step. Torch-free."""

import ctypes
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moesaic.common.errors import MoesaicError
from moesaic.common.files import explained

_LIBC = ctypes.CDLL(None, use_errno=True)
_FLUSH_ASYNC = 2  # SYNC_FILE_RANGE_WRITE: start writing dirty pages, do not wait


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
