import errno
import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from moesaic.checkpoint import output, pio
from moesaic.checkpoint.output import output_folder, require_disk
from moesaic.common.errors import MoesaicError
from tests.tiny_files import in_child


def fill(folder: Path, text: str = "new") -> None:
    (folder / "config.json").write_text(text)
    (folder / "sub").mkdir()
    (folder / "sub" / "x").write_text(text)


def build(target: Path, text: str = "new", overwrite: bool = False, sources: tuple[Path, ...] = ()) -> None:
    with output_folder(target, overwrite, sources=sources) as folder:
        assert folder.parent == target.parent.resolve()
        assert folder.name.startswith(f".{target.name}.moesaic-{os.getpid()}-")
        assert folder.name.endswith("-tmp")
        fill(folder, text)


def refused(target: Path, *parts: str, **options: object) -> None:
    before = names(target.parent)
    with pytest.raises(MoesaicError) as caught:
        build(target, **options)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    assert all(part in str(caught.value) for part in parts), str(caught.value)
    assert names(target.parent) == before


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def test_success_leaves_only_the_target(tmp_path: Path) -> None:
    build(tmp_path / "out")
    assert names(tmp_path) == ["out"]
    assert (tmp_path / "out" / "sub" / "x").read_text() == "new"


def test_parents_are_made_and_unmade(tmp_path: Path) -> None:
    build(tmp_path / "a" / "b" / "out")
    assert (tmp_path / "a" / "b" / "out" / "config.json").exists()
    with pytest.raises(KeyError):
        fail_inside(tmp_path / "c" / "d" / "out", KeyError)
    assert names(tmp_path) == ["a"]


def fail_inside(target: Path, error: type[BaseException], overwrite: bool = False) -> None:
    with output_folder(target, overwrite) as folder:
        fill(folder)
        raise error


@pytest.mark.parametrize("error", [ValueError, MoesaicError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("overwrite", [False, True])
def test_errors_leave_what_was_there(overwrite: bool, error: type[BaseException], tmp_path: Path) -> None:
    if overwrite:
        build(tmp_path / "out", "old")
    with pytest.raises(error):
        fail_inside(tmp_path / "out", error, overwrite)
    assert names(tmp_path) == (["out"] if overwrite else [])
    if overwrite:
        assert (tmp_path / "out" / "config.json").read_text() == "old"


def test_existing_targets(tmp_path: Path) -> None:
    build(tmp_path / "out", "old")
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.tex").touch()
    for name in ("out", "file", "empty", "dangling", "precious"):
        refused(tmp_path / name, str(tmp_path / name), "--overwrite")
    refused(tmp_path / "file", "is a file", overwrite=True)
    refused(tmp_path / "precious", "not a checkpoint", overwrite=True)
    build(tmp_path / "empty", overwrite=True)
    build(tmp_path / "out", overwrite=True)
    assert (tmp_path / "out" / "config.json").read_text() == "new"
    assert names(tmp_path) == ["dangling", "empty", "file", "out", "precious"]


def test_overwriting_through_a_link_replaces_the_folder_behind_it(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    build(tmp_path / "disk" / "real", "old")
    (tmp_path / "out").symlink_to("disk/real")
    with output_folder(tmp_path / "out", True) as folder:
        assert folder.parent == tmp_path / "disk"
        fill(folder)
    assert (tmp_path / "out").is_symlink()
    assert (tmp_path / "disk" / "real" / "config.json").read_text() == "new"
    assert names(tmp_path / "disk") == ["real"]


def test_target_and_sources_must_be_apart(tmp_path: Path) -> None:
    build(tmp_path / "src", "old")
    source = (tmp_path / "src",)
    (tmp_path / "link").symlink_to("src")
    for overwrite in (False, True):
        refused(tmp_path / "src", "source itself", overwrite=overwrite, sources=source)
        refused(tmp_path / "src" / "out", "inside the source", overwrite=overwrite, sources=source)
        refused(tmp_path / "link" / "out", "inside the source", overwrite=overwrite, sources=source)
        refused(tmp_path / "x" / ".." / "src" / "out", "inside", overwrite=overwrite, sources=source)
        refused(tmp_path, "contains the source", overwrite=overwrite, sources=source)
    refused(tmp_path / "link", "source itself", overwrite=True, sources=source)
    build(tmp_path / "src2", sources=source)
    refused(Path("/"), "not the name")


def test_swap_without_renameat2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pio, "_renameat2", lambda *_: False)
    build(tmp_path / "out", "old")
    build(tmp_path / "out", "new", overwrite=True)
    assert (tmp_path / "out" / "config.json").read_text() == "new"
    assert names(tmp_path) == ["out"]


def test_exchange_is_one_step_here(tmp_path: Path) -> None:
    """The kernel of the test machine has renameat2; where it is missing the fallback above is what runs."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "x").touch()
    if not pio.exchange(tmp_path / "a", tmp_path / "b"):
        pytest.skip("this file system has no RENAME_EXCHANGE")
    assert names(tmp_path / "b") == ["x"]
    with pytest.raises(FileExistsError):
        pio.rename_new(tmp_path / "a", tmp_path / "b")


def test_second_writer_in_one_process_is_refused(tmp_path: Path) -> None:
    with output_folder(tmp_path / "out") as folder:
        fill(folder)
        with pytest.raises(MoesaicError, match=f"process {os.getpid()} is writing it"):
            build(tmp_path / "out")
        build(tmp_path / "other")
    assert names(tmp_path) == ["other", "out"]


def test_target_that_appears_meanwhile_wins(tmp_path: Path) -> None:
    def race() -> None:
        with output_folder(tmp_path / "out") as folder:
            fill(folder)
            (tmp_path / "out").mkdir()
            (tmp_path / "out" / "other").touch()

    with pytest.raises(MoesaicError, match="appeared while"):
        race()
    assert names(tmp_path) == ["out"]
    assert names(tmp_path / "out") == ["other"]


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_leftovers_of_dead_runs_of_this_target_go(tmp_path: Path) -> None:
    host, pid, mine = output._host(), dead_pid(), output._start_time(os.getpid())
    dead = [
        f".out.moesaic-{pid}-77-{host}-tmp",
        f".out.moesaic-{pid}-78-{host}-scratch",
        f".out.moesaic-{os.getpid()}-{(mine or 0) + 1}-{host}-tmp",
    ]
    kept = [
        f".other.moesaic-{pid}-77-{host}-tmp",  # another target
        f".out.moesaic-{pid}-77-00000000-tmp",  # another machine, perhaps alive
        ".out.moesaic-notes",
        ".out",
    ]
    for name in dead + kept:
        (tmp_path / name).mkdir()
        (tmp_path / name / "part").touch()
    build(tmp_path / "out")
    assert names(tmp_path) == sorted([*kept, "out"])


def test_live_run_is_left_alone(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        start = output._start_time(process.pid)
        name = f".out.moesaic-{process.pid}-{start}-{output._host()}-tmp"
        (tmp_path / name).mkdir()
        for overwrite in (False, True):
            refused(tmp_path / "out", f"process {process.pid}", overwrite=overwrite)
    finally:
        process.kill()
        process.wait()
    build(tmp_path / "out")
    assert names(tmp_path) == ["out"]


def test_lock_protects_where_process_numbers_cannot(tmp_path: Path) -> None:
    """Another container has other process numbers, but the same locks."""
    folder = tmp_path / f".out.moesaic-{dead_pid()}-77-{output._host()}-tmp"
    folder.mkdir()
    with output._locked(folder):
        refused(tmp_path / "out", "is writing it")
    build(tmp_path / "out")
    assert names(tmp_path) == ["out"]


def test_interrupted_swap_is_undone(tmp_path: Path) -> None:
    """Killed between the two renames of the fallback: the old checkpoint comes back, then refuses or is replaced."""
    host, pid = output._host(), dead_pid()
    for text, overwrite in (("old", False), ("new", True)):
        base = tmp_path / text
        base.mkdir()
        fill_old, fill_new = base / f".out.moesaic-{pid}-7-{host}-old", base / f".out.moesaic-{pid}-7-{host}-tmp"
        fill_old.mkdir()
        fill(fill_old, "old")
        fill_new.mkdir()
        if overwrite:
            build(base / "out", "new", overwrite=True)
        else:
            with pytest.raises(MoesaicError, match="exists"):
                build(base / "out")
        assert names(base) == ["out"]
        assert (base / "out" / "config.json").read_text() == text


DISK = [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EROFS]


@pytest.mark.parametrize("code", DISK)
def test_disk_errors_are_one_line_and_leave_nothing(code: int, tmp_path: Path) -> None:
    def full() -> None:
        with output_folder(tmp_path / "out") as folder:
            fill(folder)
            raise OSError(code, os.strerror(code), str(folder / "x"))

    with pytest.raises(MoesaicError, match=r"out.*/x: ") as caught:
        full()
    assert "\n" not in str(caught.value)
    assert names(tmp_path) == []


def test_other_os_errors_stay_bugs(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        fail_inside(tmp_path / "out", FileNotFoundError)
    assert names(tmp_path) == []


def test_parent_is_a_file_or_name_too_long(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused(tmp_path / "file" / "out", "file")
    refused(tmp_path / ("n" * 240), "too long")


def as_nobody() -> None:
    if os.getuid() == 0:
        os.setgid(65534)
        os.setuid(65534)


def test_read_only_parent(tmp_path: Path) -> None:
    parent = tmp_path / "locked"
    parent.mkdir()
    below_tmp = [folder for folder in tmp_path.parents if folder.name.startswith(("pytest-", "popen-"))]
    for folder in (tmp_path, *below_tmp):
        folder.chmod(0o755)

    def attempt() -> None:
        as_nobody()
        build(parent / "out")

    for mode in (0o555, 0o000):  # not writable; not even to be looked into
        parent.chmod(mode)
        assert "permission denied" in in_child(attempt)
    parent.chmod(0o700)
    assert names(parent) == []


def test_file_size_limit_in_the_writer(tmp_path: Path) -> None:
    from moesaic.checkpoint.writer import CheckpointWriter, OutputTensor, plan_files

    layout = plan_files([OutputTensor(name="t", dtype="F32", shape=(1000, 1000))])

    def attempt() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        with output_folder(tmp_path / "out") as folder, CheckpointWriter(folder, layout):
            pass

    message = in_child(attempt)
    assert "ulimit -f" in message
    assert "model.safetensors" in message
    assert names(tmp_path) == []


def test_full_file_system(tmp_path: Path) -> None:
    """A real ENOSPC, from a tmpfs of 1 MiB."""
    from moesaic.checkpoint.writer import CheckpointWriter, OutputTensor, plan_files

    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs the right to mount")
    layout = plan_files([OutputTensor(name="t", dtype="F32", shape=(1000, 1000))])

    def weights() -> None:
        with output_folder(disk / "out") as folder, CheckpointWriter(folder, layout):
            pass

    def side_file() -> None:
        with output_folder(disk / "out") as folder:
            (folder / "x").write_bytes(bytes(2 << 20))

    try:
        for action in (weights, side_file):
            with pytest.raises(MoesaicError, match="disk is full"):
                action()
            assert names(disk) == []
        with pytest.raises(MoesaicError, match=r"needs 2.1 MB of disk, 1.0 MB are free"):
            require_disk(disk / "deep" / "out", 2 << 20)
        require_disk(disk / "out", 1 << 19)
        assert names(disk) == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_require_disk(tmp_path: Path) -> None:
    require_disk(tmp_path / "not" / "there", 1)
    with pytest.raises(MoesaicError, match=r"out: needs 1000000000\.0 GB of disk"):
        require_disk(tmp_path / "out", 10**18)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_signals_clean_up(number: signal.Signals, tmp_path: Path) -> None:
    code = (
        "import signal, sys, time\n"
        "from moesaic.checkpoint.output import output_folder\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background job inherits SIG_IGN
        "with output_folder(sys.argv[1]) as folder:\n"
        "    (folder / 'x').touch()\n"
        "    print('ready', flush=True)\n"
        "    for _ in range(6000):\n"  # a signal just before one long sleep would be seen only after it
        "        time.sleep(0.01)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "out")], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == b"ready\n"
        assert len(names(tmp_path)) == 1
        process.send_signal(number)
        assert process.wait(30) == (-number if number == signal.SIGINT else 128 + number)
    assert names(tmp_path) == []


def test_handlers_are_put_back_and_threads_work(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    build(tmp_path / "out")
    assert signal.getsignal(signal.SIGTERM) == before
    thread = threading.Thread(target=build, args=(tmp_path / "threaded",))
    thread.start()
    thread.join()
    assert names(tmp_path) == ["out", "threaded"]


def test_a_file_on_the_way_to_the_target_is_named(tmp_path: Path) -> None:
    (tmp_path / "mk.py").write_text("")
    for target in (tmp_path / "mk.py" / "x", tmp_path / "mk.py" / "x" / "y"):
        with pytest.raises(MoesaicError, match=r"mk\.py is a file, not a folder"), output_folder(target):
            pass


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a file system without any space")
def test_a_target_that_is_on_no_disk() -> None:
    with pytest.raises(MoesaicError, match=r"/proc/x: /proc is not on a disk"):
        require_disk("/proc/x", 1)
