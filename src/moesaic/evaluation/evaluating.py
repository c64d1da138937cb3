"""The verb `eval`: benchmarks of a suite, and held-out text, on one checkpoint."""

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moesaic.checkpoint.pio import check_file
from moesaic.checkpoint.results import read_results
from moesaic.checkpoint.source import open_checkpoint
from moesaic.common.errors import MoesaicError
from moesaic.common.progress import notice, warn
from moesaic.evaluation import harness, perplexity
from moesaic.evaluation.benchmark import Benchmark
from moesaic.evaluation.benchmarks import BENCHMARKS
from moesaic.evaluation.jobs import Job, Request, prepare
from moesaic.evaluation.local import DataMissingError
from moesaic.evaluation.report import EvalResult
from moesaic.evaluation.results import (
    FORMAT,
    average,
    finished,
    finite_only,
    new_document,
    refuse_other_settings,
    write_results,
)
from moesaic.evaluation.subsets import Subset, load_subsets
from moesaic.evaluation.suites import Suite, load_suite

DEFAULT_SEED = 1234
"""lm-eval's own, so that demonstrations are those of lm-eval called directly."""

_WIDER = "a model that overflows needs --dtype bfloat16 or float32"


def evaluate(
    checkpoint: str | Path,
    out: str | Path | None = None,
    *,
    suite: str | Suite = "emo-mc9",
    data_dir: str | Path | None = None,
    shots: int | None = None,
    limit: int | None = None,
    selection: str | Path | None = None,
    selection_share: float | None = None,
    seed: int = DEFAULT_SEED,
    batch_size: int = 8,
    device: str | None = None,
    dtype: str = "auto",
    domain_field: str = "domain",
    allow_code_execution: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    quiet: bool = True,
) -> EvalResult:
    """Measure a checkpoint, dense or MoE, on the tasks of a suite.

    Args:
        checkpoint: folder, or hub id `org/name[@revision]`, with a tokenizer.
        out: results file to write after every task; tasks that it has already are not run again.
        suite: a name, a task, several of both with commas between, a YAML file, or a `Suite`.
        data_dir: folder with local rows; without it, the hub's data sets.
        shots: demonstrations before each question, for all tasks; default: the suite's.
        limit: first rows of each task (of each subject of MMLU, of each domain of held-out text).
        selection: a file of `select`, or a folder with one file per task or MMLU category: only those experts are used.
        selection_share: share of the rows that selections are made on, which is left out; default: what the selection
            says where it was made on the file with the rows, else the suite's.
        seed: of the demonstrations that are drawn.
        batch_size: texts at once; more is faster and needs more memory.
        device: such as `cpu` or `cuda:1`. Default: cuda if there is one, else cpu.
        dtype: float32, bfloat16, float16, or auto for the checkpoint's.
        domain_field: field of held-out records with their domain; "" takes the file's name.
        allow_code_execution: run the programs that the model writes (HumanEval, MBPP), without network.
        overwrite: begin `out` anew.
        dry_run: say what would be measured.
        quiet: print no progress and no notices.

    Raises:
        MoesaicError: unknown names, no data at all, a selection or a results file of another model, another setting
            than the results file was made with, another share than the selection was made on, no way to write `out`.
    """
    harness.require_lm_eval()
    _check_arguments(limit=limit, batch_size=batch_size, shots=shots, data_dir=data_dir, share=selection_share)
    path = None if out is None else Path(out)
    if path is not None:
        check_file(path, replaces=FORMAT)
    chosen = suite if isinstance(suite, Suite) else load_suite(suite, shots=shots)
    opened = open_checkpoint(checkpoint)
    request = Request(
        suite=chosen,
        share=selection_share,
        data_dir=None if data_dir is None else Path(data_dir),
        limit=limit,
        seed=seed,
        batch_size=batch_size,
        domain_field=domain_field,
        allow_code=allow_code_execution,
        subsets=None if selection is None else load_subsets(Path(selection), opened),
    )
    jobs, missing = prepare(request)
    settings = {
        "limit": limit,
        "seed": seed,
        "batch_size": batch_size,
        "device": device or "auto",
        "dtype": dtype,
        "chat_template": False,
    }
    document = new_document(opened, settings)
    old = _old(path, document, jobs, overwrite=overwrite)
    if dry_run:
        return _result(path, chosen, old or document, missing, [job.task.task for job in jobs], dry_run=True)
    document = old or document
    todo = [job for job in jobs if job.task.task not in document["tasks"]]
    if len(todo) < len(jobs):
        notice(f"{path}: {len(jobs) - len(todo)} tasks are there already", quiet=quiet)
    _record(document, chosen, missing)
    if todo:
        _run_all(todo, document, request, checkpoint, path, missing, device=device, dtype=dtype, quiet=quiet)
    elif path is not None:
        write_results(path, document)
    ran = [job.task.task for job in todo if job.task.task not in missing]
    return _result(path, chosen, document, missing, ran, dry_run=False)


def _check_arguments(
    *, limit: int | None, batch_size: int, shots: int | None, data_dir: str | Path | None, share: float | None
) -> None:
    for flag, value, least in (("--limit", limit, 1), ("--batch-size", batch_size, 1), ("--shots", shots, 0)):
        if value is not None and value < least:
            raise MoesaicError(f"{flag}: must be at least {least}, got {value}")
    if share is not None and not 0.0 < share < 1.0:
        raise MoesaicError(f"--selection-share {share:g}: must be above 0 and below 1, such as 0.4")
    if data_dir is not None and not Path(data_dir).is_dir():
        raise MoesaicError(f"--data-dir {data_dir}: no such folder")


def _old(path: Path | None, new: Mapping[str, Any], jobs: list[Job], *, overwrite: bool) -> dict[str, Any] | None:
    """The results file that is continued, if there is one that fits."""
    if path is None or overwrite or not path.exists():
        return None
    old = read_results(path)
    refuse_other_settings(path, old, new)
    for job in jobs:
        finished(path, old, job.task.task, job.identity, job.metric)
    return old


def _run_all(
    jobs: list[Job],
    document: dict[str, Any],
    request: Request,
    checkpoint: str | Path,
    path: Path | None,
    missing: dict[str, str],
    *,
    device: str | None,
    dtype: str,
    quiet: bool,
) -> None:
    """Load the model, run the jobs, write the results after each; adds to `missing` what the model is too short for."""
    from moesaic.loading import load, load_tokenizer

    tokenizer: Any = load_tokenizer(checkpoint)
    model = load(checkpoint, device=device, dtype=dtype)
    lm = harness.wrap(model, tokenizer, batch_size=request.batch_size)
    for job in jobs:
        started = time.monotonic()
        try:
            harness.refuse_short_reach(lm, job.tasks)
        except DataMissingError as error:
            missing[job.task.task] = str(error)
            continue
        with _restricted(model, job.subset):
            measured = (_run_text if job.documents else _run_benchmark)(job, request, lm, quiet)
        entry = finite_only(measured)
        if entry != measured:
            warn(f"{job.task.task}: some of its numbers are infinite or not numbers, and null in the results; {_WIDER}")
        entry["seconds"] = round(time.monotonic() - started, 3)
        document["tasks"][job.task.task] = entry
        _record(document, request.suite, missing)
        if path is not None:
            write_results(path, document)
        score = "no score" if entry["score"] is None else f"{entry['score']:.4f}"
        notice(f"{job.task.task}: {entry['metric']} {score}, {entry['seconds']:.0f} s", quiet=quiet)
    _record(document, request.suite, missing)
    if path is not None:
        write_results(path, document)


def _restricted(model: Any, subset: Subset | None) -> contextlib.AbstractContextManager[Any]:
    from moesaic.selection.restriction import restrict

    return contextlib.nullcontext() if subset is None else restrict(model, subset.selection)


def _run_benchmark(job: Job, request: Request, lm: Any, quiet: bool) -> dict[str, Any]:
    benchmark: Benchmark = BENCHMARKS[job.task.task]
    measured = harness.run(lm, job.tasks, limit=request.limit, seed=request.seed, quiet=quiet, rows=job.rows)
    whole = harness.pooled(list(measured.values()))
    metric = job.metric
    if metric not in whole.metrics:
        raise MoesaicError(f"{job.task.task}: has no metric {metric!r}; it has {', '.join(sorted(whole.metrics))}")
    score, error = whole.metrics[metric]
    parts = {}
    if len(measured) > 1:
        names = {task: benchmark.parts[task] for task in measured}
        parts = {names[task]: _numbers(one, metric) for task, one in measured.items()}
    return _entry(job, title=benchmark.title, higher_is_better=True) | {
        "samples": whole.samples,
        "score": score,
        "standard_error": error,
        "chance": benchmark.chance,
        "metrics": {
            name: {"value": value, "standard_error": error} for name, (value, error) in sorted(whole.metrics.items())
        },
        "parts": parts,
        "missing_parts": list(job.missing_parts),
    }


def _numbers(one: harness.Measured, metric: str) -> dict[str, Any]:
    score, error = one.metrics[metric]
    return {"score": score, "standard_error": error, "samples": one.samples}


def _run_text(job: Job, request: Request, lm: Any, quiet: bool) -> dict[str, Any]:
    found = perplexity.measure(lm.model, lm.tokenizer, job.documents, batch_size=request.batch_size, quiet=quiet)
    total = found["all"]
    return _entry(job, title="bits per byte", higher_is_better=False) | {
        "samples": total["documents"],
        "score": total[job.metric],
        "standard_error": total["bits_per_byte_error"],
        "text": found,
    }


def _entry(job: Job, *, title: str, higher_is_better: bool) -> dict[str, Any]:
    return {
        "title": title,
        "metric": job.metric,
        "higher_is_better": higher_is_better,
        "shots": job.task.shots,
        "selection": None if job.subset is None else job.subset.record(),
        "identity": job.identity,
    }


def _record(document: dict[str, Any], suite: Suite, missing: Mapping[str, str]) -> None:
    """Put the suite, what is missing of it and its averages into the document."""
    tasks = document["tasks"]
    document["suites"][suite.name] = {
        "about": suite.about,
        "version": suite.version,
        "tasks": [task.task for task in suite.tasks],
    }
    kept = {name: reason for name, reason in document["missing"].items() if name not in tasks}
    document["missing"] = kept | {name: reason for name, reason in missing.items() if name not in tasks}
    others = [one for one in document["averages"] if one["suite"] != suite.name]
    own = [{"suite": suite.name} | average(rule, suite, tasks).to_json() for rule in suite.averages]
    document["averages"] = others + own


def _result(
    path: Path | None,
    suite: Suite,
    document: dict[str, Any],
    missing: Mapping[str, str],
    ran: list[str],
    *,
    dry_run: bool,
) -> EvalResult:
    return EvalResult(
        out=path,
        suite=suite.name,
        document=document,
        missing={name: reason for name, reason in missing.items() if name not in document["tasks"]},
        ran=tuple(ran),
        dry_run=dry_run,
    )
