"""An output folder that is absent or complete, whatever happens on the way. Torch-free.

The folder is built under a hidden name beside the target, `.NAME.moesaic-<pid>-<start>-<host>-tmp`, synced, and
renamed. The name says who builds it, and its owner holds a lock (flock) on it, so that a later run can tell a dead
run's leftovers, which it removes, from a live run's, which it leaves alone.

Replacing (`overwrite`) swaps both folders in one step with renameat2(RENAME_EXCHANGE). Where kernel or file system
cannot (NFS, for one), the old folder is renamed to `...-old` first: a kill between the two renames leaves no target,
but the complete old folder under that name, and the next run puts it back.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import shutil
import signal
import socket
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from moesaic.checkpoint.pio import exchange, rename_new, sync_path
from moesaic.common.errors import MoesaicError
from moesaic.common.files import DISK_ERRORS, explained, io_error
from moesaic.common.place import check_place

_REPLACEABLE = ("config.json", "moesaic.json", "inspection.json")
_LEFTOVER = re.compile(
    r"\.(?P<name>.+)\.moesaic-(?P<pid>\d+)-(?P<start>\d+)-(?P<host>[0-9a-f]{8})-(?P<kind>tmp|old|scratch)"
)


@contextmanager
def output_folder(target: str | Path, overwrite: bool = False, *, sources: Iterable[Path] = ()) -> Iterator[Path]:
    """Yield an empty folder to fill; it becomes `target` when the block ends, and is removed when the block fails.

    Refuses (MoesaicError) before anything is written: a target that exists (unless `overwrite`, and then one that is
    not a checkpoint), one inside, equal to or around one of the `sources` folders, one that another run is writing, a
    parent that cannot be written. Errors of the disk inside the block become MoesaicErrors; SIGTERM and SIGHUP clean
    up as Ctrl-C does. `overwrite` needs space for the old and the new folder at once.
    """
    final = check_target(target, overwrite, sources=sources)
    with _beside(final):
        _refuse_existing(final, overwrite)  # again: an interrupted swap may have been undone
        yield from _build(final, overwrite)


@contextmanager
def scratch_folder(target: str | Path) -> Iterator[Path]:
    """Yield an empty folder beside `target` for what is needed on the way to it, and remove it when the block ends.

    What a killed run leaves of it, the next run for this target removes, as it does with unfinished outputs.
    """
    final = check_target(target, overwrite=True)
    with _beside(final), _own_folder(final, "scratch") as mine:
        yield mine


@contextmanager
def _beside(final: Path) -> Iterator[None]:
    """Make the parents and clear what dead runs left there; parents that are made are removed when the block fails."""
    made = _make_parents(final.parent)
    try:
        _clear_leftovers(final)
        with _signals_raise():
            yield
    except BaseException:
        _remove_empty(made)
        raise


@contextmanager
def _own_folder(final: Path, kind: str) -> Iterator[Path]:
    """Yield an empty folder beside `final` that this process has locked; what has its name at the end is removed."""
    mine = _own_name(final, kind)
    with explained(final):
        mine.mkdir()
    try:
        with _locked(mine):
            yield mine
    finally:
        shutil.rmtree(mine, ignore_errors=True)


def _build(final: Path, overwrite: bool) -> Iterator[Path]:
    try:
        with _own_folder(final, "tmp") as mine:  # after a swap this is the old folder, on errors the unfinished one
            yield mine
            _sync_tree(mine)
            _commit(mine, final, overwrite)
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        raise io_error(error.filename or final, error) from error


def require_disk(path: str | Path, nbytes: int) -> None:
    """Refuse (MoesaicError) when the disk of `path`, which need not exist yet, has less than `nbytes` bytes free."""
    existing = Path(path).absolute()
    while not existing.exists():
        existing = existing.parent
    with explained(existing):
        usage = shutil.disk_usage(existing)
    free = usage.free
    if not usage.total:
        raise MoesaicError(f"{path}: {existing} is not on a disk (it has no space at all); choose another target")
    if free < nbytes:
        raise MoesaicError(
            f"{path}: needs {_readable(nbytes)} of disk, {_readable(free)} are free; free space or choose another disk"
        )


def _readable(nbytes: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes} bytes"


def check_target(target: str | Path, overwrite: bool = False, *, sources: Iterable[Path] = ()) -> Path:
    """The absolute target without links; refuses (MoesaicError) what `output_folder` refuses without writing."""
    check_place(target)
    target = Path(target)
    final = target.resolve() if overwrite else target.parent.resolve() / target.name
    for source in sources:
        folder = Path(source).resolve()
        if final == folder:
            raise MoesaicError(f"{target}: is the source itself; choose another target")
        if final.is_relative_to(folder):
            raise MoesaicError(f"{target}: lies inside the source {source}; choose a target beside it")
        if folder.is_relative_to(final):
            raise MoesaicError(f"{target}: contains the source {source}; choose another target")
    _refuse_existing(final, overwrite)
    return final


def _refuse_existing(final: Path, overwrite: bool) -> None:
    if not os.path.lexists(final):
        return
    if not overwrite:
        raise MoesaicError(f"{final}: exists; choose another target, or pass --overwrite to replace it")
    if not final.is_dir():
        raise MoesaicError(f"{final}: is a file, which --overwrite does not replace; choose another target")
    with explained(final):
        names = {path.name for path in final.iterdir()}
    if names and names.isdisjoint(_REPLACEABLE):
        raise MoesaicError(
            f"{final}: is not a checkpoint (no config.json) or an inspection, so --overwrite does not replace it; "
            "remove it"
        )


def _make_parents(parent: Path) -> list[Path]:
    """Create missing parents; returns those created, innermost first."""
    missing = [folder for folder in (parent, *parent.parents) if not folder.exists()]
    with explained(parent):
        parent.mkdir(parents=True, exist_ok=True)
    return missing


def _remove_empty(folders: list[Path]) -> None:
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


def _own_name(final: Path, kind: str) -> Path:
    pid = os.getpid()
    return final.with_name(f".{final.name}.moesaic-{pid}-{_start_time(pid) or 0}-{_host()}-{kind}")


def _host() -> str:
    return hashlib.blake2s(socket.gethostname().encode(), digest_size=4).hexdigest()


def _start_time(pid: int) -> int | None:
    """Clock ticks from boot to the start of a living process; None for a dead one (or where there's no /proc)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = stat[stat.rindex(b")") + 2 :].split()  # the command's name before it may hold anything
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def _clear_leftovers(final: Path) -> None:
    """Remove what dead runs for this target left; refuse while a live one is writing it.

    A folder from another machine (a shared disk) whose lock is free can be neither: it is left alone.
    """
    with explained(final.parent):
        found = [(path, _LEFTOVER.fullmatch(path.name)) for path in final.parent.iterdir()]
    for path, match in found:
        if match is None or match["name"] != final.name or path == _own_name(final, "scratch"):
            continue
        if _lock_held(path) or (match["host"] == _host() and _start_time(int(match["pid"])) == int(match["start"])):
            raise MoesaicError(f"{final}: process {match['pid']} is writing it; wait for it, or choose another target")
        if match["host"] != _host():
            continue
        if match["kind"] == "old" and not os.path.lexists(final):
            with explained(final):
                rename_new(path, final)
        else:
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a lock on a folder that ends with this process, where the file system has locks."""
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)


def _lock_held(folder: Path) -> bool:
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(fd)
    return False


def _sync_tree(folder: Path) -> None:
    for parent, _, files in os.walk(folder):
        for name in files:
            sync_path(Path(parent, name))
        sync_path(Path(parent))


def _commit(mine: Path, final: Path, overwrite: bool) -> None:
    try:
        if not (overwrite and final.exists()):
            rename_new(mine, final)
        elif not exchange(mine, final):
            _swap_in_two_steps(mine, final)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            raise MoesaicError(f"{final}: appeared while this run was writing; it is left as it is") from error
        raise
    sync_path(final.parent)


def _swap_in_two_steps(mine: Path, final: Path) -> None:
    old = _own_name(final, "old")
    final.rename(old)
    try:
        mine.rename(final)
    except BaseException:
        old.rename(final)
        raise
    sync_path(final.parent)
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Make SIGTERM and SIGHUP unwind the stack (SystemExit), unless somebody handles them already."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    changed = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) == signal.SIG_DFL]
    for number in changed:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in changed:
            signal.signal(number, signal.SIG_DFL)
