"""docs/refusals.md lists what tasks, their rows and training recipes are refused with, in the words of the program.

The cases are those of the tests that are named there. `python -m tests.unit.test_refusals_page` writes the page anew.
"""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moesaic.common.errors import MoesaicError
from moesaic.common.recipe import load_recipe
from moesaic.evaluation.benchmarks import BENCHMARKS, Benchmark
from moesaic.evaluation.local import DataMissingError, read_local
from moesaic.evaluation.own import find_task
from moesaic.evaluation.recipe import load_suite
from moesaic.selection.recipe import SelectRecipe
from moesaic.selection.texts import calibration_sets
from moesaic.training.recipe import TrainRecipe
from moesaic.training.start import check_start
from tests.integration import test_tasks_everywhere as everywhere
from tests.integration import test_train_dry as dry
from tests.tiny_evals import write_evals, write_rows
from tests.tiny_models import save_tiny
from tests.tiny_moes import save_tiny_moe
from tests.tiny_training import tiny_recipe
from tests.unit.evaluation import test_local as local
from tests.unit.evaluation import test_own as own
from tests.unit.evaluation import test_recipe as suites

PAGE = Path(__file__).parents[2] / "docs" / "refusals.md"
_HEAD = """# What is refused, and in which words

One line each, status 2, before long work. `.` stands for a folder. This page is written by
`python -m tests.unit.test_refusals_page`, which asks for every line, and a test compares them.
"""


def _cases(test: Any) -> list[tuple[Any, ...]]:
    """What a test is parametrised by."""
    return [tuple(case) for mark in test.pytestmark if mark.name == "parametrize" for case in mark.args[1]]


def _line(folder: Path, call: Callable[[], object]) -> str:
    try:
        call()
    except (MoesaicError, DataMissingError) as error:
        said = str(error)
        assert "\n" not in said
        return said.replace(str(folder), ".").replace("|", "\\|")
    raise AssertionError("was not refused")


def _own_rows(folder: Path) -> Iterator[tuple[str, str]]:
    for text, row, _ in _cases(own.test_rows_that_do_not_fit_are_refused_by_row_and_field):
        file = own._task(folder, text, [row])

        def read(file: Path = file) -> object:
            task = find_task(str(file)).task
            assert isinstance(task, Benchmark)
            return read_local("mine", task, None, shots=0)

        yield f"{_code(text)} with {_code(row)}", _line(folder, read)


def _own_files(folder: Path) -> Iterator[tuple[str, str]]:
    write_rows(folder / "rows.jsonl", [{"question": "q"}])
    for text, _ in _cases(own.test_task_files_that_are_none_are_refused):
        (folder / "mine.yaml").write_text(text)
        yield _code(text), _line(folder, lambda: find_task(str(folder / "mine.yaml")))


def _local_rows(folder: Path) -> Iterator[tuple[str, str]]:
    for task, row, _ in _cases(local.test_rows_of_something_else_are_refused_with_their_line):
        write_rows(folder / f"{task}.validation.jsonl", [row])
        yield (
            f"`{task}`: {_code(row)}",
            _line(folder, lambda task=task: read_local(task, BENCHMARKS[task], folder, shots=0)),
        )
    for task, split, row, _ in _cases(local.test_a_field_of_another_type_is_refused_by_row_and_field):
        for file in folder.glob("*.jsonl"):
            file.unlink()
        write_rows(folder / f"{BENCHMARKS[task].files or task}.{split}.jsonl", [row])
        yield (
            f"`{task}`: {_code(row)}",
            _line(folder, lambda task=task: read_local(task, BENCHMARKS[task], folder, shots=0)),
        )


def _names(folder: Path) -> Iterator[tuple[str, str]]:
    for reference, _ in _cases(suites.test_unknown_names):
        yield f"`--suite {reference}`", _line(folder, lambda reference=reference: load_suite(reference))


def _calibration(folder: Path) -> Iterator[tuple[str, str]]:
    write_evals(folder, rows=10)
    for options, _ in _cases(everywhere.test_refusals):
        given = {name: (value,) if name in ("task", "data") else value for name, value in options.items()}

        def read(given: dict[str, Any] = given) -> object:
            return calibration_sets(SelectRecipe(checkpoint="moe", keep="4", data_dir=str(folder), **given))

        flags = " ".join(f"--{name} {value}" for name, value in options.items())
        yield f"`select {flags}`", _line(folder, read)


def _training(folder: Path) -> Iterator[tuple[str, str]]:
    save_tiny(folder / "dense", "llama")
    save_tiny_moe(folder / "olmoe", "olmoe", num_experts=6)
    save_tiny_moe(folder / "deepseek", "deepseek_v3")
    for name, changes, _ in dry.CASES.values():
        values = tiny_recipe(
            folder / "in", **({"losses": {}} | changes | {"model": str(folder / name), "tokenizer": None})
        )
        yield (
            f"{name}: {_code(changes)}",
            _line(folder, lambda values=values: check_start(load_recipe(TrainRecipe, values))),
        )


def _code(value: object) -> str:
    text = value.strip().replace("\n", "; ") if isinstance(value, str) else str(value).replace("'", '"')
    return f"`{text}`".replace("|", "\\|")


PARTS: dict[str, tuple[str, Callable[[Path], Iterator[tuple[str, str]]]]] = {
    "Task files": ("`eval --task FILE`", _own_files),
    "Rows of own tasks": ("task file, with a row", _own_rows),
    "Rows of shipped tasks": ("task and row", _local_rows),
    "Suites": ("call", _names),
    "Tasks to calibrate on": ("call", _calibration),
    "Recipes that do not fit their model (`train`, `train --dry-run` and `plan` alike)": ("model and keys", _training),
}


def page() -> str:
    """The page as the code has it."""
    lines = [_HEAD]
    for title, (what, cases) in PARTS.items():
        lines += [f"## {title}\n", f"| {what} | line |", "|---|---|"]
        with tempfile.TemporaryDirectory() as folder:
            lines += [f"| {given} | {said} |" for given, said in cases(Path(folder))]
        lines.append("")
    return "\n".join(lines)


@pytest.mark.filterwarnings("ignore")  # what lm-eval and its packages warn of is theirs
def test_the_page_has_every_line():
    assert page() == PAGE.read_text(encoding="utf-8"), "run: python -m tests.unit.test_refusals_page"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
