"""The tasks of a suite that can be measured: their data, their selection, and what identifies their numbers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moesaic.common.errors import MoesaicError
from moesaic.common.progress import warn
from moesaic.evaluation import harness, perplexity
from moesaic.evaluation.benchmarks import BENCHMARKS, PERPLEXITY
from moesaic.evaluation.local import (
    DataMissingError,
    HeldOut,
    LocalData,
    find_split,
    read_local,
    refuse_too_many_shots,
)
from moesaic.evaluation.programs import check_isolation
from moesaic.evaluation.subsets import Subset, Subsets
from moesaic.evaluation.suites import TEXT_METRIC, Suite, SuiteTask


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to measure."""

    suite: Suite
    share: float | None
    """Share of the rows that selections are made on, where the user says one."""
    data_dir: Path | None
    limit: int | None
    seed: int
    batch_size: int
    domain_field: str
    allow_code: bool
    subsets: Subsets | None


@dataclass(kw_only=True)
class Job:
    """A task whose data is there."""

    task: SuiteTask
    metric: str
    """Key of the number that is the score."""
    identity: dict[str, Any]
    subset: Subset | None
    missing_parts: tuple[str, ...] = ()
    local: LocalData | None = None
    tasks: Mapping[str, Any] = field(default_factory=dict)
    rows: dict[str, list[int]] | None = None
    """Of the hub's data, the rows of each of lm-eval's tasks that are asked; None: all, or the first `limit`."""
    documents: list[perplexity.Document] = field(default_factory=list)


def prepare(request: Request) -> tuple[list[Job], dict[str, str]]:
    """The jobs whose data is there, and for the other tasks why not.

    Raises:
        MoesaicError: nothing can be measured; data that is damaged; another share than the selection was made on.
    """
    jobs, missing = [], {}
    for task in request.suite.tasks:
        try:
            subset = None if request.subsets is None else request.subsets.find(task.task)
            find = _text_job if task.task == PERPLEXITY else _benchmark_job
            jobs.append(find(request, task, subset))
        except DataMissingError as error:
            missing[task.task] = str(error)
    if not jobs:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in list(missing.items())[:3])
        raise MoesaicError(f"--suite {request.suite.name}: no task can be measured ({reasons})")
    return jobs, missing


def _benchmark_job(request: Request, task: SuiteTask, subset: Subset | None) -> Job:
    benchmark = BENCHMARKS[task.task]
    if benchmark.runs_programs:
        if not request.allow_code:
            raise DataMissingError("it runs programs that the model writes; --allow-code-execution allows that")
        check_isolation()
    refuse_too_many_shots(benchmark, task.shots)
    local, file = None, None
    if request.data_dir is not None:
        file = find_split(request.data_dir, benchmark.files or task.task, benchmark.split)
    held_out = _held_out(request, subset, file)
    if request.data_dir is not None:
        local = read_local(task.task, benchmark, request.data_dir, shots=task.shots, held_out=held_out)
    elif subset is not None and subset.drawn() is not None:
        raise DataMissingError("its selection was made on a share of local rows; --data-dir with these says which")
    if file is not None and subset is not None and subset.drawn_from(file) is None:
        _warn_of_seen(subset, file, f"rows of {task.task}")
    tasks = harness.build(task.task, benchmark, shots=task.shots, seed=request.seed, local=local)
    identity = _identity(task, subset, held_out) | {
        "data": dict(local.hashes) if local else "hub",
        "lm_eval_tasks": {name: str(one.VERSION) for name, one in tasks.items()},
    }
    return Job(
        task=task,
        metric=task.metric or benchmark.metric,
        identity=identity,
        subset=subset,
        local=local,
        tasks=tasks,
        missing_parts=local.missing_parts if local else (),
        rows=None if local or held_out is None else harness.rows_left(tasks, held_out, request.limit),
    )


def _text_job(request: Request, task: SuiteTask, subset: Subset | None) -> Job:
    if request.data_dir is None:
        raise DataMissingError("held-out text is local; give --data-dir")
    files = perplexity.held_out_files(request.data_dir)
    documents = perplexity.read_documents(files, domain_field=request.domain_field, limit=request.limit)
    if subset is not None:
        for file in files:
            _warn_of_seen(subset, file.path, "held-out texts")
    identity = _identity(task, subset, None) | {
        "data": perplexity.file_hashes(files),
        "domain_field": request.domain_field,
    }
    return Job(task=task, metric=TEXT_METRIC, identity=identity, subset=subset, documents=documents)


def _identity(task: SuiteTask, subset: Subset | None, held_out: HeldOut | None) -> dict[str, Any]:
    return {
        "shots": task.shots,
        "selection": None if subset is None else subset.digest,
        "left_out": None if held_out is None else vars(held_out),
    }


def _held_out(request: Request, subset: Subset | None, file: Path | None) -> HeldOut | None:
    """The rows to leave out: those of the file that the selection was made on, or that one would be made on."""
    drawn = None if subset is None else subset.drawn()
    here = None if subset is None or file is None else subset.drawn_from(file)
    if request.share is not None:
        if subset is not None and here is not None and here.share != request.share:
            raise MoesaicError(
                f"--selection-share {request.share:g}: {subset.file} was made on a share of {here.share:g} of {file}; "
                "leave the flag out"
            )
        return HeldOut(share=request.share, seed=drawn.seed if drawn else 0)
    if here is not None or request.suite.selection_share is None:
        return here
    return drawn or HeldOut(share=request.suite.selection_share, seed=0)


def _warn_of_seen(subset: Subset, file: Path, what: str) -> None:
    """Say where a selection was made on what is evaluated."""
    if subset.made_on(file):
        how = "without --split" if subset.drawn() is None else "where --split does not tell which rows are evaluated"
        warn(f"{subset.file}: was made on {file} {how}, so {what} are among its own")
