"""Sources to token caches, each once; the name of a cache says everything that its tokens depend on."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from moesaic.common.errors import MoesaicError
from moesaic.common.progress import Tick, notice, progress
from moesaic.data.cache import CACHE_FORMAT, Document, TokenCache, cache_root, open_cache, write_cache
from moesaic.data.files import (
    PREFIX,
    DataFile,
    HubData,
    Record,
    find_files,
    hash_files,
    read_hub,
    read_records,
    resolve_hub,
)
from moesaic.data.recipe import DataRecipe, SourceRecipe
from moesaic.data.samples import ChatRenderer, Sample, make_samples

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Item = TypeVar("Item")

# Enough for every core to have something to do, and little enough to hold (tokenised text takes about a hundred times
# its size while the backend works on it).
BATCH_CHARACTERS = (1 << 19) * max(2, min(os.cpu_count() or 1, 16))
BATCH_SAMPLES = 4096

# Settings of the last call that a tokenizer carries in its serialised form.
_CALL_STATE = ("truncation", "padding")


@dataclass(frozen=True, kw_only=True)
class PreparedData:
    """A recipe with the token caches of its sources: all that ranks need, and cheap to send to them."""

    recipe: DataRecipe
    sources: tuple[Path, ...]
    """Cache folder of each source."""
    validation: tuple[Path, ...]
    """Cache folder of each validation source."""
    padding_id: int


def prepare(
    recipe: DataRecipe,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    cache_dir: Path | str | None = None,
    quiet: bool = False,
) -> PreparedData:
    """Tokenise every source that is not in the cache yet.

    All sources are read once to hash them (a few GB/s), so that a changed file is never taken for the cached one.
    With several processes on a machine, call this in one of them and send the result to the others. `cache_dir`
    defaults to `$MOESAIC_CACHE`, then `~/.cache/moesaic`. Raises `MoesaicError` for anything wrong in the data.
    """
    encoder = Encoder(tokenizer)
    root = cache_root(cache_dir)
    sources, validation = (
        tuple(tokenise(source, encoder, root, quiet=quiet).folder for source in sources)
        for sources in (recipe.sources, recipe.validation)
    )
    return PreparedData(recipe=recipe, sources=sources, validation=validation, padding_id=encoder.padding_id)


def refuse_untrainable(data: PreparedData) -> None:
    """Refuse a source of training data in which nothing would be predicted."""
    for source, folder in zip(data.recipe.sources, data.sources, strict=True):
        cache = open_cache(folder)
        refuse_unpredicted(source.name, cache, cache.offsets[:-1], np.diff(cache.offsets))


def refuse_unpredicted(path: str, cache: TokenCache, begin_N: NDArray[np.int64], length_N: NDArray[np.int64]) -> None:
    """Refuse a source whose documents are in these pieces, where nothing is predicted: a loss would be 0 over 0."""
    if not cache.predicted(begin_N, length_N).any():
        raise MoesaicError(
            f"{path}: no document has a token to predict (one to train on, after its first); give longer documents"
        )


def tokenise(source: SourceRecipe, encoder: "Encoder", root: Path, *, quiet: bool = False) -> TokenCache:
    """Open the token cache of a source below `root`, after making it if there is none.

    The cache is named by a hash of the files' bytes (of a hub data set: its commit), the tokenizer, the chat template
    where it is used, the fields and formats read, and the version of all this; so it cannot be out of date.
    Raises `MoesaicError` for anything wrong in the data, and where a file changes while it is read.
    """
    total: int | None = None
    if source.path.startswith(PREFIX):
        hub = resolve_hub(source.path)
        content = [hub.name, hub.commit, hub.config, hub.split]

        def read(tick: Tick) -> Iterator[Record]:
            return _hub_records(hub, tick)
    else:
        files = find_files(source, quiet=quiet)
        hashes = hash_files(files, label=f"hashing {source.path}", quiet=quiet)
        content = [[file.format, file.compression, digest] for file, digest in zip(files, hashes, strict=True)]
        total = sum(file.size for file in files)

        def read(tick: Tick) -> Iterator[Record]:
            return _file_records(files, hashes, source, tick)

    folder = root / _cache_name(source, encoder, content)
    return open_cache(folder) if folder.exists() else _build(source, encoder, folder, read, total=total, quiet=quiet)


def _cache_name(source: SourceRecipe, encoder: "Encoder", content: list[Any]) -> str:
    parts = [CACHE_FORMAT, encoder.fingerprint, source.kind, source.fields, content]
    if source.kind == "chat":
        import transformers

        parts += [encoder.render_chat.template, transformers.__version__]
    return f"tokens-{xxhash.xxh3_128_hexdigest(json.dumps(parts).encode())}"


def _file_records(files: tuple[DataFile, ...], hashes: list[str], source: SourceRecipe, tick: Tick) -> Iterator[Record]:
    for file in files:
        yield from read_records(file, source.fields, tick)
    if hash_files(files, label=f"checking {source.path}", quiet=True) != hashes:
        raise MoesaicError(f"{source.path}: the data changed while it was read; start again when it is complete")


def _hub_records(hub: HubData, tick: Tick) -> Iterator[Record]:
    for record in read_hub(hub):
        tick(sum(len(value) for value in record.fields.values() if isinstance(value, str)))
        yield record


def _build(
    source: SourceRecipe,
    encoder: "Encoder",
    folder: Path,
    read: Callable[[Tick], Iterator[Record]],
    *,
    total: float | None,
    quiet: bool,
) -> TokenCache:
    empty = 0

    def samples(tick: Tick) -> Iterator[Sample]:
        nonlocal empty
        for record in read(tick):
            made = make_samples(record, source, render_chat, encoder.vocab_size)
            empty += not made
            yield from made

    render_chat = encoder.render_chat if source.kind == "chat" else None
    with progress(total, label=f"tokenising {source.path}", quiet=quiet) as tick:
        documents = _at_least_one(_encode_all(samples(tick), encoder), source.path)
        meta = {"source": source.path, "kind": source.kind}
        cache = write_cache(folder, documents, vocab_size=encoder.vocab_size, meta=meta)
    if empty:
        notice(f"{source.path}: {empty} empty documents left out", quiet=quiet)
    return cache


def _at_least_one(documents: Iterator[Document], path: str) -> Iterator[Document]:
    first = next(documents, None)
    if first is None:
        raise MoesaicError(f"{path}: no document with any text in it")
    yield first
    yield from documents


def _encode_all(samples: Iterator[Sample], encoder: "Encoder") -> Iterator[Document]:
    """Tokenise in batches, reading one batch while the backend works on the one before."""
    with ThreadPoolExecutor(max_workers=1) as worker:
        running: Future[list[Document]] | None = None
        for batch in in_batches(samples, _size, most_size=BATCH_CHARACTERS, most_items=BATCH_SAMPLES):
            following = worker.submit(encoder.encode, batch)
            if running is not None:
                yield from running.result()
            running = following
        if running is not None:
            yield from running.result()


def in_batches(
    items: Iterable[Item], size: Callable[[Item], int], *, most_size: int, most_items: int
) -> Iterator[list[Item]]:
    """Consecutive items together, until their sizes reach `most_size` or they are `most_items`."""
    batch: list[Item] = []
    reached = 0
    for item in items:
        batch.append(item)
        reached += size(item)
        if reached >= most_size or len(batch) >= most_items:
            yield batch
            batch, reached = [], 0
    if batch:
        yield batch


def _size(sample: Sample) -> int:
    return len(sample.text) if sample.ids is None else len(sample.ids)


class Encoder:
    """A private copy of a tokenizer's fast backend, free of the truncation and padding that it may be set to."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        """Raises `MoesaicError` where the tokenizer has no end-of-sequence token or no fast backend."""
        import tokenizers

        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, tokenizers.Tokenizer):
            raise MoesaicError(f"{tokenizer.name_or_path}: not a fast tokenizer; a tokenizer.json is needed")
        if not isinstance(tokenizer.eos_token_id, int):
            raise MoesaicError(f"{tokenizer.name_or_path}: the tokenizer has no end-of-sequence token; set eos_token")
        settings = json.loads(backend.to_str()) | dict.fromkeys(_CALL_STATE)
        self._tokenizer = tokenizer
        self._backend = tokenizers.Tokenizer.from_str(json.dumps(_without_trimming(settings)))
        self._backend.encode_special_tokens = backend.encode_special_tokens
        self.eos_id: int = tokenizer.eos_token_id
        self.padding_id = tokenizer.pad_token_id if isinstance(tokenizer.pad_token_id, int) else self.eos_id
        self.vocab_size = max(self._backend.get_vocab(with_added_tokens=True).values()) + 1
        identity = [settings, self.eos_id, backend.encode_special_tokens, tokenizers.__version__]
        self.fingerprint = xxhash.xxh3_128_hexdigest(json.dumps(identity, sort_keys=True).encode())

    @cached_property
    def render_chat(self) -> ChatRenderer:
        """The chat template of the tokenizer; `MoesaicError` where it has none."""
        return ChatRenderer(self._tokenizer)

    def encode(self, samples: Sequence[Sample]) -> list[Document]:
        """Tokenise samples of one source.

        A token is trained on if it has any character of a trained span. The end-of-sequence token is put at the end
        of every document and trained on, unless the last token trained on is one already.
        """
        return [self._finish(ids_N, masked_N) for ids_N, masked_N in self._encode(samples)]

    def _encode(self, samples: Sequence[Sample]) -> list[tuple[NDArray[np.uint32], NDArray[np.bool_] | None]]:
        first = samples[0]
        if first.ids is not None:
            return [(np.array(sample.ids, dtype=np.uint32), None) for sample in samples]
        texts = [sample.text for sample in samples]
        if first.trained is None:  # without offsets: faster
            encodings = self._backend.encode_batch_fast(texts, add_special_tokens=first.add_special_tokens)
            return [(np.array(encoding.ids, dtype=np.uint32), None) for encoding in encodings]
        encodings = self._backend.encode_batch(texts, add_special_tokens=first.add_special_tokens)
        return [
            (np.array(encoding.ids, dtype=np.uint32), _masked(encoding.offsets, sample.trained or ()))
            for encoding, sample in zip(encodings, samples, strict=True)
        ]

    def _finish(self, ids_N: NDArray[np.uint32], masked_N: NDArray[np.bool_] | None) -> Document:
        if masked_N is None:
            masked_N = np.zeros(len(ids_N), dtype=np.bool_)
        trained_N = ids_N[~masked_N]
        if not len(trained_N) or trained_N[-1] != self.eos_id:
            ids_N = np.append(ids_N, np.uint32(self.eos_id))
            masked_N = np.append(masked_N, np.bool_(False))
        if not masked_N.any():
            return Document(ids=ids_N)
        edge_N = np.flatnonzero(np.diff(masked_N.astype(np.int8), prepend=0, append=0)).tolist()
        return Document(ids=ids_N, masked=tuple(zip(edge_N[::2], edge_N[1::2], strict=True)))


def _masked(offsets: list[tuple[int, int]], trained: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
    """Which tokens have no character in any of the spans."""
    start_N, stop_N = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
    masked_N = np.ones(len(offsets), dtype=np.bool_)
    for start, stop in trained:
        masked_N &= ~((stop_N > start) & (start_N < stop))
    return masked_N


def _without_trimming(value: Any) -> Any:
    """Settings under which a token's offsets cover all of its characters, leading spaces too. Ids stay the same."""
    if isinstance(value, dict):
        return {key: False if key == "trim_offsets" else _without_trimming(item) for key, item in value.items()}
    return [_without_trimming(item) for item in value] if isinstance(value, list) else value
