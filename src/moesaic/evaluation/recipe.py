"""What `eval` is told: its options, and suites of tasks with their demonstrations and averages. Torch-free."""

from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from moesaic.common.errors import MoesaicError, suggest
from moesaic.common.recipe import load_recipe
from moesaic.common.yaml_text import read_yaml
from moesaic.evaluation.benchmarks import BENCHMARKS, PERPLEXITY
from moesaic.evaluation.own import SUFFIXES, HeldOutText, find_task

TASKS = (*BENCHMARKS, PERPLEXITY)
TEXT_METRIC = "bits_per_byte"
"""The one score of held-out text."""


@dataclass(frozen=True, kw_only=True)
class EvalRecipe:
    """What to measure."""

    checkpoint: str
    """Folder or hub id org/name[@revision], with a tokenizer."""
    suite: Any = None
    """Suite or task, several with commas between, or a YAML file. Default: emo-mc9, or what --task says."""
    task: tuple[str, ...] = ()
    """Task by name, or a YAML file: one's own or lm-eval's; repeatable."""
    data_dir: str | None = None
    """Folder with local rows. Default: the hub's data sets."""
    shots: int | None = None
    """Demonstrations, for all tasks. Default: the suite's."""
    limit: int | None = None
    """First rows of each task, subject or domain. Default: all."""
    selection: str | None = None
    """Use only the experts of this selection, or of a folder with one per category."""
    selection_share: float | None = None
    """Share of the rows that selections are made on, not evaluated. Default: suite's."""
    seed: int = 1234  # lm-eval's own, so that demonstrations are those of lm-eval called directly
    """Seed of the demonstrations that are drawn."""
    batch_size: int = 8
    """Texts at once; more is faster and needs more memory."""
    device: str | None = None
    """Where the model runs, such as cpu, cuda or cuda:1. Default: cuda if there is one, else cpu."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type that the model runs in; auto is the checkpoint's."""
    domain_field: str = "domain"
    """perplexity: the records' field with the domain; '' takes the file's name."""
    samples: str | None = None
    """JSON lines to write: every request, answer and score."""
    allow_code_execution: bool = False
    """humaneval, mbpp: run the programs that the model writes, without network."""

    def __post_init__(self) -> None:
        for key, value, least in (
            ("limit", self.limit, 1),
            ("batch-size", self.batch_size, 1),
            ("shots", self.shots, 0),
        ):
            if value is not None and value < least:
                raise MoesaicError(f"--{key}: must be at least {least}, got {value}")
        if self.task and self.suite is not None:
            raise MoesaicError(f"--task {self.task[0]}: cannot be given together with --suite; list both with --suite")
        if self.selection_share is not None and not 0.0 < self.selection_share < 1.0:
            raise MoesaicError(f"--selection-share {self.selection_share:g}: must be above 0 and below 1, such as 0.4")


@dataclass(frozen=True, kw_only=True)
class SuiteTask:
    """One task of a suite."""

    task: str
    """Name in `BENCHMARKS`, `perplexity`, or a task file (.yaml)."""
    shots: int | None = None
    """Demonstrations before each question; None: those of a task file, else 0."""
    metric: str | None = None
    """lm-eval's `metric,filter` that is shown as the score; None: the benchmark's."""

    def __post_init__(self) -> None:
        if self.task not in TASKS and not is_file(self.task):
            raise MoesaicError(f"task: {self.task!r} is unknown; {suggest(self.task, TASKS)}")
        if self.shots is None:
            object.__setattr__(self, "shots", find_task(self.task).shots or 0)
        elif self.shots < 0:
            raise MoesaicError(f"shots: must be 0 or more, got {self.shots}")
        if self.is_text and self.metric not in (None, TEXT_METRIC):
            raise MoesaicError(f"metric: the score of {PERPLEXITY} is {TEXT_METRIC}, got {self.metric!r}; leave it out")

    @property
    def name(self) -> str:
        """Under which its results are kept."""
        return find_task(self.task).name

    @property
    def is_text(self) -> bool:
        """Whether it measures text instead of asking questions."""
        return isinstance(find_task(self.task).task, HeldOutText)


@dataclass(frozen=True, kw_only=True)
class Average:
    """An unweighted mean over the tasks of a suite."""

    name: str
    without: tuple[str, ...] = ()
    """Tasks that are left out of it."""


@dataclass(frozen=True, kw_only=True)
class Suite:
    """A list of tasks that a paper reports together."""

    name: str
    about: str = ""
    """Where it comes from."""
    version: int = 1
    tasks: tuple[SuiteTask, ...]
    averages: tuple[Average, ...] = ()
    selection_share: float | None = None
    """Share of the rows that `moesaic select --split` uses; these are not evaluated. None: all rows are."""

    def __post_init__(self) -> None:
        names = [task.name for task in self.tasks]
        texts = [task.name for task in self.tasks if task.is_text]
        if not names:
            raise MoesaicError("tasks: a suite needs at least one")
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise MoesaicError(f"tasks: {twice[0]!r} is listed twice")
        for average in self.averages:
            if unknown := [name for name in average.without if name not in names]:
                raise MoesaicError(
                    f"averages: {average.name!r} leaves out {unknown[0]!r}; {suggest(unknown[0], names)}"
                )
            if taken := [name for name in texts if name not in average.without]:
                raise MoesaicError(
                    f"averages: {average.name!r} takes {taken[0]} in, whose score is no share; put it in `without`"
                )
        if self.selection_share is not None and not 0.0 < self.selection_share < 1.0:
            raise MoesaicError(f"selection_share: must be above 0 and below 1, got {self.selection_share}")


def load_suite(reference: str, *, shots: int | None = None) -> Suite:
    """A suite by name, a task by name, several of both with commas between, or a YAML file in the form of `Suite`.

    Args:
        reference: such as `emo-mc9`, `arc_easy,piqa` or `./mine.yaml`.
        shots: demonstrations of every task, instead of the suite's.

    Raises:
        MoesaicError: a name that is unknown (with the nearest), a file that is no suite, two suites that ask one task
            in different ways.
    """
    path = Path(reference).expanduser()
    if is_file(reference):
        suites = [_read(_beside(read_yaml(path), path.parent), path.stem, str(path))]
    else:
        suites = [_named(name.strip()) for name in reference.split(",")]
    if shots is not None:
        suites = [replace(one, tasks=tuple(replace(task, shots=shots) for task in one.tasks)) for one in suites]
    return _joined(reference, suites)


def chosen_suite(recipe: EvalRecipe) -> Suite:
    """What a call measures: its suite, or its tasks.

    Raises:
        MoesaicError: as `load_suite`; two tasks of one name.
    """
    if isinstance(recipe.suite, Suite):
        return recipe.suite
    if not recipe.task:
        return load_suite(recipe.suite or "emo-mc9", shots=recipe.shots)
    tasks = [SuiteTask(task=one, shots=recipe.shots) for one in recipe.task]
    return Suite(name=",".join(task.name for task in tasks), tasks=tuple(tasks))


def is_file(reference: str) -> bool:
    """Whether a suite or task is given by a file."""
    return Path(reference).suffix in SUFFIXES


def _of_task(name: str) -> Suite:
    task = SuiteTask(task=name)
    return Suite(name=task.name, tasks=(task,))


def _beside(values: Any, folder: Path) -> Any:
    """A suite's values with its task files as seen from the suite's own file."""
    tasks = values.get("tasks") if isinstance(values, dict) else None
    if not isinstance(tasks, list):
        return values
    placed = [
        one | {"task": str(folder / one["task"])} if isinstance(one, dict) and is_file(str(one.get("task"))) else one
        for one in tasks
    ]
    return values | {"tasks": placed}


def shipped() -> dict[str, Any]:
    """Name -> YAML file of the suites inside the package."""
    folder = files("moesaic.evaluation").joinpath("shipped_suites")
    return {file.name.removesuffix(".yaml"): file for file in folder.iterdir() if file.name.endswith(".yaml")}


def _named(name: str) -> Suite:
    known = shipped()
    if name in known:
        import yaml

        return _read(yaml.safe_load(known[name].read_text(encoding="utf-8")), name, name)
    if name in TASKS or is_file(name):
        return _of_task(name)
    hint = suggest(name, [*sorted(known), *TASKS])
    if not hint.startswith("did"):
        hint = f"suites: {', '.join(sorted(known))}; or a task such as arc_easy, or a .yaml file"
    raise MoesaicError(f"--suite {name}: no such suite or task; {hint}")


def _read(values: Any, name: str, where: str) -> Suite:
    if not isinstance(values, dict):
        raise MoesaicError(f"{where}: not a suite; expected the keys tasks and averages")
    return load_recipe(Suite, {"name": name, **values}, name=where)


def _joined(name: str, suites: list[Suite]) -> Suite:
    if len(suites) == 1:
        return suites[0]
    tasks = _agreed(name, suites)
    shares = {suite.selection_share for suite in suites}
    if len(shares) > 1:
        raise MoesaicError(
            f"--suite {name}: some of these leave out the rows of selections, some do not; run them apart"
        )
    return Suite(
        name=name,
        tasks=tuple(tasks.values()),
        averages=tuple(
            replace(average, name=f"{suite.name} {average.name}", without=_others(tasks, suite, average))
            for suite in suites
            for average in suite.averages
        ),
        selection_share=shares.pop(),
    )


def _agreed(name: str, suites: list[Suite]) -> dict[str, SuiteTask]:
    """The tasks of all suites by name; one with other shots or another metric in another suite is refused."""
    tasks: dict[str, SuiteTask] = {}
    owners: dict[str, str] = {}
    for suite in suites:
        for task in suite.tasks:
            first = tasks.setdefault(task.name, task)
            owner = owners.setdefault(task.name, suite.name)
            if first != task:
                raise MoesaicError(
                    f"--suite {name}: {task.name} is asked with {_how(first)} in {owner} and {_how(task)} in "
                    f"{suite.name}; run them apart, or give --shots"
                )
    return tasks


def _how(task: SuiteTask) -> str:
    return f"{task.shots} shots" + (f", {task.metric}," if task.metric else "")


def _others(tasks: dict[str, SuiteTask], suite: Suite, average: Average) -> tuple[str, ...]:
    own = {task.name for task in suite.tasks} - set(average.without)
    return tuple(name for name in tasks if name not in own)
