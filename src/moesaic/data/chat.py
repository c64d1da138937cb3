"""Chats as training documents: the text that the chat template makes, and where in it the assistant speaks."""

import re
from typing import TYPE_CHECKING, Any

from moesaic.common.errors import MoesaicError
from moesaic.data.samples import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Templates that print today's date would make the cache depend on the day. It is always this one.
_FIXED_DATE = (("%Y", "2025"), ("%m", "01"), ("%d", "01"), ("%b", "Jan"), ("%B", "January"), ("%H", "00"), ("%M", "00"))
_CLOCK = "{{%- macro strftime_now(format) -%}}{{{{ format{replacements} }}}}{{%- endmacro -%}}"

Span = tuple[int, int]


class ChatRenderer:
    """Renders a chat with the tokenizer's template and finds the text of the assistant's turns, the part trained on.

    - A template that marks them with `{% generation %}` says it itself.
    - Otherwise a turn is what the chat up to and with it has beyond the chat before it with the generation prompt: what
      the model has to write, its end-of-turn token included. It is verified that each is a prefix of the next.
    - Templates that write earlier turns differently once others follow (Qwen3 drops their thinking) fail that check.
    Their
      chats become one document per assistant turn: the chat so far, with only its last turn trained on. That is what
      such a model sees when it answers.
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
