"""The documents that a model is looked into with: a random sample by the seed, tokenised, domain by domain.

A record's place in the draw is a hash of (seed, its number), and the sample is the first documents in that order that
the token budget holds. So samples are nested: a larger budget gives the same documents and more. All records are read
once; only those that may still get into the sample are tokenised. Torch-free.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int, UInt
from numpy import ndarray

from moesaic.analysis.recipe import InspectRecipe
from moesaic.common import seeds
from moesaic.common.errors import MoesaicError
from moesaic.common.progress import notice, progress
from moesaic.data.calibration import domain_of, render
from moesaic.data.files import PREFIX, Record, find_files, read_hub, read_records, resolve_hub
from moesaic.data.recipe import SourceRecipe
from moesaic.data.tokenise import in_batches
from moesaic.data.vocabulary import refuse_unknown_ids
from moesaic.evaluation.own import HeldOutText, find_task, is_task, task_name

DOMAIN_FIELD = "domain"
"""Used where the records have it and no other field is named."""

MOST_TOKENS = 8192
"""Token strings that are counted for every expert: with 2,000 experts in all layers, 66 MB of counts."""
LEAST_OCCURRENCES = 5
"""A rarer string says nothing about where it goes."""

_BROKEN = "\ufffd"
_BATCH_CHARACTERS = 1 << 20
_BATCH_RECORDS = 1024
_CHARACTERS_PER_TOKEN = 64
"""More than this is unusual: only so much of a text is tokenised to see that it is too long."""


class Entry(NamedTuple):
    """One record."""

    text: str
    domain: str
    where: str
    """File and line or row."""


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
    similar_ids: np.ndarray
    """The tokens that the similarity of domains is of; they begin like `ids`, and are more or fewer."""

    @property
    def run_ids(self) -> np.ndarray:
        """What a model must read for both."""
        return max(self.ids, self.similar_ids, key=len)


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


def draw_sample(
    entries: Iterable[Entry], tokenizer: Any, recipe: InspectRecipe, *, vocab_size: int, name: str
) -> Sample:
    """Draw and tokenise; `name` is the data's, for messages.

    Raises:
        MoesaicError: no document of a fitting length, a tokenizer without offsets, a token that the model does not
            have.
    """
    if not tokenizer.is_fast:
        raise MoesaicError(f"{tokenizer.name_or_path}: not a fast tokenizer; a tokenizer.json is needed")
    draw = _Draw(tokenizer, recipe)
    placed = ((seeds.order("document", recipe.seed, number), entry) for number, entry in enumerate(entries))
    wanted = (one for one in placed if draw.wants(one[0]))
    for batch in in_batches(
        wanted, lambda one: len(one[1].text), most_size=_BATCH_CHARACTERS, most_items=_BATCH_RECORDS
    ):
        draw.add(batch)
    documents = sorted((text for _, _, text in draw.heap), key=lambda text: (text.domain, text.place))
    if not documents:
        raise MoesaicError(_nothing(draw, recipe, name))
    refuse_unknown_ids(max(int(text.run_ids.max()) for text in documents), vocab_size, name)
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


def _nothing(draw: "_Draw", recipe: InspectRecipe, name: str) -> str:
    if not draw.records:
        return f"{name}: has no records"
    if draw.smallest is not None and draw.smallest > recipe.most_tokens:
        return f"--tokens: {recipe.most_tokens} are fewer than the first document has ({draw.smallest}); give more"
    return (
        f"{name}: none of {draw.records} documents has {recipe.min_length} to {recipe.max_length} tokens "
        f"({draw.too_short} are shorter, {draw.too_long} longer); set --min-length and --max-length"
    )


_Encoded = tuple[list[int], list[tuple[int, int]], list[int]]
"""Token ids, where each token begins and ends in the text, and whether it is a special one."""


class _Draw:
    """The documents chosen so far: a heap with the last place on top."""

    def __init__(self, tokenizer: Any, recipe: InspectRecipe) -> None:
        self._tokenizer = tokenizer
        self._recipe = recipe
        self._most_tokens = recipe.most_tokens
        self.heap: list[tuple[int, int, Text]] = []
        self._tokens = 0
        self._limit = 1 << 64
        self.records = self.too_short = self.too_long = 0
        self.smallest: int | None = None
        """Tokens of the smallest document that was looked at and fits."""

    def wants(self, place: int) -> bool:
        """Whether a document at this place may still be in the sample; counts the record."""
        self.records += 1
        return place < self._limit

    def add(self, batch: Sequence[tuple[int, Entry]]) -> None:
        """Tokenise and take what fits."""
        for (place, entry), encoded in zip(batch, self._encode([entry.text for _, entry in batch]), strict=True):
            if len(encoded[0]) < self._recipe.min_length:
                self.too_short += 1
            elif len(encoded[0]) > self._recipe.max_length:
                self.too_long += 1
            else:
                self._push(_text(entry, place, encoded, self._recipe))

    def _push(self, text: Text) -> None:
        if text.place >= self._limit:
            return
        size = len(text.ids)
        self.smallest = size if self.smallest is None else min(self.smallest, size)
        heapq.heappush(self.heap, (-text.place, len(self.heap), text))
        self._tokens += size
        while self._tokens > self._most_tokens:
            _, _, last = heapq.heappop(self.heap)
            self._tokens -= len(last.ids)
            self._limit = last.place

    def _encode(self, texts: list[str]) -> Iterator[_Encoded]:
        most = _CHARACTERS_PER_TOKEN * (self._recipe.max_length + 1)
        for index, encoding in enumerate(self._tokenize([text[:most] for text in texts])):
            # A text that is cut and yet has few tokens is a strange one: all of it must be looked at.
            whole = len(texts[index]) <= most or len(encoding[0]) > self._recipe.max_length
            yield encoding if whole else next(self._tokenize([texts[index]]))

    def _tokenize(self, texts: list[str]) -> Iterator[_Encoded]:
        found = self._tokenizer(texts, return_offsets_mapping=True, return_special_tokens_mask=True, verbose=False)
        return zip(found["input_ids"], found["offset_mapping"], found["special_tokens_mask"], strict=True)


def _text(entry: Entry, place: int, encoded: _Encoded, recipe: InspectRecipe) -> Text:
    ids, offsets, special = encoded
    most = recipe.document_tokens
    stops = np.array([-1 if own else stop for (_, stop), own in zip(offsets, special, strict=True)][:most])
    return Text(
        domain=entry.domain,
        source=entry.where,
        place=place,
        ids=np.array(ids[:most], dtype=np.uint32),
        text=entry.text[: max(0, int(stops.max()))],
        stops=stops.astype(np.int32),
        similar_ids=np.array(ids[: recipe.similarity_tokens], dtype=np.uint32),
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


@dataclass(frozen=True, kw_only=True, eq=False)
class Vocabulary:
    """The most frequent token ids of a sample, and which of them each token is."""

    ids_V: Int[ndarray, " vocabulary"]
    counts_V: Int[ndarray, " vocabulary"]
    """Occurrences in the sample."""
    index_T: Int[ndarray, " tokens"]
    """Index into `ids_V`; V for a token that is too rare."""


def frequent_tokens(ids_T: UInt[ndarray, " tokens"]) -> Vocabulary:
    """The ids with at least `LEAST_OCCURRENCES`, and no more than `MOST_TOKENS` of them: by frequency, then by id."""
    ids, inverse_T, counts = np.unique(ids_T, return_inverse=True, return_counts=True)
    order = np.lexsort((ids, -counts))
    kept = order[counts[order] >= LEAST_OCCURRENCES][:MOST_TOKENS]
    place = np.full(len(ids), len(kept), dtype=np.int64)
    place[kept] = np.arange(len(kept))
    return Vocabulary(ids_V=ids[kept].astype(np.int64), counts_V=counts[kept], index_T=place[inverse_T])


def string_of(tokenizer: Any) -> Callable[[int], str]:
    """Token id -> its text; for a part of a character the tokenizer's own spelling of its bytes."""
    known: dict[int, str] = {}

    def string(token: int) -> str:
        if token not in known:
            text = tokenizer.decode([token])
            spelled = str(tokenizer.convert_ids_to_tokens(token))
            known[token] = spelled if _BROKEN in text or not text else text
        return known[token]

    return string


class Entries:
    """The records of all data, in the order given; `domain_field` is known after they were read."""

    def __init__(
        self,
        data: Sequence[str],
        domain_field: str | None,
        *,
        shots: int | None = None,
        data_dir: str | None = None,
        quiet: bool = True,
    ) -> None:
        self._data = data
        self._shots, self._data_dir = shots, data_dir
        self._asked = domain_field
        self._quiet = quiet
        self.domain_field: str | None = None
        """The field that domains came from; None where all are names of files."""

    def __iter__(self) -> Iterator[Entry]:
        for source in self._data:
            if is_task(source):
                yield from self._requests(source)
                continue
            if source.startswith(PREFIX):
                yield from self._entries(read_hub(resolve_hub(source)), source)
                continue
            files = find_files(SourceRecipe(path=source, domain="inspect"), quiet=self._quiet)
            with progress(sum(file.size for file in files), label=f"reading {source}", quiet=self._quiet) as tick:
                for file in files:
                    records = read_records(file, None, tick)
                    yield from self._entries(records, str(file.path), has_fields=file.format != "text")

    def _requests(self, task: str) -> Iterator[Entry]:
        """What `eval` asks of a task, whose name is the domain, or the held-out text that it measures, with its own."""
        if isinstance(text := find_task(task).task, HeldOutText):
            yield from self._held_out(task, text)
            return
        from moesaic.evaluation.requests import task_requests

        for request in task_requests(task, shots=self._shots, data_dir=self._data_dir):
            yield Entry(request.text, task_name(task), request.where)

    def _held_out(self, task: str, text: HeldOutText) -> Iterator[Entry]:
        from moesaic.evaluation.local import DataMissingError
        from moesaic.evaluation.perplexity import files_of, read_documents

        try:
            files = files_of(text, self._data_dir)
        except DataMissingError as error:
            raise MoesaicError(f"--data {task}: {error}") from error
        asked = DOMAIN_FIELD if self._asked is None else self._asked
        self.domain_field = asked if text.domain is None else text.domain
        for document in read_documents(files, domain_field=self.domain_field, text_field=text.text):
            yield Entry(document.text, document.domain, document.source)

    def _entries(self, records: Iterator[Record], name: str, *, has_fields: bool = True) -> Iterator[Entry]:
        field = self._asked or DOMAIN_FIELD
        from_field: bool | None = None
        for record in records:
            if from_field is None:
                from_field = has_fields and (self._asked is not None or field in record.fields)
                if from_field:
                    self.domain_field = field
                else:
                    notice(f"{name}: has no field {field!r}; the domain is {domain_of(name)!r}", quiet=self._quiet)
            domain = _domain(record, field) if from_field else domain_of(name)
            yield Entry(_text_of(record), domain, record.where)


def _domain(record: Record, field: str) -> str:
    value = record.fields.get(field)
    if isinstance(value, str) and value:
        return value
    if type(value) in (int, bool):
        return str(value)
    if field in record.fields:
        raise MoesaicError(f"{record.where}: field {field!r} must name a domain, found {value!r}")
    known = ", ".join(sorted(map(str, record.fields)))
    raise MoesaicError(f"{record.where}: no field {field!r}; the record has {known}; set --domain-field")


def _text_of(record: Record) -> str:
    text = render(record.fields, None, record.where)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise MoesaicError(
            f"{record.where}: the text is not valid Unicode (a lone surrogate at character {error.start}); remove it"
        ) from error
    return text
