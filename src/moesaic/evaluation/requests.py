"""The requests of a task as text, each with its right answer: what `select`, `expand` and `inspect` calibrate on, and
what `train` fine-tunes on.

They are made by the code that `eval` asks with, of the same rows and demonstrations, so a model is calibrated on
exactly what it is scored on (EMO, section 4.2). Fine-tuning asks the rows of the training split instead.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moesaic.common.errors import MoesaicError
from moesaic.data.calibration import record_digest
from moesaic.evaluation import harness
from moesaic.evaluation.benchmarks import Benchmark
from moesaic.evaluation.local import DataMissingError, find_rows, read_local, refuse_too_many_shots
from moesaic.evaluation.own import Found, find_task

SEED = 1234
"""The seed that `eval` draws demonstrations by unless it is told another one."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A question after its demonstrations, with its right answer."""

    prompt: str
    """Demonstrations and question."""
    answer: str
    """With the white space before it."""
    digest: str
    """Of its row's content."""
    where: str
    """For messages."""

    @property
    def text(self) -> str:
        """The whole of it."""
        return self.prompt + self.answer


def task_requests(
    reference: str, *, data_dir: str | None, shots: int | None, seed: int = SEED, training: bool = False
) -> list[Request]:
    """All requests of a task, in the order of its rows.

    Args:
        reference: a shipped task's name, or a task file.
        data_dir: folder with local rows; None: the hub's, or those that a task file names.
        shots: demonstrations before each question; None: the task file's own, else 0.
        seed: of the demonstrations that are drawn.
        training: ask the rows that demonstrations are drawn from, and not those that are evaluated; a row is never its
            own demonstration.

    Raises:
        MoesaicError: no such task, rows that are not there or not the task's; a task that has no questions.
    """
    harness.require_lm_eval()
    found, benchmark = _found(reference, training=training)
    number = (found.shots or 0) if shots is None else shots
    try:
        return _requests(found.name, benchmark, data_dir=data_dir, shots=number, seed=seed)
    except DataMissingError as error:
        raise MoesaicError(f"--task {reference}: {error}") from error


def require_rows(reference: str, *, data_dir: str | None, training: bool) -> None:
    """Refuse a task that is none or whose local rows are not there, before they are read.

    Raises: as `task_requests`.
    """
    harness.require_lm_eval()
    found, benchmark = _found(reference, training=training)
    if benchmark.definition is not None or not (benchmark.paths or data_dir is not None):
        return
    try:
        find_rows(found.name, benchmark, None if data_dir is None else Path(data_dir), benchmark.split, shots=0)
    except DataMissingError as error:
        raise MoesaicError(f"--task {reference}: {error}") from error


def _found(reference: str, *, training: bool) -> tuple[Found, Benchmark]:
    found = find_task(reference)
    if not isinstance(found.task, Benchmark):
        raise MoesaicError(f"--task {reference}: has texts and no questions; give its file as data")
    return found, _of_training_rows(reference, found.task) if training else found.task


def _of_training_rows(reference: str, benchmark: Benchmark) -> Benchmark:
    """The same task with the rows that its demonstrations come from in the place of those that are evaluated.

    Raises: `MoesaicError` where it has none.
    """
    if benchmark.shot_split is None or (benchmark.paths and benchmark.shot_split not in benchmark.paths):
        raise MoesaicError(
            f"--task {reference}: has no training rows; give `demonstrations` in a task file, or a share of the "
            "evaluated rows (split)"
        )
    splits = {"training_split": None, "validation_split": None, "test_split": benchmark.shot_split}
    return replace(benchmark, split=benchmark.shot_split, config={**benchmark.config, **splits})


def _requests(name: str, benchmark: Benchmark, *, data_dir: str | None, shots: int, seed: int) -> list[Request]:
    refuse_too_many_shots(benchmark, shots)
    folder = None if data_dir is None else Path(data_dir)
    is_local = benchmark.definition is None and bool(folder is not None or benchmark.paths)
    local = read_local(name, benchmark, folder, shots=shots) if is_local else None
    tasks = harness.build(name, benchmark, shots=shots, seed=seed, local=local)
    with harness.seeded(seed):
        texts = {task_name: _texts(task) for task_name, task in tasks.items()}
    places = {task: _places(task, one, benchmark, local) for task, one in tasks.items()}
    for task, found in texts.items():
        if len(found) != len(places[task]):
            raise MoesaicError(f"--task {name}: {task} leaves rows out that its data has; it cannot be calibrated on")
    return [
        Request(prompt=prompt, answer=answer, digest=digest, where=f"{task}: row {number}")
        for task, found in texts.items()
        for (prompt, answer), (number, digest) in zip(found, places[task], strict=True)
    ]


def _places(name: str, task: Any, benchmark: Benchmark, local: Any) -> Sequence[tuple[int, str]]:
    """Number and digest of the row that each question is of."""
    if local is None:
        return [(number, record_digest(row)) for number, row in enumerate(task.eval_docs)]
    part = (benchmark.parts or {name: ""})[name] if benchmark.part_field else ""
    return local.places[part]


def _texts(task: Any) -> list[tuple[str, str]]:
    """Every question as `eval` asks it, and the right answer where the model's would be."""
    task.build_all_requests()
    by_row = itertools.groupby(sorted(task.instances, key=lambda one: one.doc_id), key=lambda one: one.doc_id)
    return [_with_answer(task, list(instances)) for _, instances in by_row]


def _with_answer(task: Any, instances: list[Any]) -> tuple[str, str]:
    doc = instances[0].doc
    if task.OUTPUT_TYPE == "multiple_choice":
        asked = sorted(instances, key=lambda one: one.idx)
        context, continuation = asked[_gold(task, doc)].args[:2]
        return context, continuation
    if task.OUTPUT_TYPE != "generate_until":
        raise MoesaicError(f"{task.config.task}: asks for a likelihood; it has no answer to calibrate on")
    target = task.doc_to_target(doc)
    answer = target[0] if isinstance(target, (list, tuple)) else target
    return instances[0].args[0], f"{task.config.target_delimiter}{answer}"


def _gold(task: Any, doc: Mapping[str, Any]) -> int:
    """The number of the right choice, found as lm-eval's scores find it."""
    gold = task.doc_to_text(doc) if task.multiple_input else task.doc_to_target(doc)
    first = gold[0] if isinstance(gold, (list, tuple)) else gold
    return task.doc_to_choice(doc).index(first) if isinstance(first, str) else int(first)
