"""The documents that a model is looked into with: a random sample by the seed, tokenised, domain by domain.

A record's place in the draw is a hash of (seed, its number), and the sample is the first documents in that order that
the token budget holds. So samples are nested: a larger budget gives the same documents and more. All records are read
once; only those that may still get into the sample are tokenised.
"""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from moesaic.analysis.records import Entry
from moesaic.common.errors import MoesaicError

_BATCH_CHARACTERS = 1 << 20
_BATCH_RECORDS = 1024
_CHARACTERS_PER_TOKEN = 64
"""More than this is unusual: only so much of a text is tokenised to see that it is too long."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Which documents, and how much of them."""

    tokens: int = 1_000_000
    """At most so many in all."""
    document_tokens: int = 100
    """The first so many of each document."""
    min_length: int = 32
    max_length: int = 2048
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("tokens", "document_tokens", "min_length"):
            if getattr(self, name) < 1:
                raise MoesaicError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be at least 1")
        if self.max_length < self.min_length:
            raise MoesaicError(
                f"--max-length {self.max_length}: must be at least --min-length, which is {self.min_length}"
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class Text:
    """The first tokens of one document."""

    domain: str
    source: str
    """File and line or row."""
    place: int
    """In the draw."""
    ids: np.ndarray
    text: str
    """As much of the document's text as the tokens cover."""
    stops: np.ndarray
    """Where each token ends in the text; -1 for a special token that is not in it."""
    length: int
    """Tokens of the whole document."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """The documents, ordered by domain and then by place, and what was left out."""

    domains: tuple[str, ...]
    documents: tuple[Text, ...]
    start_D1: np.ndarray
    """Where each document starts in the arrays over tokens; the last entry is the number of tokens."""
    domain_D: np.ndarray
    records: int
    too_short: int
    too_long: int

    @property
    def tokens(self) -> int:
        """Tokens of all documents."""
        return int(self.start_D1[-1])

    @property
    def document_T(self) -> np.ndarray:
        """Document of each token."""
        return np.repeat(np.arange(len(self.documents), dtype=np.int32), np.diff(self.start_D1))

    @property
    def position_T(self) -> np.ndarray:
        """Position of each token in its document, from 0."""
        return np.arange(self.tokens, dtype=np.int32) - np.repeat(
            self.start_D1[:-1].astype(np.int32), np.diff(self.start_D1)
        )

    @property
    def ids_T(self) -> np.ndarray:
        """Token ids."""
        return np.concatenate([document.ids for document in self.documents])


def draw_sample(entries: Iterable[Entry], tokenizer: Any, choice: Choice, *, vocab_size: int, name: str) -> Sample:
    """Draw and tokenise; `name` is the data's, for messages.

    Raises:
        MoesaicError: no document of a fitting length, a tokenizer without offsets, a token that the model does not
            have.
    """
    if not tokenizer.is_fast:
        raise MoesaicError(f"{tokenizer.name_or_path}: not a fast tokenizer; a tokenizer.json is needed")
    draw = _Draw(tokenizer, choice)
    for batch in _batches(_numbered(entries, choice.seed), draw):
        draw.add(batch)
    documents = sorted(draw.documents, key=lambda text: (text.domain, text.place))
    if not documents:
        raise MoesaicError(_nothing(draw, choice, name))
    largest = max(int(text.ids.max()) for text in documents)
    if largest >= vocab_size:
        raise MoesaicError(f"{name}: the tokenizer gives token {largest}, but the model has only {vocab_size}")
    domains = tuple(dict.fromkeys(text.domain for text in documents))
    lengths_D = [len(text.ids) for text in documents]
    return Sample(
        domains=domains,
        documents=tuple(documents),
        start_D1=np.concatenate([[0], np.cumsum(lengths_D)]).astype(np.int64),
        domain_D=np.array([domains.index(text.domain) for text in documents], dtype=np.int64),
        records=draw.records,
        too_short=draw.too_short,
        too_long=draw.too_long,
    )


def _nothing(draw: "_Draw", choice: Choice, name: str) -> str:
    if not draw.records:
        return f"{name}: has no records"
    if draw.smallest is not None and draw.smallest > choice.tokens:
        return f"--tokens: {choice.tokens} are fewer than the first document has ({draw.smallest}); give more"
    return (
        f"{name}: none of {draw.records} documents has {choice.min_length} to {choice.max_length} tokens "
        f"({draw.too_short} are shorter, {draw.too_long} longer); set --min-length and --max-length"
    )


class _Draw:
    """The documents chosen so far: a heap with the last place on top."""

    def __init__(self, tokenizer: Any, choice: Choice) -> None:
        self._tokenizer = tokenizer
        self._choice = choice
        self._heap: list[tuple[int, int, Text]] = []
        self._tokens = 0
        self._limit = 1 << 64
        self.records = self.too_short = self.too_long = 0
        self.smallest: int | None = None
        """Tokens of the smallest document that was looked at and fits."""

    @property
    def documents(self) -> list[Text]:
        return [text for _, _, text in self._heap]

    def wants(self, place: int) -> bool:
        """Whether a document at this place may still be in the sample; counts the record."""
        self.records += 1
        return place < self._limit

    def add(self, batch: Sequence[tuple[int, Entry]]) -> None:
        """Tokenise and take what fits."""
        for (place, entry), encoded in zip(batch, self._encode([entry.text for _, entry in batch]), strict=True):
            ids, offsets, special = encoded
            if len(ids) < self._choice.min_length:
                self.too_short += 1
            elif len(ids) > self._choice.max_length:
                self.too_long += 1
            else:
                self._push(_text(entry, place, ids, offsets, special, self._choice.document_tokens))

    def _push(self, text: Text) -> None:
        if text.place >= self._limit:
            return
        size = len(text.ids)
        self.smallest = size if self.smallest is None else min(self.smallest, size)
        heapq.heappush(self._heap, (-text.place, len(self._heap), text))
        self._tokens += size
        while self._tokens > self._choice.tokens:
            _, _, last = heapq.heappop(self._heap)
            self._tokens -= len(last.ids)
            self._limit = last.place

    def _encode(self, texts: list[str]) -> Iterator[tuple[list[int], list[tuple[int, int]], list[int]]]:
        most = _CHARACTERS_PER_TOKEN * (self._choice.max_length + 1)
        for index, encoding in enumerate(self._tokenize([text[:most] for text in texts])):
            # A text that is cut and yet has few tokens is a strange one: all of it must be looked at.
            whole = len(texts[index]) <= most or len(encoding[0]) > self._choice.max_length
            yield encoding if whole else next(self._tokenize([texts[index]]))

    def _tokenize(self, texts: list[str]) -> Iterator[tuple[list[int], list[tuple[int, int]], list[int]]]:
        found = self._tokenizer(texts, return_offsets_mapping=True, return_special_tokens_mask=True, verbose=False)
        return zip(found["input_ids"], found["offset_mapping"], found["special_tokens_mask"], strict=True)


def _text(
    entry: Entry, place: int, ids: list[int], offsets: list[tuple[int, int]], special: list[int], most: int
) -> Text:
    stops = np.array([-1 if own else stop for (_, stop), own in zip(offsets, special, strict=True)][:most])
    return Text(
        domain=entry.domain,
        source=entry.where,
        place=place,
        ids=np.array(ids[:most], dtype=np.uint32),
        text=entry.text[: max(0, int(stops.max()))],
        stops=stops.astype(np.int32),
        length=len(ids),
    )


def token_strings(text: Text, special_token: Any) -> list[str]:
    """The piece of text of each token; `special_token(id)` names those that are not in the text.

    Joined without the special ones, they are the text as far as it was used. A character made of several tokens belongs
    to the first of them, and the others are empty.
    """
    pieces, start = [], 0
    for token, stop in zip(text.ids.tolist(), text.stops.tolist(), strict=True):
        pieces.append(special_token(token) if stop < 0 else text.text[start:stop])
        start = max(start, stop)
    return pieces


def _numbered(entries: Iterable[Entry], seed: int) -> Iterator[tuple[int, Entry]]:
    for number, entry in enumerate(entries):
        yield xxhash.xxh3_64_intdigest(f"document/{seed}/{number}".encode()), entry


def _batches(entries: Iterator[tuple[int, Entry]], draw: _Draw) -> Iterator[list[tuple[int, Entry]]]:
    batch: list[tuple[int, Entry]] = []
    size = 0
    for place, entry in entries:
        if draw.wants(place):
            batch.append((place, entry))
            size += len(entry.text)
        if size >= _BATCH_CHARACTERS or len(batch) >= _BATCH_RECORDS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
