"""Which choice an answer means, and whether a generated answer is right. Pure functions."""

import re
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from typing import Literal

from moesaic.common.errors import MoesaicError
from moesaic.evaluation.tasks import LETTERS

_NUMBER = r"-?\$?\d[\d,]*(?:\.\d+)?|-?\$?\.\d+"


def gold_index(answer: int | str, choices: Sequence[str], *, field: str, kind: str | None) -> int:
    """The number of the choice that an answer means: its index from 0, its letter, or its text.

    Args:
        answer: as the row gives it.
        choices: texts of all choices.
        field: name of the answer's field, for messages.
        kind: `index`, `letter` or `text`; None: whichever fits, and the readings must agree.

    Raises:
        MoesaicError: it means no choice, or several.
    """
    readings = {"index": _by_index, "letter": _by_letter, "text": _by_text}
    asked = {kind: readings[kind]} if kind is not None else readings
    found = {name: place for name, read in asked.items() if (place := read(answer, choices)) is not None}
    if not found:
        what = kind or "index from 0, letter or text"
        raise MoesaicError(f"{field}: must be the {what} of one of the {len(choices)} choices, got {answer!r}")
    if len(set(found.values())) > 1:
        raise MoesaicError(
            f"{field}: {answer!r} means one choice as {' and another as '.join(found)}; say which with answer_is"
        )
    return next(iter(found.values()))


def _by_index(answer: int | str, choices: Sequence[str]) -> int | None:
    text = str(answer).strip()
    return int(text) if text.isdecimal() and int(text) < len(choices) else None


def _by_letter(answer: int | str, choices: Sequence[str]) -> int | None:
    text = str(answer).strip().strip("().").upper()
    return LETTERS.index(text) if len(text) == 1 and text in LETTERS[: len(choices)] else None


def _by_text(answer: int | str, choices: Sequence[str]) -> int | None:
    text = str(answer).strip()
    return choices.index(text) if isinstance(answer, str) and choices.count(text) == 1 else None


def matches(
    generated: str,
    answers: Sequence[str],
    *,
    metric: Literal["exact", "number"],
    extract: str | None,
    take: Literal["first", "last"],
) -> bool:
    """Whether a generated text is one of the right answers.

    The answer is what `extract` finds in the text; without it all of the text, or its last number where numbers are
    compared. The number of a right answer is its last one, so `... #### 51` is 51.

    >>> matches("so it is $1,051.0.", ["1051"], metric="number", extract=None, take="last")
    True
    """
    found = _extracted(generated, extract, take)
    if metric == "exact":
        return found is not None and found in [answer.strip() for answer in answers]
    number = None if found is None else last_number(found)
    return number is not None and number in [last_number(answer) for answer in answers]


def _extracted(generated: str, extract: str | None, take: str) -> str | None:
    if extract is None:
        return generated.strip()
    found = list(re.finditer(extract, generated))
    if not found:
        return None
    match = found[0 if take == "first" else -1]
    return next((group for group in match.groups() if group), match[0]).strip()


def last_number(text: str) -> Decimal | None:
    """The last number of a text, without `$` and the commas between thousands; 51 and 51.0 are equal."""
    found = re.findall(_NUMBER, text)
    if not found:
        return None
    try:
        return Decimal(re.sub(r"[$,]", "", found[-1]))
    except InvalidOperation:
        return None
