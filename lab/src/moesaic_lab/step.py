"""Run one step of an experiment: `python -m moesaic_lab.step NAME`, in the experiment's folder."""

import os
import shlex
import signal
import sys
import threading
import time
from pathlib import Path

from moesaic.checkpoint.pio import write_file
from moesaic_lab.plan import ENVIRONMENT, Step, read_plan

_WATCH_SECONDS = 1.0


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
