"""Tasks of one's own, from a YAML file without code, and lm-eval's task files by path. Torch-free.

An own task becomes a `Benchmark` like the shipped ones: its rows, of any fields, are made into one form here, and
lm-eval asks and scores them.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import xxhash
import yaml

from moesaic.common.errors import MoesaicError, suggest
from moesaic.common.files import explained
from moesaic.common.recipe import load_recipe
from moesaic.data.calibration import fields_of, fill
from moesaic.evaluation import rows
from moesaic.evaluation.answers import gold_index, matches
from moesaic.evaluation.benchmarks import BENCHMARKS, PERPLEXITY, Benchmark
from moesaic.evaluation.tasks import LETTERS, Row, lettered_choices

SUFFIXES = (".yaml", ".yml")
_LM_EVAL = ("dataset_path", "output_type", "doc_to_text", "include", "custom_dataset")
"""Keys that only a task file of lm-eval's has."""
_MEAN = {"aggregation": "mean", "higher_is_better": True}


@dataclass(frozen=True, kw_only=True)
class HeldOutText:
    """Text whose likelihood is measured."""

    path: Path | None = None
    """None: the held-out files of the folder with the data."""
    text: str = "text"
    domain: str | None = None
    """Field with the domain; None: as the call says."""


@dataclass(frozen=True, kw_only=True)
class OwnTask:
    """What a task file says."""

    kind: Literal["choice", "generation", "perplexity"]
    """Which choice is likelier, what is answered, or how likely a text is."""
    data: str
    """Rows: .jsonl, .parquet or .csv, compressed or not; a path is seen from the task file."""
    demonstrations: str | None = None
    """Rows that demonstrations are drawn from."""
    shots: int = 0
    """Demonstrations before each question."""
    title: str | None = None
    """Name of its column in tables; default: the file's stem."""
    prompt: str | None = None
    """Text with {field} or {field[0]} for fields of a row, and {lettered} for the lines `A. ...` of its choices."""
    question: str = "question"
    """Field with the question."""
    choices: str | tuple[str, ...] = "choices"
    """Field with the list of choices, or a list of fields with one each."""
    answer: str = "answer"
    """Field with the answer; of a generation, one or a list of those that are right."""
    answer_is: Literal["letter", "index", "text"] | None = None
    """How a choice's answer is given, index from 0; default: seen from its value."""
    scored: Literal["letter", "text"] = "letter"
    """Whether the likelihoods of the letters or of the choices' texts are compared."""
    metric: Literal["exact", "number"] = "exact"
    """When a generation is right: the same text but for white space around it, or the same number."""
    extract: str | None = None
    """Regular expression whose first group, or else the whole of it, is the answer in the generated text."""
    take: Literal["first", "last"] = "last"
    """Which match of it."""
    until: tuple[str, ...] = ("\n",)
    """Texts that end a generation."""
    max_tokens: int = 256
    """Most tokens of a generation."""
    text: str = "text"
    """Field with the text, of perplexity."""
    domain: str = ""
    """Field with the text's domain; '' takes the file's name."""

    def __post_init__(self) -> None:
        if self.shots < 0 or (self.shots and self.kind == "perplexity"):
            raise MoesaicError(f"shots must be 0 or more, and of a perplexity 0, got {self.shots}")
        if self.shots and self.demonstrations is None:
            raise MoesaicError("demonstrations is needed with shots: the file that they are drawn from")
        if self.max_tokens < 1:
            raise MoesaicError(f"max_tokens must be at least 1, got {self.max_tokens}")
        try:
            re.compile(self.extract or "")
        except re.error as error:
            raise MoesaicError(f"extract is no regular expression ({error}), got {self.extract!r}") from error


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a name or a file stands for."""

    name: str
    """Under which results are kept."""
    shots: int | None
    """Its own number of demonstrations; None: 0, or a suite's."""
    task: Benchmark | HeldOutText


def find_task(reference: str) -> Found:
    """A shipped task by its name, or a task file: one's own, or one of lm-eval's.

    Raises:
        MoesaicError: an unknown name (with the nearest), a file that is no task.
    """
    if reference == PERPLEXITY:
        return Found(name=PERPLEXITY, shots=None, task=HeldOutText())
    if reference in BENCHMARKS:
        return Found(name=reference, shots=None, task=BENCHMARKS[reference])
    path = Path(reference).expanduser()
    if path.suffix not in SUFFIXES:
        raise MoesaicError(
            f"{reference}: no such task; {suggest(reference, [*BENCHMARKS, PERPLEXITY])}; `moesaic eval --list` lists "
            "them, and a .yaml file describes one of your own"
        )
    values = _read(path)
    if any(key in values for key in _LM_EVAL):
        return _of_lm_eval(path, values)
    task = load_recipe(OwnTask, values, name=str(path))
    return Found(name=path.stem, shots=task.shots, task=_from_own(task, path))


def definition_of(reference: str) -> dict[str, str]:
    """What results say of a task file: the hash of its bytes. Nothing of a shipped task, whose version they have."""
    path = Path(reference).expanduser()
    if path.suffix not in SUFFIXES:
        return {}
    with explained(path):
        return {"definition": xxhash.xxh3_128_hexdigest(path.read_bytes())}


def is_task(reference: str) -> bool:
    """Whether a text names a task, and not a file or folder of data."""
    path = Path(reference)
    return path.suffix in SUFFIXES or (reference in (*BENCHMARKS, PERPLEXITY) and not path.exists())


def task_name(reference: str) -> str:
    """Under which a task's results and statistics are kept."""
    return find_task(reference).name


class _Loader(yaml.SafeLoader):
    """Plain data, and lm-eval's `!function` as its text."""


_LOADER: Any = _Loader
_LOADER.add_multi_constructor("!", lambda _loader, tag, node: f"!{tag} {node.value}")


def _read(path: Path) -> dict[str, Any]:
    with explained(path):
        text = path.read_text(encoding="utf-8")
    try:
        values = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise MoesaicError(f"{path}: not YAML ({error})") from error
    if not isinstance(values, dict):
        raise MoesaicError(f"{path}: not a task; expected keys such as kind and data")
    return values


def _of_lm_eval(path: Path, values: Mapping[str, Any]) -> Found:
    name = values.get("task")
    if not isinstance(name, str) or "class" in values:
        raise MoesaicError(f"{path}: a group or Python class of lm-eval's; give the file of one task")
    if values.get("unsafe_code"):
        raise MoesaicError(
            f"{path}: runs programs that the model writes, and lm-eval does not isolate them; not by path"
        )
    training = values.get("training_split")
    benchmark = Benchmark(title=name, metric="", fields={}, definition=path, shot_split=training)
    return Found(name=name, shots=int(values.get("num_fewshot") or 0), task=benchmark)


def _from_own(task: OwnTask, file: Path) -> Benchmark | HeldOutText:
    # `os.path` leaves a home folder that there is not as it is: no such file, then.
    place = {"test": file.parent / os.path.expanduser(task.data)}  # noqa: PTH111
    if task.demonstrations is not None:
        place["train"] = file.parent / os.path.expanduser(task.demonstrations)  # noqa: PTH111
    for path in place.values():
        if not path.is_file():
            raise MoesaicError(f"{file}: no such file {path}; paths are seen from the task file")
    if task.kind == "perplexity":
        return HeldOutText(path=place["test"], text=task.text, domain=task.domain)
    make = {"choice": _choice, "generation": _generation}[task.kind]
    return make(task, title=task.title or file.stem, paths=place)


def _named_choice(task: OwnTask, number: int) -> str:
    """The field of a choice."""
    return f"{task.choices}.{number}" if isinstance(task.choices, str) else task.choices[number]


def _choice(task: OwnTask, *, title: str, paths: Mapping[str, Path]) -> Benchmark:
    by_letter = task.scored == "letter"
    template = task.prompt or (
        f"{{{task.question}}}\n{{lettered}}\nAnswer:" if by_letter else f"Question: {{{task.question}}}\nAnswer:"
    )
    several = tuple[str | int | float, ...]
    given = {task.choices: several} if isinstance(task.choices, str) else dict.fromkeys(task.choices, str | int | float)

    def adapt(row: Row) -> Iterator[Row]:
        named = [row[task.choices]] if isinstance(task.choices, str) else [[row[name] for name in task.choices]]
        texts = [str(choice).strip() for choice in named[0]]
        if not isinstance(task.choices, str):  # a table has the columns of its longest row
            texts = texts[: max((number for number, text in enumerate(texts, start=1) if text), default=0)]
        if "" in texts:
            raise MoesaicError(f"{_named_choice(task, texts.index(''))}: is empty; give every choice a text")
        if not 2 <= len(texts) <= len(LETTERS):
            raise MoesaicError(f"{task.choices}: expected 2 to {len(LETTERS)} choices, got {len(texts)}")
        gold = gold_index(row[task.answer], texts, field=task.answer, kind=task.answer_is)
        letters = list(LETTERS[: len(texts)])
        request = _filled(template, row, lettered=lettered_choices(texts))
        yield {"request": request, "continuations": letters if by_letter else texts, "gold": gold}

    metrics = ("acc",) if by_letter else ("acc", "acc_norm")
    return Benchmark(
        title=title,
        fields={"request": str, "continuations": rows.Texts, "gold": int},
        local=_asked(template, task) | given | {task.answer: int | str},
        adapt=adapt,
        paths=paths,
        shot_split="train" if "train" in paths else None,
        demonstrations=None if "train" in paths else 0,
        config={
            "output_type": "multiple_choice",
            "doc_to_text": lambda row: row["request"],
            "doc_to_choice": lambda row: list(row["continuations"]),
            "doc_to_target": lambda row: row["gold"],
            "metric_list": [{"metric": metric, **_MEAN} for metric in metrics],
            "metadata": {"version": 1.0},
        },
    )


def _generation(task: OwnTask, *, title: str, paths: Mapping[str, Path]) -> Benchmark:
    template = task.prompt or f"Question: {{{task.question}}}\nAnswer:"
    one = str | int | float

    def adapt(row: Row) -> Iterator[Row]:
        answers = row[task.answer] if isinstance(row[task.answer], list) else [row[task.answer]]
        if not answers:
            raise MoesaicError(f"{task.answer}: the list is empty; give at least one answer")
        yield {"request": _filled(template, row), "answers": [str(answer) for answer in answers]}

    return Benchmark(
        title=title,
        metric="exact_match,none",
        fields={"request": str, "answers": rows.Texts},
        local=_asked(template, task) | {task.answer: one | tuple[one, ...]},
        adapt=adapt,
        paths=paths,
        shot_split="train" if "train" in paths else None,
        demonstrations=None if "train" in paths else 0,
        config={
            "output_type": "generate_until",
            "doc_to_text": lambda row: row["request"],
            "doc_to_target": lambda row: row["answers"][0],
            "process_results": _scorer(task),
            "generation_kwargs": {
                "until": list(task.until),
                "max_gen_toks": task.max_tokens,
                "do_sample": False,
                "temperature": 0.0,
            },
            "metric_list": [{"metric": "exact_match", **_MEAN}],
            "metadata": {"version": 1.0},
        },
    )


def _scorer(task: OwnTask) -> Callable[[Mapping[str, Any], Sequence[str]], dict[str, float]]:
    def results(doc: Mapping[str, Any], generated: Sequence[str]) -> dict[str, float]:
        right = matches(generated[0], doc["answers"], metric=task.metric, extract=task.extract, take=task.take)
        return {"exact_match": float(right)}

    return results


def _asked(template: str, task: OwnTask) -> dict[str, Any]:
    """The types of the fields that a prompt names; the question is text."""
    return {
        name: str if name == task.question else Any
        for name in fields_of(template)
        if name != "lettered" and name != task.answer
    }


def _filled(template: str, row: Row, **more: str) -> str:
    known = {name: value.strip() if isinstance(value, str) else value for name, value in row.items()}
    return fill(template, known | more)
