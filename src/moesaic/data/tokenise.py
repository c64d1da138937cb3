"""Each source is tokenised once; the name of its cache says everything that the tokens depend on."""

import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

from moesaic.common.errors import MoesaicError
from moesaic.common.progress import Tick, notice, progress
from moesaic.data.cache import CACHE_FORMAT, Document, TokenCache, open_cache, write_cache
from moesaic.data.encode import Encoder
from moesaic.data.files import DataFile, find_files, hash_files
from moesaic.data.hub import PREFIX, HubData, read_hub, resolve_hub
from moesaic.data.readers import Record, read_records
from moesaic.data.recipe import SourceRecipe
from moesaic.data.samples import Sample, make_samples

# Enough for every core to have something to do, and little enough to hold (tokenised text takes about a hundred times
# its size while the backend works on it).
BATCH_CHARACTERS = (1 << 19) * max(2, min(os.cpu_count() or 1, 16))
BATCH_SAMPLES = 4096


def tokenise(source: SourceRecipe, encoder: Encoder, root: Path, *, quiet: bool = False) -> TokenCache:
    """Open the token cache of a source below `root`, after making it if there is none.

    The cache is named by a hash of the files' bytes (of a hub data set: its commit), the tokenizer, the chat template
    where it is used, the fields and formats read, and the version of all this; so it cannot be out of date.
    Raises `MoesaicError` for anything wrong in the data, and where a file changes while it is read.
    """
    if source.path.startswith(PREFIX):
        hub = resolve_hub(source.path)
        content = [hub.name, hub.commit, hub.config, hub.split]
        folder = root / _cache_name(source, encoder, content)
        if folder.exists():
            return open_cache(folder)
        return _build(source, encoder, folder, lambda tick: _hub_records(hub, tick), total=None, quiet=quiet)
    files = find_files(source, quiet=quiet)
    hashes = hash_files(files, label=f"hashing {source.path}", quiet=quiet)
    content = [[file.format, file.compression, digest] for file, digest in zip(files, hashes, strict=True)]
    folder = root / _cache_name(source, encoder, content)
    if folder.exists():
        return open_cache(folder)
    return _build(
        source,
        encoder,
        folder,
        lambda tick: _file_records(files, hashes, source, tick),
        total=sum(file.size for file in files),
        quiet=quiet,
    )


def _cache_name(source: SourceRecipe, encoder: Encoder, content: list[Any]) -> str:
    parts = [CACHE_FORMAT, encoder.fingerprint, source.kind, source.fields, content]
    if source.kind == "chat":
        import transformers

        parts += [encoder.render_chat.template, transformers.__version__]
    return f"tokens-{xxhash.xxh3_128_hexdigest(json.dumps(parts).encode())}"


def _build(
    source: SourceRecipe,
    encoder: Encoder,
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


def _encode_all(samples: Iterator[Sample], encoder: Encoder) -> Iterator[Document]:
    """Tokenise in batches, reading one batch while the backend works on the one before."""
    with ThreadPoolExecutor(max_workers=1) as worker:
        running: Future[list[Document]] | None = None
        for batch in _batches(samples):
            following = worker.submit(encoder.encode, batch)
            if running is not None:
                yield from running.result()
            running = following
        if running is not None:
            yield from running.result()


def _batches(samples: Iterator[Sample]) -> Iterator[list[Sample]]:
    batch: list[Sample] = []
    size = 0
    for sample in samples:
        batch.append(sample)
        size += len(sample.text) if sample.ids is None else len(sample.ids)
        if size >= BATCH_CHARACTERS or len(batch) >= BATCH_SAMPLES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _at_least_one(documents: Iterator[Document], path: str) -> Iterator[Document]:
    first = next(documents, None)
    if first is None:
        raise MoesaicError(f"{path}: no document with any text in it")
    yield first
    yield from documents


def _file_records(files: tuple[DataFile, ...], hashes: list[str], source: SourceRecipe, tick: Tick) -> Iterator[Record]:
    for file in files:
        yield from read_records(file, source.fields, tick)
    if hash_files(files, label=f"checking {source.path}", quiet=True) != hashes:
        raise MoesaicError(f"{source.path}: the data changed while it was read; start again when it is complete")


def _hub_records(hub: HubData, tick: Tick) -> Iterator[Record]:
    for record in read_hub(hub):
        tick(sum(len(value) for value in record.fields.values() if isinstance(value, str)))
        yield record
