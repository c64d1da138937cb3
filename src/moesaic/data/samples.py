"""From a record to what is tokenised: a text, and which parts of it are trained on."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moesaic.common.errors import MoesaicError
from moesaic.data.readers import Record, missing_field
from moesaic.data.recipe import SourceRecipe

RenderChat = Callable[[list[dict[str, Any]], str], list["Sample"]]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A document before it is tokenised: a text, or token ids."""

    text: str = ""
    trained: tuple[tuple[int, int], ...] | None = None
    """Spans of characters that are trained on; None: all."""
    add_special_tokens: bool = True
    """Whether the tokenizer puts its own beginning (and end) around the text; a chat template has done it already."""
    ids: tuple[int, ...] | None = None
    """Given token ids, instead of a text."""
    where: str
    """The place it came from, for messages."""


def make_samples(record: Record, source: SourceRecipe, render_chat: RenderChat | None, vocab_size: int) -> list[Sample]:
    """The documents of a record: one, or none where its text is empty (a chat may give several, see `ChatRenderer`).

    Raises `MoesaicError` with the record's place for a field that is missing or has the wrong type.
    """
    for name in source.fields:
        if name not in record.fields:
            raise missing_field(record.where, name, record.fields)
    values = [record.fields[name] for name in source.fields]
    if source.kind == "chat":
        assert render_chat is not None
        return render_chat(_checked_messages(values[0], source.fields[0], record.where), record.where)
    if source.kind == "tokens":
        ids = _checked_ids(values[0], source.fields[0], record.where, vocab_size)
        return [Sample(ids=ids, where=record.where)] if ids else []
    texts = [_checked_text(value, name, record.where) for name, value in zip(source.fields, values, strict=True)]
    if not any(texts):
        return []
    if source.kind == "text":
        return [Sample(text=texts[0], where=record.where)]
    prompt, completion = texts
    text = prompt + completion
    return [Sample(text=text, trained=((len(prompt), len(text)),), where=record.where)]


def _checked_text(value: Any, name: str, where: str) -> str:
    if not isinstance(value, str):
        raise MoesaicError(f"{where}: field {name!r} must be a string, found {_type_name(value)}")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            found = f"a lone surrogate at character {error.start}"
            raise MoesaicError(f"{where}: field {name!r} is not valid Unicode ({found}); remove it") from error
    return value


def _checked_ids(value: Any, name: str, where: str, vocab_size: int) -> tuple[int, ...]:
    if not isinstance(value, list) or any(type(item) is not int for item in value):
        raise MoesaicError(f"{where}: field {name!r} must be a list of token ids, found {_type_name(value)}")
    if value and not (min(value) >= 0 and max(value) < vocab_size):
        wrong = next(item for item in value if not 0 <= item < vocab_size)
        raise MoesaicError(f"{where}: token id {wrong} is not in the tokenizer's vocabulary of {vocab_size}")
    return tuple(value)


def _checked_messages(value: Any, name: str, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        found = "an empty list" if value == [] else _type_name(value)
        raise MoesaicError(f"{where}: field {name!r} must be a list of {{role, content}}, found {found}")
    for index, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise MoesaicError(f"{where}: field {name!r}: message {index} has no role; expected {{role, content}}")
        if message.get("content") is not None or not message.get("tool_calls"):
            _checked_text(message.get("content"), f"{name}[{index}].content", where)
    return value


def _type_name(value: Any) -> str:
    return "null" if value is None else type(value).__name__
