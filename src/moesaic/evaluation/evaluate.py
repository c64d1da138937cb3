"""The verb `eval`: benchmarks of a suite, and held-out text, on one checkpoint.

First the jobs: the tasks whose data is there, with what identifies their numbers. Then they run, one after the other.
"""

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moesaic.checkpoint.results import FORMAT
from moesaic.checkpoint.source import open_checkpoint
from moesaic.common.errors import MoesaicError
from moesaic.common.files import check_file
from moesaic.common.numbers import finite_only
from moesaic.common.progress import notice, warn
from moesaic.common.verbs import verb
from moesaic.evaluation import harness, perplexity, samples
from moesaic.evaluation.benchmarks import Benchmark
from moesaic.evaluation.local import (
    DataMissingError,
    HeldOut,
    Subset,
    Subsets,
    digests_of,
    file_hashes,
    find_rows,
    load_subsets,
    read_local,
    refuse_too_many_shots,
)
from moesaic.evaluation.own import HeldOutText, definition_of, find_task
from moesaic.evaluation.programs import check_isolation
from moesaic.evaluation.recipe import TEXT_METRIC, EvalRecipe, Suite, SuiteTask, chosen_suite
from moesaic.evaluation.results import (
    EvalResult,
    continued,
    new_document,
    record_suite,
    write_results,
)


@dataclass(kw_only=True)
class Job:
    """A task whose data is there."""

    task: SuiteTask
    metric: str
    """Key of the number that is the score."""
    identity: dict[str, Any]
    subset: Subset | None
    benchmark: Benchmark | None = None
    """None: held-out text."""
    missing_parts: tuple[str, ...] = ()
    tasks: Mapping[str, Any] = field(default_factory=dict)
    rows: dict[str, list[int]] | None = None
    """Of the hub's data, the rows of each of lm-eval's tasks that are asked; None: all, or the first `limit`."""
    documents: list[perplexity.Document] = field(default_factory=list)


def _several(given: Any) -> tuple[str, ...]:
    return (str(given),) if isinstance(given, str | Path) else tuple(map(str, given))


@verb(EvalRecipe, positional=("checkpoint",), out="file", convert={"task": _several})
def evaluate(
    recipe: EvalRecipe,
    out: str | Path | None = None,
    *,
    overwrite: bool = False,
    dry_run: bool = False,
    quiet: bool = True,
) -> EvalResult:
    """Measure a checkpoint, dense or MoE, on benchmarks (through lm-eval) and on held-out text.

    Results are written to `out` after every task; a second call goes on where the first one stopped, or begins anew
    with `overwrite`.

    Raises:
        MoesaicError: unknown names, no data at all, a selection or a results file of another model, another setting
            than the results file was made with, another share than the selection was made on, no way to write `out`.
    """
    harness.require_lm_eval()
    if recipe.data_dir is not None and not Path(recipe.data_dir).is_dir():
        raise MoesaicError(f"--data-dir {recipe.data_dir}: no such folder")
    path = None if out is None else Path(out)
    if path is not None:
        check_file(path, replaces=FORMAT)
    if recipe.samples is not None:
        check_file(recipe.samples, replaces=samples.MARK)
    suite = chosen_suite(recipe)
    opened = open_checkpoint(recipe.checkpoint)
    subsets = None if recipe.selection is None else load_subsets(Path(recipe.selection), opened)
    jobs, missing = prepare(recipe, suite, subsets)
    document = new_document(opened, recipe)
    if path is not None and path.exists() and not overwrite:
        identities = {job.task.name: job.identity | {"metric": job.metric} for job in jobs}
        document = continued(path, document, identities)
    todo = [job for job in jobs if job.task.name not in document["tasks"]]

    def save() -> None:
        record_suite(document, suite, missing)
        if path is not None:
            write_results(path, document)

    if not dry_run:
        if len(todo) < len(jobs):
            notice(f"{path}: {len(jobs) - len(todo)} tasks are there already", quiet=quiet)
        if todo:
            _run_all(todo, recipe, document, missing, save, quiet)
        save()
    return EvalResult(
        out=path,
        suite=suite.name,
        document=document,
        missing={name: reason for name, reason in missing.items() if name not in document["tasks"]},
        ran=tuple(job.task.name for job in (jobs if dry_run else todo) if job.task.name not in missing),
        dry_run=dry_run,
    )


# --- jobs: what can be measured ---------------------------------------------------------------------------------------


def prepare(recipe: EvalRecipe, suite: Suite, subsets: Subsets | None) -> tuple[list[Job], dict[str, str]]:
    """The jobs whose data is there, and for the other tasks why not.

    Raises:
        MoesaicError: nothing can be measured; data that is damaged; another share than the selection was made on.
    """
    jobs, missing = [], {}
    for task in suite.tasks:
        try:
            subset = None if subsets is None else subsets.find(task.name)
            found = find_task(task.task).task
            if isinstance(found, HeldOutText):
                jobs.append(_text_job(recipe, task, subset, found))
            else:
                jobs.append(_benchmark_job(recipe, suite, task, subset, found))
        except DataMissingError as error:
            missing[task.name] = str(error)
    if not jobs:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in list(missing.items())[:3])
        raise MoesaicError(f"--suite {suite.name}: no task can be measured ({reasons})")
    return jobs, missing


def _benchmark_job(
    recipe: EvalRecipe, suite: Suite, task: SuiteTask, subset: Subset | None, benchmark: Benchmark
) -> Job:
    shots = task.shots or 0
    if benchmark.runs_programs:
        if not recipe.allow_code_execution:
            raise DataMissingError("it runs programs that the model writes; --allow-code-execution allows that")
        check_isolation()
    refuse_too_many_shots(benchmark, shots)
    folder = None if recipe.data_dir is None else Path(recipe.data_dir)
    if benchmark.definition is None and (folder is not None or benchmark.paths):
        file = find_rows(task.name, benchmark, folder, benchmark.split, shots=shots)
        seen = None if subset is None else _seen(subset, digests_of(file), str(file), f"rows of {task.name}")
        held_out = _held_out(recipe, suite, subset, seen, str(file))
        local = read_local(task.name, benchmark, folder, shots=shots, held_out=held_out)
        tasks = harness.build(task.name, benchmark, shots=shots, seed=recipe.seed, local=local)
    else:
        local = None
        tasks = harness.build(task.name, benchmark, shots=shots, seed=recipe.seed, local=None)
        where = f"the data of {task.name}"
        seen = None if subset is None else _seen(subset, harness.digests_of(tasks), where, f"rows of {task.name}")
        if subset is not None and subset.drawn() is not None and not seen:
            raise DataMissingError("its selection was made on a share of local rows; --data-dir with these says which")
        held_out = _held_out(recipe, suite, subset, seen, where)
    rows = None if local or held_out is None else harness.rows_left(tasks, held_out, recipe.limit)
    if rows is not None and not any(rows.values()):
        raise DataMissingError("no row is left beside those that selections are made on")
    identity = _identity(task, subset, held_out) | {
        "data": dict(local.hashes) if local else "hub" if benchmark.definition is None else harness.rows_digest(tasks),
        "lm_eval_tasks": {name: str(one.VERSION) for name, one in tasks.items()},
        **definition_of(task.task),
    }
    return Job(
        task=task,
        metric=task.metric or benchmark.metric or harness.first_metric(tasks),
        identity=identity,
        subset=subset,
        benchmark=benchmark,
        tasks=tasks,
        missing_parts=local.missing_parts if local else (),
        rows=rows,
    )


def _text_job(recipe: EvalRecipe, task: SuiteTask, subset: Subset | None, text: HeldOutText) -> Job:
    files = perplexity.files_of(text, recipe.data_dir)
    domain_field = recipe.domain_field if text.domain is None else text.domain
    documents = perplexity.read_documents(files, domain_field=domain_field, text_field=text.text, limit=recipe.limit)
    if subset is not None:
        for file in files:
            _seen(subset, perplexity.digests_of(file), str(file.path), "held-out texts", may_leave_out=False)
    identity = _identity(task, subset, None) | {
        "data": file_hashes(files),
        "domain_field": domain_field,
        **definition_of(task.task),
    }
    return Job(task=task, metric=TEXT_METRIC, identity=identity, subset=subset, documents=documents)


def _identity(task: SuiteTask, subset: Subset | None, held_out: HeldOut | None) -> dict[str, Any]:
    return {
        "shots": task.shots,
        "selection": None if subset is None else subset.digest,
        "left_out": None if held_out is None else held_out.record(),
    }


def _held_out(recipe: EvalRecipe, suite: Suite, subset: Subset | None, seen: int | None, where: str) -> HeldOut | None:
    """The rows to leave out: those that the selection was made on, or that one would be made on."""
    drawn = None if subset is None else subset.drawn()
    here = drawn if seen else None
    if recipe.selection_share is not None:
        if subset is not None and here is not None and here.share != recipe.selection_share:
            raise MoesaicError(
                f"--selection-share {recipe.selection_share:g}: {subset.file} was made on a share of {here.share:g} of "
                f"{where}; leave the flag out"
            )
        return here or HeldOut(share=recipe.selection_share, seed=drawn.seed if drawn else 0)
    if here is not None or suite.selection_share is None:
        return here
    return HeldOut(share=drawn.share if drawn else suite.selection_share, seed=drawn.seed if drawn else 0)


def _seen(subset: Subset, digests: Sequence[str], where: str, what: str, *, may_leave_out: bool = True) -> int:
    """How many of the rows a selection was made on; says where they stay in, and where it cannot be known."""
    if subset.rows is None and subset.needs_rows:
        warn(
            f"{subset.file}: does not say which rows it was made on (statistics, or an older file), so {what} may be "
            "among its own; make it anew with `moesaic select --data`"
        )
    seen = subset.seen(digests)
    if seen and (subset.drawn() is None or not may_leave_out):
        how = "" if subset.drawn() is not None else " without --split"
        warn(
            f"{subset.file}: was made on {seen} of the {len(digests)} rows of {where}{how}, so {what} are among its own"
        )
    return seen


# --- running them -----------------------------------------------------------------------------------------------------


def _run_all(
    jobs: list[Job],
    recipe: EvalRecipe,
    document: dict[str, Any],
    missing: dict[str, str],
    save: Callable[[], None],
    quiet: bool,
) -> None:
    """Load the model, run the jobs, save the results after each; adds to `missing` what the model is too short for."""
    from moesaic.loading import load, load_tokenizer
    from moesaic.modeling.finite import watched

    kept = None if recipe.samples is None else samples.SamplesFile(Path(recipe.samples))
    tokenizer: Any = load_tokenizer(recipe.checkpoint)
    model = load(recipe.checkpoint, device=recipe.device, dtype=recipe.dtype)
    lm = harness.wrap(model, tokenizer, batch_size=recipe.batch_size)
    for job in jobs:
        name, started = job.task.name, time.monotonic()
        try:
            harness.refuse_short_reach(lm, job.tasks)
        except DataMissingError as error:
            missing[name] = str(error)
            continue
        with _restricted(model, job.subset), watched(model) as seen:
            measured, lines = (_run_text if job.documents else _run_benchmark)(job, recipe, lm, quiet)
        entry = measured_only(measured, seen.not_finite)
        if entry["not_finite"] is not None:
            warn(f"{name}: {entry['not_finite']}; no number of it is reported")
        entry["seconds"] = round(time.monotonic() - started, 3)
        document["tasks"][name] = entry
        save()
        if kept is not None:
            kept.put(name, lines if entry["score"] is not None or "text" in entry else ())
        score = "no score" if entry["score"] is None else f"{entry['score']:.4f}"
        notice(f"{name}: {entry['metric']} {score}, {entry['seconds']:.0f} s", quiet=quiet)


def measured_only(entry: Mapping[str, Any], not_finite: object | None) -> dict[str, Any]:
    """An entry of the results without the numbers that were not measured; `not_finite` says why they are null.

    A benchmark counts answers, which it also does where the logits say nothing: one call that is not finite takes all
    of its numbers. Of text, the documents tell themselves.
    """
    kept = finite_only(entry)
    if not_finite is not None and "text" not in kept:
        nothing = {"score": None, "standard_error": None}
        kept |= nothing | {"rows": None}
        kept["metrics"] = {name: {"value": None, "standard_error": None} for name in kept["metrics"]}
        kept["parts"] = {name: part | nothing for name, part in kept["parts"].items()}
    if not_finite is None and kept["score"] is None:
        not_finite = "the loss is beyond what a number holds" if kept["samples"] else "there is no row to measure"
    return kept | {"not_finite": None if not_finite is None else str(not_finite)}


def _restricted(model: Any, subset: Subset | None) -> contextlib.AbstractContextManager[Any]:
    from moesaic.routing.restrict import restrict

    return contextlib.nullcontext() if subset is None else restrict(model, subset.selection)


Lines = Iterable[Mapping[str, Any]]
"""Of `--samples`."""


def _run_benchmark(job: Job, recipe: EvalRecipe, lm: Any, quiet: bool) -> tuple[dict[str, Any], Lines]:
    benchmark, metric = job.benchmark, job.metric
    assert benchmark is not None
    measured = harness.run(lm, job.tasks, limit=recipe.limit, seed=recipe.seed, quiet=quiet, rows=job.rows)
    whole = harness.pooled(list(measured.values()))
    if metric not in whole.metrics:
        raise MoesaicError(f"{job.task.name}: has no metric {metric!r}; it has {', '.join(sorted(whole.metrics))}")

    def numbers(one: harness.Measured) -> dict[str, Any]:
        score, error = one.metrics[metric]
        return {"score": score, "standard_error": error, "samples": one.samples}

    by_part = {benchmark.parts.get(task, ""): one for task, one in measured.items()}
    entry = {
        **_entry(job, title=benchmark.title, higher_is_better=True),
        "samples": whole.samples,
        **numbers(whole),
        "chance": benchmark.chance,
        "metrics": {
            name: {"value": value, "standard_error": error} for name, (value, error) in sorted(whole.metrics.items())
        },
        "parts": {part: numbers(one) for part, one in by_part.items()} if len(by_part) > 1 else {},
        "missing_parts": list(job.missing_parts),
        "rows": samples.row_scores(whole.asked, metric),
    }
    return entry, samples.lines_of_benchmark(job.task.name, {part: one.asked for part, one in by_part.items()})


def _run_text(job: Job, recipe: EvalRecipe, lm: Any, quiet: bool) -> tuple[dict[str, Any], Lines]:
    found = perplexity.measure(lm.model, lm.tokenizer, job.documents, batch_size=recipe.batch_size, quiet=quiet)
    total, rows = found["all"], found.pop("rows")
    entry = _entry(job, title="bits per byte", higher_is_better=False) | {
        "samples": total["documents"],
        "score": total[job.metric],
        "standard_error": total["bits_per_byte_error"],
        "text": found,
        "rows": rows,
    }
    measured = zip(job.documents, rows["losses"], rows["tokens"], strict=True)
    return entry, (
        {"task": job.task.name, **vars(document), "loss": loss, "tokens": tokens} for document, loss, tokens in measured
    )


def _entry(job: Job, *, title: str, higher_is_better: bool) -> dict[str, Any]:
    return {
        "title": title,
        "metric": job.metric,
        "higher_is_better": higher_is_better,
        "shots": job.task.shots,
        "selection": None if job.subset is None else job.subset.record(),
        "identity": job.identity,
    }
