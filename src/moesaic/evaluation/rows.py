"""From the rows of local files to the rows that lm-eval's tasks expect of the hub's data sets. Pure functions.

Local multiple-choice rows are `{question, choices, answer (index)[, context, subject]}`. A row that is no such one is
taken as it is: it must then have the hub's fields.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

Row = dict[str, Any]
Adapter = Callable[[Row], Iterator[Row]]

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def is_choice(row: Mapping[str, Any]) -> bool:
    """Whether a row is a local multiple-choice one, with an answer that is one of its choices."""
    choices, answer = row.get("choices"), row.get("answer")
    return isinstance(choices, list) and type(answer) is int and 0 <= answer < len(choices)


def as_is(row: Row) -> Iterator[Row]:
    """The row itself."""
    yield row


def lettered(question: str) -> Adapter:
    """ARC, OpenBookQA and CommonsenseQA: choices with letters; `question` is the hub's name of that field."""

    def adapt(row: Row) -> Iterator[Row]:
        choices = row["choices"]
        yield {
            "id": str(row.get("id", "")),
            question: row["question"],
            "choices": {"text": choices, "label": list(_LETTERS[: len(choices)])},
            "answerKey": _LETTERS[row["answer"]],
        }

    return adapt


def yes_or_no(row: Row) -> Iterator[Row]:
    """BoolQ: the label says whether the answer is yes."""
    yield {
        "question": row["question"],
        "passage": row["context"],
        "label": int(row["choices"][row["answer"]].strip().lower() == "yes"),
    }


def two_solutions(row: Row) -> Iterator[Row]:
    """PIQA."""
    first, second = row["choices"]
    yield {"goal": row["question"], "sol1": first, "sol2": second, "label": row["answer"]}


def three_answers(row: Row) -> Iterator[Row]:
    """SocialIQA, whose label counts from 1."""
    first, second, third = row["choices"]
    answers = {"answerA": first, "answerB": second, "answerC": third}
    yield {"context": row["context"], "question": row["question"], **answers, "label": str(row["answer"] + 1)}


def two_options(row: Row) -> Iterator[Row]:
    """WinoGrande: the sentence with `_` is the question."""
    first, second = row["choices"]
    yield {"sentence": row["question"], "option1": first, "option2": second, "answer": str(row["answer"] + 1)}


def endings(row: Row) -> Iterator[Row]:
    """HellaSwag, whose local rows are already what lm-eval makes of the hub's."""
    yield {"query": row["question"], "choices": row["choices"], "label": str(row["answer"])}


def subject_question(row: Row) -> Iterator[Row]:
    """MMLU and MMLU-Pro."""
    yield {name: row[name] for name in ("question", "choices", "answer", "subject")}


def input_target(row: Row) -> Iterator[Row]:
    """BIG-Bench Hard."""
    yield {"input": row["question"], "target": row["answer"], "task": row["task"]}


def paragraph_questions(row: Row) -> Iterator[Row]:
    """SQuAD: a row per question of a paragraph; no answer means that the paragraph does not say it."""
    for asked in row["qas"]:
        yield {
            "id": asked["id"],
            "title": row["title"],
            "context": row["context"],
            "question": asked["question"],
            "answers": {"text": list(asked["answers"])},
        }


def problem_with_id(row: Row) -> Iterator[Row]:
    """HumanEval and MBPP: the fields have the hub's names already."""
    yield {name: value for name, value in row.items() if name != "id"} | {"task_id": row["id"]}
