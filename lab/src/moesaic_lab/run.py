"""`lab run`: check, write the plan, let the graph run, read what it found."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moesaic.common.errors import MoesaicError, suggest
from moesaic.common.progress import notice
from moesaic_lab.experiments import EXPERIMENTS
from moesaic_lab.plan import Plan, check_folder, write_plan
from moesaic_lab.report import MARKDOWN_FILE, RESULTS_FILE, find
from moesaic_lab.scale import load_scale
from moesaic_lab.workflow import require_snakemake, run_graph
from moesaic_lab.writing import domains_of


@dataclass(frozen=True, kw_only=True)
class LabResult:
    """What `lab run` says."""

    out: Path
    plan: Plan
    lines: list[str]

    @property
    def summary(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "out": str(self.out),
            "experiment": self.plan.experiment,
            "steps": len(self.plan.steps),
            "results": str(self.out / RESULTS_FILE),
            "report": str(self.out / MARKDOWN_FILE),
        }


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
        scale: tiny, small, or a YAML file.
        seeds: repetitions.
        jobs: processes at once.
        dry_run: check everything and say what would run.
        quiet: no progress.

    Raises:
        MoesaicError: wrong arguments, another experiment in `out`, a step that failed.
    """
    if name not in EXPERIMENTS:
        raise MoesaicError(f"lab run {name}: no such experiment; {suggest(name, EXPERIMENTS)}")
    for flag, value in (("--seeds", seeds), ("--jobs", jobs)):
        if value < 1:
            raise MoesaicError(f"{flag} {value}: must be at least 1")
    folder = None if data is None else _data_folder(data)
    require_snakemake()
    plan = EXPERIMENTS[name].plan(load_scale(scale), folder, seeds)
    check_folder(plan, out)
    for line in plan.notices:
        notice(f"lab run {name}: {line}", quiet=quiet)
    if dry_run:
        return LabResult(
            out=out, plan=plan, lines=[f"{len(plan.steps)} steps: {', '.join(s.name for s in plan.steps)}"]
        )
    write_plan(plan, out)
    run_graph(out, jobs=jobs, quiet=quiet)
    return LabResult(out=out, plan=plan, lines=[find(out).heading, f"{out / MARKDOWN_FILE}, {out / RESULTS_FILE}"])


def _data_folder(data: Path) -> str:
    if not data.is_dir():
        raise MoesaicError(f"--data {data}: no such folder")
    domains = domains_of(str(data))
    if len(domains) < 2:
        raise MoesaicError(
            f"--data {data}: has {len(domains)} domains; at least 2 are needed, DOMAIN.train.jsonl with "
            "DOMAIN.valid.jsonl each"
        )
    return str(data.resolve())
