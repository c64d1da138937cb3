"""`lab run`: check, write the plan, let Snakemake run it. `python -m moesaic_lab.workflow STEP` runs one step."""

import fcntl
import importlib.util
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from moesaic.common.errors import MoesaicError, suggest
from moesaic.common.files import explained, write_file
from moesaic.common.place import check_place
from moesaic.common.progress import notice
from moesaic_lab.plan import ENVIRONMENT, Step, check_folder, read_plan, write_plan

SNAKEFILE = "Snakefile"
_LOCK = "lock"
_WATCH_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class LabResult:
    """What `lab run` says."""

    lines: list[str]
    summary: dict[str, Any]
    """For `--json`."""


def run_experiment(
    name: str,
    out: Path,
    *,
    data: Path | None = None,
    scale: str | Path = "tiny",
    seeds: int = 3,
    jobs: int = 1,
    dry_run: bool = False,
    quiet: bool = False,
) -> LabResult:
    """Run an experiment in `out`, or what is left of it.

    Args:
        name: a name from `EXPERIMENTS`.
        out: folder of everything.
        data: folder with DOMAIN.train.jsonl and DOMAIN.valid.jsonl; None is the generated domains.
        scale: tiny, small, papers, or a YAML file.
        seeds: repetitions.
        jobs: processes at once.
        dry_run: check everything and say what would run.
        quiet: no progress.

    Raises:
        MoesaicError: wrong arguments, another experiment in `out`, a step that failed.
    """
    from moesaic_lab.experiments import EXPERIMENTS
    from moesaic_lab.report import MARKDOWN_FILE, RESULTS_FILE, find
    from moesaic_lab.scale import load_scale

    check_place(out)
    if name not in EXPERIMENTS:
        raise MoesaicError(f"lab run {name}: no such experiment; {suggest(name, EXPERIMENTS)}")
    for flag, value in (("--seeds", seeds), ("--jobs", jobs)):
        if value < 1:
            raise MoesaicError(f"{flag} {value}: must be at least 1")
    folder = None if data is None else _data_folder(data)
    if importlib.util.find_spec("snakemake") is None:
        raise MoesaicError("lab run needs Snakemake: pip install snakemake")
    plan = EXPERIMENTS[name].plan(load_scale(scale), folder, seeds)
    check_folder(plan, out)
    for line in plan.notices:
        notice(f"lab run {name}: {line}", quiet=quiet)
    files = {"results": out / RESULTS_FILE, "report": out / MARKDOWN_FILE}
    summary = {"out": str(out), "experiment": name, "steps": len(plan.steps)}
    summary |= {kind: str(file) for kind, file in files.items()}
    if dry_run:
        steps = f"{len(plan.steps)} steps: {', '.join(step.name for step in plan.steps)}"
        return LabResult(lines=[steps], summary=summary)
    write_plan(plan, out)
    run_graph(out, jobs=jobs, quiet=quiet)
    return LabResult(lines=[find(out).heading, f"{files['report']}, {files['results']}"], summary=summary)


def _data_folder(data: Path) -> str:
    from moesaic_lab.runs import domains_of

    if not data.is_dir():
        raise MoesaicError(f"--data {data}: no such folder")
    domains = domains_of(str(data))
    if len(domains) < 2:
        raise MoesaicError(
            f"--data {data}: has {len(domains)} domains; at least 2 are needed, DOMAIN.train.jsonl with "
            "DOMAIN.valid.jsonl each"
        )
    return str(data.resolve())


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


def run_step(step: Step) -> int:
    """Run its commands in this process; the exit status is that of the first that fails, or 0."""
    from moesaic.cli.app import run

    for command in step.commands:
        print(f"$ moesaic {shlex.join(command)}", flush=True)
        if status := run(command):
            return status
    return 0


def cpu_seconds_file(out: Path, name: str) -> Path:
    """Where a finished step leaves its processor time: Snakemake's own figure lacks up to half a minute."""
    return out / "steps" / f"{name}.cpu"


def _end_with_parent() -> None:
    """Let SIGTERM end this process once whoever started it is gone, so that no step outlives a killed experiment."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_WATCH_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    """Find the step in plan.json of this folder and run it."""
    os.environ.update(ENVIRONMENT)
    _end_with_parent()
    steps = {step.name: step for step in read_plan(Path()).steps}
    status = run_step(steps[sys.argv[1]])
    if not status:
        write_file(cpu_seconds_file(Path(), sys.argv[1]), f"{sum(os.times()[:4]):.2f}\n")
    sys.exit(status)


if __name__ == "__main__":
    main()
