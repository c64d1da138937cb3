"""From a record to what is tokenised: a text, or a chat as its template writes it, and which parts are trained on."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moesaic.common.errors import MoesaicError
from moesaic.data.files import Record, missing_field
from moesaic.data.recipe import SourceRecipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RenderChat = Callable[[list[dict[str, Any]], str], list["Sample"]]
Span = tuple[int, int]

# Templates that print today's date would make the cache depend on the day. It is always this one.
_FIXED_DATE = (("%Y", "2025"), ("%m", "01"), ("%d", "01"), ("%b", "Jan"), ("%B", "January"), ("%H", "00"), ("%M", "00"))
_CLOCK = "{{%- macro strftime_now(format) -%}}{{{{ format{replacements} }}}}{{%- endmacro -%}}"


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A document before it is tokenised: a text, or token ids."""

    text: str = ""
    trained: tuple[Span, ...] | None = None
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
    where = record.where
    for name in source.fields:
        if name not in record.fields:
            raise missing_field(where, name, record.fields)
    values = [record.fields[name] for name in source.fields]
    if source.kind == "chat":
        assert render_chat is not None
        return render_chat(_checked_messages(values[0], source.fields[0], where), where)
    if source.kind == "tokens":
        ids = _checked_ids(values[0], source.fields[0], where, vocab_size)
        return [Sample(ids=ids, where=where)] if ids else []
    texts = [_checked_text(value, name, where) for name, value in zip(source.fields, values, strict=True)]
    if not any(texts):
        return []
    text = "".join(texts)
    trained = None if source.kind == "text" else ((len(texts[0]), len(text)),)  # of prompt and completion, the latter
    return [Sample(text=text, trained=trained, where=where)]


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


class ChatRenderer:
    """Renders a chat with the tokenizer's template and finds the text of the assistant's turns, the part trained on.

    - A template that marks them with `{% generation %}` says it itself.
    - Otherwise a turn is what the chat up to and with it has beyond the chat before it with the generation prompt: what
      the model has to write, its end-of-turn token included. It is verified that each is a prefix of the next.
    - Templates that write earlier turns differently once others follow (Qwen3 drops their thinking) fail that check.
      Their chats become one document per assistant turn: the chat so far, with only its last turn trained on. That is
      what such a model sees when it answers.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        try:
            template = tokenizer.get_chat_template()
        except ValueError as error:
            raise MoesaicError(
                f"{tokenizer.name_or_path}: the tokenizer has no chat template; add chat_template.jinja to its folder"
            ) from error
        self.template = _with_fixed_date(template)
        self._tokenizer = tokenizer
        self._marks_turns = re.search(r"\{%-?\s*generation\s*-?%\}", template) is not None
        added = tokenizer.added_tokens_decoder.values()
        self._special_texts = tuple(token.content for token in added if token.special)

    def __call__(self, messages: list[dict[str, Any]], where: str) -> list[Sample]:
        """The documents of a chat; `where` is its place, for messages."""
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns:
            raise MoesaicError(f"{where}: the chat has no assistant message, so there is nothing to train on")
        if self._marks_turns:
            text, spans = self._render_marked(messages, where)
            return [_sample(text, spans, where)]
        spans = [self._turn(messages[: turn + 1], where) for turn in turns]
        text = self._render(messages, where)
        if all(text.startswith(prefix) for prefix, _ in spans):
            return [_sample(text, [span for _, span in spans], where)]
        return [_sample(prefix, [span], where) for prefix, span in spans]

    def _turn(self, messages: list[dict[str, Any]], where: str) -> tuple[str, Span]:
        """The text of a chat that ends with an assistant's turn, and the span of that turn in it."""
        before = self._render(messages[:-1], where, add_generation_prompt=True)
        text = self._render(messages, where)
        if not text.startswith(before) or len(text) == len(before):
            raise MoesaicError(
                f"{where}: the chat template does not put the answer after the generation prompt; "
                "mark the assistant's text with {% generation %} in the template"
            )
        end = len(text.rstrip())
        # A line break after the end-of-turn token is the template's, not the model's.
        return text, (len(before), end if text[:end].endswith(self._special_texts) else len(text))

    def _render(self, messages: list[dict[str, Any]], where: str, *, add_generation_prompt: bool = False) -> str:
        if not messages:
            raise MoesaicError(f"{where}: the chat begins with the assistant; put a system or user message before it")
        try:
            text = self._tokenizer.apply_chat_template(
                messages, chat_template=self.template, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except Exception as error:  # a template may raise anything
            raise _template_error(where, error) from error
        assert isinstance(text, str)
        return text

    def _render_marked(self, messages: list[dict[str, Any]], where: str) -> tuple[str, list[Span]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        tokens: dict[str, Any] = dict(self._tokenizer.special_tokens_map)
        try:
            texts, spans = render_jinja_template(
                [messages], chat_template=self.template, return_assistant_tokens_mask=True, **tokens
            )
        except Exception as error:
            raise _template_error(where, error) from error
        marked = [(int(start), int(stop)) for start, stop in spans[0]]
        if not marked:
            raise MoesaicError(f"{where}: the chat template marks nothing as the assistant's; check {{% generation %}}")
        return texts[0], marked


def _sample(text: str, spans: list[Span], where: str) -> Sample:
    return Sample(text=text, trained=tuple(spans), add_special_tokens=False, where=where)


def _with_fixed_date(template: str) -> str:
    if "strftime_now" not in template:
        return template
    replacements = "".join(f"|replace('{code}','{text}')" for code, text in _FIXED_DATE)
    return _CLOCK.format(replacements=replacements) + template


def _template_error(where: str, error: Exception) -> MoesaicError:
    return MoesaicError(f"{where}: the chat template refuses the chat ({str(error).splitlines()[0]})")
