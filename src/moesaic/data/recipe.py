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
    texts of the field `text`. Text files are one document each and have no fields. `task` takes the place of `path`.
    """

    path: str = ""
    """A file, a folder, or a hub data set `hf://org/name[@revision][:config][:split]` (split: train by default)."""
    task: str | None = None
    """A task by name or .yaml file, as `eval` asks it; only the answers are trained on. Of a source the rows that
    demonstrations are drawn from (its training split), of a held-out set those that are evaluated."""
    shots: int | None = None
    """Demonstrations before each question of the task. None: the task file's own, else 0."""
    data_dir: str | None = None
    """Folder with the task's local rows. None: the hub's data sets."""
    split: float | None = None
    """Train on this share of the rows that are evaluated instead, those that `select --split` draws by its seed 0 and
    `eval --selection-share` leaves out; of a held-out set: all but these."""
    domain: str = BY_NAME
    """The name under which losses are reported. Several sources may share one. `auto`: the name of the file, folder,
    data set or task up to its first dot."""
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
        if self.task is not None:
            self._check_task()
        elif not self.path:
            raise MoesaicError("path is empty; give a file, a folder or hf://org/name, or a task")
        else:
            for name in ("shots", "data_dir", "split"):
                if getattr(self, name) is not None:
                    raise MoesaicError(f"{name} is a setting of a task; leave it out, or give task instead of path")
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

    def _check_task(self) -> None:
        given = [name for name in ("path", "messages", "prompt", "tokens") if getattr(self, name)]
        if given:
            raise MoesaicError(f"{given[0]} cannot be given together with task; use one source for each")
        if self.shots is not None and self.shots < 0:
            raise MoesaicError(f"shots must be 0 or more, got {self.shots}")
        if self.split is not None and not 0.0 < self.split <= 1.0:
            raise MoesaicError(f"split must be above 0 and at most 1, such as 0.4, got {self.split}")

    @property
    def name(self) -> str:
        """What the source is called in messages: its path or task."""
        return self.path or str(self.task)

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
    packing: bool = True
    """Put documents one after the other into sequences, and cut them at their ends. `false`: each sequence is one whole
    document, padded; `batch.tokens` then counts sequences of the full length: 32 * sequence_length is 32 documents."""

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
        domain = stem_of(source.name) if source.domain == BY_NAME else source.domain
        if not domain:
            raise MoesaicError(f"{key}.{index}.domain is missing; give the data a name, such as math")
        if source.domain == BY_NAME and domain in {one.domain for one in named}:
            raise MoesaicError(f"{key}.{index}.domain is left out, and {domain} is another one's; give it a name")
        named.append(replace(source, domain=domain))
    return tuple(named)


def stem_of(path: str) -> str:
    """What a file, a folder or a hub data set is called, up to the first dot: `math` of `in/math.valid.jsonl`."""
    return re.split(r"[.@:]", path.rstrip("/").rpartition("/")[2])[0]
