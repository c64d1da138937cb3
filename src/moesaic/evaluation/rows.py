"""Of which types the fields of rows are, and what one field says of another. Torch-free.

A string is a sequence of strings to Python, and was scored as one; so every field that a task reads has a type here,
and a row of another type is refused with its line and field.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, Literal, get_args

from moesaic.common.errors import MoesaicError

Types = Mapping[str, Any]
"""Field -> its type, in the way of recipes. A field that may be missing has None among its types."""
Check = Callable[[Mapping[str, Any]], None]

Texts = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Lettered:
    """Choices with their letters."""

    text: Texts
    label: Texts


@dataclass(frozen=True, kw_only=True)
class AnswerTexts:
    """SQuAD's answers on the hub: one object of lists."""

    text: Texts


@dataclass(frozen=True, kw_only=True)
class AnswerText:
    """An answer in SQuAD's own files."""

    text: str


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A question about a paragraph."""

    question: str
    id: str = ""
    answers: tuple[str | AnswerText, ...] | AnswerTexts = ()


@dataclass(frozen=True, kw_only=True)
class Aliases:
    """TriviaQA's answer."""

    value: str
    aliases: Texts


@dataclass(frozen=True, kw_only=True)
class Turns:
    """One side of CoQA's conversations."""

    input_text: Texts


@dataclass(frozen=True, kw_only=True)
class Date:
    """A date of DROP, its parts empty where there is none."""

    day: str
    month: str
    year: str


@dataclass(frozen=True, kw_only=True)
class Found:
    """DROP's answer: a number, a date or spans."""

    number: str
    date: Date
    spans: Texts


@dataclass(frozen=True, kw_only=True)
class AllFound:
    """The answers of other people, one list for each part."""

    number: Texts
    date: tuple[Date, ...]
    spans: tuple[Texts, ...]


CHOICE: dict[str, Any] = {"question": str, "choices": Texts, "answer": int, "context": str | None}
TWO_CHOICES: dict[str, Any] = CHOICE | {"choices": tuple[str, str]}
THREE_CHOICES: dict[str, Any] = CHOICE | {"choices": tuple[str, str, str], "context": str}
PARAGRAPH: Types = {"qas": tuple[Asked, ...], "context": str, "title": str | None}

FIRST_OR_SECOND = Literal[0, 1]


def lacking(types: Types, row: Mapping[str, Any]) -> list[str]:
    """The fields that a row must have and has not."""
    return [name for name, kind in types.items() if name not in row and NoneType not in get_args(kind)]


def index_of(choices: str, answer: str = "answer") -> Check:
    """The answer is the number of one of the choices, counted from 0."""

    def check(row: Mapping[str, Any]) -> None:
        number = len(row[choices])
        if not 0 <= int(row[answer]) < number:
            raise MoesaicError(f"{answer}: must be the index of one of the {number} choices, got {row[answer]!r}")

    return check


def one_of(answer: str, allowed: Callable[[Mapping[str, Any]], Sequence[str]]) -> Check:
    """The answer is one of those that the row itself names."""

    def check(row: Mapping[str, Any]) -> None:
        if row[answer] not in allowed(row):
            raise MoesaicError(f"{answer}: must be one of {', '.join(allowed(row))}, got {row[answer]!r}")

    return check


def at_least_one(answers: str) -> Check:
    """There is an answer."""

    def check(row: Mapping[str, Any]) -> None:
        if not row[answers]:
            raise MoesaicError(f"{answers}: the list is empty; give at least one answer")

    return check
