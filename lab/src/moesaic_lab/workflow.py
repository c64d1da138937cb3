"""Run the graph of an experiment with Snakemake: local processes here, whatever else it can do from its own command."""

import fcntl
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path

from moesaic.checkpoint.pio import explained
from moesaic.common.errors import MoesaicError

SNAKEFILE = "Snakefile"
_LOCK = "lock"


def require_snakemake() -> None:
    """Refuse early where Snakemake is not installed."""
    if importlib.util.find_spec("snakemake") is None:
        raise MoesaicError("lab run needs Snakemake: pip install snakemake")


def run_graph(out: Path, *, jobs: int, quiet: bool) -> None:
    """Run what is left of the experiment in OUT, at most `jobs` steps at once, one thread each.

    Raises:
        MoesaicError: a step failed (its log is named); what other steps have done stays.
    """
    with explained(out):
        source = resources.files("moesaic_lab") / SNAKEFILE
        (out / SNAKEFILE).write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    arguments = [
        *("--directory", str(out), "--snakefile", str(out / SNAKEFILE), "--cores", str(jobs), "--scheduler", "greedy"),
        *("--nolock", "--rerun-incomplete", "--rerun-triggers", "mtime", "--keep-going", "--latency-wait", "1"),
        *(("--quiet", "all") if quiet else ("--quiet", "rules", "host", "reason")),
    ]
    with _alone(out):
        status = _snakemake(arguments)
    if status:
        raise MoesaicError(f"{out}: {_failed(out)}; the same command goes on from there")


def _snakemake(arguments: list[str]) -> int:
    """Run it in this process, so that steps see their experiment end when this process does."""
    from snakemake.cli import main

    try:
        main(arguments)
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    return 0


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Hold OUT against a second run. Snakemake's own lock would outlive a kill."""
    with (out / _LOCK).open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise MoesaicError(f"{out}: another `moesaic lab run` is working in it") from error
        yield


def _failed(out: Path) -> str:
    """The steps that have a log and are not done, with the last line of the first."""
    logs = sorted(log for log in (out / "steps").glob("*.log") if not log.with_suffix(".done").exists())
    if not logs:
        return "the experiment stopped before its first step"
    lines = logs[0].read_text(encoding="utf-8", errors="replace").strip().splitlines()
    names = ", ".join(log.stem for log in logs)
    return f"not finished: {names} (steps/{logs[0].name}: {lines[-1] if lines else 'empty'})"
