"""lm-eval: its tasks with the data we give them, and a run of them on a loaded model."""

import contextlib
import io
import json
import logging
import math
import random
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from moesaic.common.errors import MoesaicError
from moesaic.data.calibration import record_digest
from moesaic.data.vocabulary import watch_ids
from moesaic.evaluation.benchmarks import Benchmark
from moesaic.evaluation.local import WHOLE, DataMissingError, HeldOut, LocalData

_NEEDED = "tasks need lm_eval; pip install 'moesaic[eval]'"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The numbers of one task."""

    samples: int
    metrics: Mapping[str, tuple[float, float | None]]
    """`metric,filter` -> value and standard error; no error where lm-eval has none."""
    asked: tuple[Mapping[str, Any], ...] = ()
    """lm-eval's sample of every row and filter: requests, answers, scores."""


def require_lm_eval() -> None:
    """Say in one line how to get lm-eval where it is not installed."""
    try:
        import lm_eval  # noqa: F401
    except ImportError as error:
        raise MoesaicError(_NEEDED) from error


def wrap(model: Any, tokenizer: Any, *, batch_size: int) -> Any:
    """lm-eval's view of a loaded model."""
    require_lm_eval()
    watch_ids(model, tokenizer.name_or_path)
    with _silent(quiet=True):
        from lm_eval.models import huggingface

        made: Any = huggingface.HFLM  # its signature is hidden by a decorator
        return made(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)


def build(name: str, benchmark: Benchmark, *, shots: int, seed: int, local: LocalData | None) -> dict[str, Any]:
    """lm-eval's task objects of a benchmark, by their names; with local rows, of the parts that have some.

    Raises:
        DataMissingError: the hub's data set cannot be had, or a package that the task needs.
    """
    if benchmark.definition is not None:
        return _defined(benchmark.definition, name, benchmark.config, shots=shots, seed=seed)
    with _silent(quiet=True):
        import lm_eval
        from lm_eval.tasks import TaskManager

        parts = benchmark.parts or {name: WHOLE}
        wanted = {
            task: part for task, part in parts.items() if local is None or _rows_of(part, benchmark) in local.rows
        }
        folders = [] if benchmark.folder is None else [Path(lm_eval.__file__).parent / "tasks" / benchmark.folder]
        manager = TaskManager(include_path=[*folders], include_defaults=False)
        children = [
            {
                **benchmark.config,
                "task": task,
                "num_fewshot": shots,
                **_data(benchmark, part, shots=shots, local=local),
            }
            for task, part in wanted.items()
        ]
        # The members of a group take the rest of their configuration from lm-eval's own task of that name.
        specs = children if benchmark.folder is None else [{"group": "moesaic", "task": children}]
        _seed(seed)
        try:
            tasks = manager.load(specs)["tasks"]
        except (OSError, ImportError, ValueError, AssertionError) as error:
            if local is not None and type(error).__module__.startswith("pyarrow"):
                raise MoesaicError(
                    f"{name}: a field has another type in one row than in the others ({error})"
                ) from error
            if local is not None:
                raise
            first, *_ = str(error).strip().splitlines() or [type(error).__name__]
            raise DataMissingError(f"its data set or a package is not to be had ({first})") from error
    for task in tasks.values():
        task.set_fewshot_seed(seed)
    return dict(tasks)


def _defined(file: Path, name: str, other: Mapping[str, Any], *, shots: int, seed: int) -> dict[str, Any]:
    """The task of lm-eval's own file; Python functions that it names beside itself are imported, as by lm-eval."""
    with _silent(quiet=True):
        from lm_eval.api.task import ConfigurableTask
        from lm_eval.tasks._yaml_loader import load_yaml

        _seed(seed)
        try:
            config = {key: value for key, value in load_yaml(file).items() if key not in ("tag", "group")}
            task: Any = ConfigurableTask(config={**config, "task": name, "num_fewshot": shots, **other})
        except (OSError, ImportError) as error:
            first, *_ = str(error).strip().splitlines() or [type(error).__name__]
            raise DataMissingError(f"its data set or a package is not to be had ({first})") from error
        except Exception as error:  # whatever a file that lm-eval cannot use raises there
            raise MoesaicError(f"{file}: lm-eval does not take this task ({error})") from error
    task.set_fewshot_seed(seed)
    return {name: task}


def first_metric(tasks: Mapping[str, Any]) -> str:
    """The key of the first metric of a task, as results have it."""
    config = next(iter(tasks.values())).config
    filters = [one["name"] for one in config.filter_list or []]
    metric = (config.metric_list or [{"metric": "acc"}])[0]["metric"]
    return f"{metric},{filters[0] if filters else 'none'}"


def rows_digest(tasks: Mapping[str, Any]) -> str:
    """The hash of all rows that tasks ask."""
    digest = xxhash.xxh3_128()
    for task in tasks.values():
        for row in task.eval_docs:
            digest.update(json.dumps(row, sort_keys=True, default=str).encode())
    return digest.hexdigest()


def _rows_of(part: str, benchmark: Benchmark) -> str:
    return part if benchmark.part_field else WHOLE


def _data(benchmark: Benchmark, part: str, *, shots: int, local: LocalData | None) -> dict[str, Any]:
    """Keys of lm-eval's configuration that put our rows in the place of the hub's."""
    if local is None:
        return {}
    import datasets

    splits = local.rows[_rows_of(part, benchmark)]

    def rows(**_: Any) -> Any:
        return datasets.DatasetDict({split: datasets.Dataset.from_list(list(found)) for split, found in splits.items()})

    changes: dict[str, Any] = {
        "custom_dataset": rows,
        "dataset_path": None,
        "dataset_name": None,
        "dataset_kwargs": None,
        "training_split": None,
        "validation_split": None,
        "test_split": benchmark.split,
        **benchmark.local_config,
    }
    if benchmark.shot_split is not None:
        changes["fewshot_split"] = benchmark.shot_split if shots else None
        if not shots:
            changes["fewshot_config"] = None
    return changes


def digests_of(tasks: Mapping[str, Any]) -> list[str]:
    """The digests of the rows that tasks ask."""
    return [record_digest(row) for task in tasks.values() for row in task.eval_docs]


def refuse_short_reach(lm: Any, tasks: Mapping[str, Any]) -> None:
    """Refuse tasks whose answers may be longer than the model reaches; lm-eval would stop in the middle.

    Raises:
        DataMissingError: names both lengths.
    """
    for task in tasks.values():
        if task.OUTPUT_TYPE != "generate_until":
            continue
        longest = (task.config.generation_kwargs or {}).get("max_gen_toks", lm.max_gen_toks)
        if longest >= lm.max_length:
            raise DataMissingError(f"its answers may take {longest} tokens, and the model reaches {lm.max_length}")


def rows_left(tasks: Mapping[str, Any], held_out: HeldOut, limit: int | None) -> dict[str, list[int]]:
    """Of each task, the numbers of the first `limit` rows that selections leave."""
    found = {}
    for name, task in tasks.items():
        rows = enumerate(task.eval_docs)
        found[name] = [number for number, row in rows if not held_out.holds(record_digest(row))][:limit]
    return found


def run(
    lm: Any,
    tasks: Mapping[str, Any],
    *,
    limit: int | None,
    seed: int,
    quiet: bool,
    rows: dict[str, list[int]] | None = None,
) -> dict[str, Measured]:
    """Ask the model the first `limit` rows, or the given `rows`, of each task; the numbers of each."""
    from lm_eval.evaluator import evaluate

    _seed(seed)
    with _silent(quiet=quiet):
        results: Any = evaluate(
            lm=lm,
            task_dict={"tasks": dict(tasks), "groups": {}, "group_map": {}},
            limit=None if rows else limit,
            samples=rows,
            log_samples=True,
            confirm_run_unsafe_code=True,  # ours are isolated, and refused before where that is not allowed
        )
    return {name: _measured(results, name) for name in tasks}


def pooled(parts: Sequence[Measured]) -> Measured:
    """One benchmark out of its parts: means over all rows, and lm-eval's pooled standard error.

    Parts without a row count for nothing.
    """
    from lm_eval.api.metrics import pooled_sample_stderr

    parts = [part for part in parts if part.samples] or parts
    if len(parts) == 1:
        return parts[0]
    asked = tuple(one for part in parts for one in part.asked)
    sizes = [part.samples for part in parts]
    if not sum(sizes):
        return parts[0]
    metrics: dict[str, tuple[float, float | None]] = {}
    for name in parts[0].metrics:
        values, errors = zip(*(part.metrics[name] for part in parts), strict=True)
        mean = sum(value * size for value, size in zip(values, sizes, strict=True)) / sum(sizes)
        known = all(error is not None for error in errors) and sum(sizes) > len(sizes)
        metrics[name] = (mean, float(pooled_sample_stderr(list(errors), sizes)) if known else None)
    return Measured(samples=sum(sizes), metrics=metrics, asked=asked)


def _measured(results: Mapping[str, Any], name: str) -> Measured:
    values = results["results"][name]
    metrics = {}
    for key, value in values.items():
        metric, comma, filter_name = key.partition(",")
        if comma and not metric.endswith("_stderr"):
            error = values.get(f"{metric}_stderr,{filter_name}")
            known = isinstance(error, (int, float)) and math.isfinite(error)
            metrics[key] = (float(value), float(error) if known else None)  # lm-eval writes "N/A" where it has none
    samples = int(results["n-samples"][name]["effective"])
    if not samples:
        metrics = dict.fromkeys(metrics, (math.nan, None))
    asked = sorted(results["samples"][name], key=lambda one: one["doc_id"])
    return Measured(samples=samples, metrics=metrics, asked=tuple(asked))


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Make requests as a run makes them: quietly, from the same seed."""
    _seed(seed)
    with _silent(quiet=True):
        yield


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@contextlib.contextmanager
def _silent(*, quiet: bool) -> Iterator[None]:
    """Keep lm-eval's log lines and warnings away, and its progress bars from anything but a terminal."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    bars = sys.stderr.isatty() and not quiet
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with contextlib.nullcontext() if bars else contextlib.redirect_stderr(io.StringIO()):
                yield
    finally:
        logger.setLevel(level)
