"""What to train and validate on: the `data` part of a training recipe. Free of torch."""

import math
import re
from dataclasses import dataclass, replace
from typing import Literal

from moesaic.common.errors import MoesaicError

FileFormat = Literal["auto", "jsonl", "parquet", "text"]
SampleKind = Literal["text", "chat", "prompt", "tokens"]

BY_NAME = "auto"
"""A domain that is left out; no source has it once the recipe is read."""


@dataclass(frozen=True, kw_only=True)
class SourceRecipe:
    """One source of documents.

    Name at most one of `messages`, `prompt` with `completion`, and `tokens`; without them, the documents are the plain
    texts of the field `text`. Text files are one document each and have no fields.
    """

    path: str
    """A file, a folder, or a hub data set `hf://org/name[@revision][:config][:split]` (split: train by default)."""
    domain: str = BY_NAME
    """The name under which losses are reported. Several sources may share one. `auto`: the name of the file, folder or
    data set up to its first dot."""
    weight: float = 1.0
    """Share of the sequences, relative to the other sources. Not used in validation, nor with `epochs`."""
    format: FileFormat = "auto"
    """`auto`: by the file's ending (.jsonl, .ndjson, .json: JSON lines; .parquet; .txt, .md), .gz and .zst included."""
    text: str = "text"
    """The field with the text of a document; all of it is trained on."""
    messages: str | None = None
    """The field with a chat, a list of `{role, content}`: rendered by the chat template, assistant turns trained on."""
    prompt: str | None = None
    """The field with a prompt, which is not trained on."""
    completion: str | None = None
    """The field with the text that follows the prompt."""
    tokens: str | None = None
    """The field with the token ids of a document that is tokenised already."""

    def __post_init__(self) -> None:
        if not self.path:
            raise MoesaicError("path is empty; give a file, a folder or hf://org/name")
        if not self.domain:
            raise MoesaicError("domain is empty; leave it out, or give the data a name, such as math")
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise MoesaicError(f"weight must be a positive number, got {self.weight}; leave a source out instead")
        if (self.prompt is None) != (self.completion is None):
            missing, present = ("prompt", "completion") if self.prompt is None else ("completion", "prompt")
            raise MoesaicError(f"{missing} is missing: {present} is given, and the two go together")
        chosen = [name for name in ("messages", "prompt", "tokens") if getattr(self, name) is not None]
        if len(chosen) > 1:
            raise MoesaicError(f"{chosen[1]} cannot be given together with {chosen[0]}; use one source for each kind")
        if chosen and self.format == "text":
            raise MoesaicError(f"{chosen[0]} has no meaning with format: text, because text files have no fields")

    @property
    def kind(self) -> SampleKind:
        """How a record becomes a document."""
        if self.messages is not None:
            return "chat"
        if self.prompt is not None:
            return "prompt"
        return "text" if self.tokens is None else "tokens"

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields that are read from a record."""
        named = tuple(name for name in (self.messages, self.prompt, self.completion, self.tokens) if name is not None)
        return named or (self.text,)


@dataclass(frozen=True, kw_only=True)
class DataRecipe:
    """All the data of a run."""

    sequence_length: int
    """Tokens per packed sequence."""
    sources: tuple[SourceRecipe, ...]
    """What is trained on, mixed by weight."""
    validation: tuple[SourceRecipe, ...] = ()
    """Held-out documents; sources of one domain are one validation set."""
    epochs: int | None = None
    """None: the sources repeat, each at its own pace, for as long as the budget lasts, mixed by `weight`.
    n: every source is read exactly n times, mixed in proportion to its size; the last sequence of each is padded."""

    def __post_init__(self) -> None:
        if self.sequence_length < 2:
            raise MoesaicError(f"sequence_length must be at least 2 tokens, got {self.sequence_length}")
        if not self.sources:
            raise MoesaicError("sources is empty; give at least one, such as [{path: math.jsonl, domain: math}]")
        if self.epochs is not None and self.epochs < 1:
            raise MoesaicError(f"epochs must be at least 1, got {self.epochs}; leave it out to repeat without end")
        if self.epochs is not None and len({source.weight for source in self.sources}) > 1:
            raise MoesaicError("epochs reads every source equally often, so weight must be left out of the sources")
        object.__setattr__(self, "sources", _with_domains(self.sources, "sources"))
        object.__setattr__(self, "validation", _with_domains(self.validation, "validation"))
        for index, source in enumerate(self.validation):
            if source.weight != 1.0:
                raise MoesaicError(f"validation.{index}.weight has no meaning; leave it out")

    @property
    def domains(self) -> tuple[str, ...]:
        """All domain names, sources first, in the order of their first mention; the index is the domain id."""
        return tuple(dict.fromkeys(source.domain for source in (*self.sources, *self.validation)))


def _with_domains(sources: tuple[SourceRecipe, ...], key: str) -> tuple[SourceRecipe, ...]:
    """The sources with a domain each; two that would share one without anybody's word are refused."""
    named: list[SourceRecipe] = []
    for index, source in enumerate(sources):
        domain = stem_of(source.path) if source.domain == BY_NAME else source.domain
        if not domain:
            raise MoesaicError(f"{key}.{index}.domain is missing; give the data a name, such as math")
        if source.domain == BY_NAME and domain in {one.domain for one in named}:
            raise MoesaicError(f"{key}.{index}.domain is left out, and {domain} is another one's; give it a name")
        named.append(replace(source, domain=domain))
    return tuple(named)


def stem_of(path: str) -> str:
    """What a file, a folder or a hub data set is called, up to the first dot: `math` of `in/math.valid.jsonl`."""
    return re.split(r"[.@:]", path.rstrip("/").rpartition("/")[2])[0]
