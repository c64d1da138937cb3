"""The token cache: a source's documents as token ids in flat files that are mapped, not read.

A cache is a folder, complete from the moment it has its name: `tokens.bin` (uint16 or uint32), `offsets.bin` (int64,
one per document and the end), `masked_from.bin` and `masked_to.bin` (int64, the spans of tokens that are not trained
on, in order), and `meta.json`.
"""

import json
import os
import shutil
import socket
import uuid
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

from moesaic.common.errors import MoesaicError
from moesaic.common.files import load_json
from moesaic.common.recipe import Count, load_document

CACHE_FORMAT = 1
FILES = ("tokens.bin", "offsets.bin", "masked_from.bin", "masked_to.bin")


@dataclass(frozen=True, kw_only=True)
class _Meta:
    """What meta.json says of the files; more is in it for people."""

    dtype: Literal["uint16", "uint32"]
    sizes: dict[str, Count]
    largest: Count | None = None


@dataclass(frozen=True, kw_only=True)
class TokenCache:
    """An opened cache; the arrays are mapped from its files, read-only."""

    folder: Path
    tokens: NDArray[np.integer]
    """All token ids, document after document."""
    offsets: NDArray[np.int64]
    """First token of each document, and the end: one more than there are documents."""
    masked_from: NDArray[np.int64]
    masked_to: NDArray[np.int64]
    largest_written: int | None = None
    """The largest id, as it was written; None in caches of earlier versions."""

    @property
    def largest(self) -> int:
        """The largest token id."""
        return int(self.tokens.max(initial=0)) if self.largest_written is None else self.largest_written

    @property
    def num_documents(self) -> int:
        """Documents in the cache."""
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> int:
        """Tokens in the cache, end-of-document tokens included."""
        return len(self.tokens)

    def masked(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The spans of tokens not trained on between two tokens of the file, clipped to these."""
        first = int(np.searchsorted(self.masked_to, start, side="right"))
        last = int(np.searchsorted(self.masked_from, stop, side="left"))
        spans = zip(self.masked_from[first:last].tolist(), self.masked_to[first:last].tolist(), strict=True)
        return [(max(masked_from, start), min(masked_to, stop)) for masked_from, masked_to in spans]

    def predicted(self, begin_N: NDArray[np.int64], length_N: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many tokens are predicted in pieces of documents: those trained on, but for the first of each piece."""
        masked_N = self._masked_before(begin_N + length_N) - self._masked_before(begin_N + 1)
        return length_N - 1 - masked_N

    def _masked_before(self, place_N: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many tokens of the file before each place are not trained on."""
        whole = np.concatenate([[0], np.cumsum(self.masked_to - self.masked_from)])
        begin = np.append(self.masked_from, np.iinfo(np.int64).max)  # of the span that a place may lie in
        span_N = np.searchsorted(self.masked_to, place_N, side="right")
        return whole[span_N] + np.maximum(place_N - begin[span_N], 0)


@dataclass(frozen=True, kw_only=True)
class Document:
    """One tokenised document, its end-of-document token included."""

    ids: NDArray[np.integer]
    masked: tuple[tuple[int, int], ...] = ()
    """Spans of tokens that are not trained on, in order."""


def cache_root(folder: Path | str | None = None) -> Path:
    """Where caches are kept: the given folder, else `$MOESAIC_CACHE`, else `~/.cache/moesaic`."""
    chosen = folder or os.environ.get("MOESAIC_CACHE") or "~/.cache/moesaic"
    return Path(chosen).expanduser()


def open_cache(folder: Path) -> TokenCache:
    """Map the files of a cache. A file that is missing or has another size than was written is refused."""
    file = folder / "meta.json"
    meta = load_document(_Meta, load_json(file), str(file), others=True, way_out="delete the folder")
    try:
        sizes = {name: (folder / name).stat().st_size for name in FILES}
    except OSError as error:
        raise MoesaicError(f"{folder}: not a complete token cache ({error}); delete the folder") from error
    if sizes != meta.sizes:
        raise MoesaicError(f"{folder}: the token cache was changed after it was written; delete the folder")
    types = (meta.dtype, "int64", "int64", "int64")
    tokens, offsets, masked_from, masked_to = (
        _map(folder / name, kind) for name, kind in zip(FILES, types, strict=True)
    )
    return TokenCache(
        folder=folder,
        tokens=tokens,
        offsets=offsets,
        masked_from=masked_from,
        masked_to=masked_to,
        largest_written=meta.largest,
    )


def _map(file: Path, dtype: str) -> NDArray[Any]:
    if file.stat().st_size == 0:
        return np.empty(0, dtype=dtype)
    return np.asarray(np.memmap(file, dtype=dtype, mode="r"))


def write_cache(folder: Path, documents: Iterable[Document], *, vocab_size: int, meta: dict[str, Any]) -> TokenCache:
    """Write a cache beside its place and rename it there; of two processes at the same work, the first one's stays.

    Memory is that of one document. On any error, and after a kill, no folder of that name exists.
    """
    _remove_leftovers(folder)
    with _aside(folder) as temporary:
        dtype = "uint16" if vocab_size <= 1 << 16 else "uint32"
        num_documents, num_tokens, largest = _write_documents(temporary, documents, dtype)
        sizes = {name: (temporary / name).stat().st_size for name in FILES}
        counts = {"format": CACHE_FORMAT, "dtype": dtype, "documents": num_documents, "tokens": num_tokens}
        counts["largest"] = largest
        with (temporary / "meta.json").open("wb") as file:
            file.write(json.dumps(counts | {"sizes": sizes} | meta, indent=2).encode())
            _sync(file)
        try:
            temporary.rename(folder)
        except OSError:
            if not (folder / "meta.json").is_file():
                raise
    return open_cache(folder)


def _write_documents(folder: Path, documents: Iterable[Document], dtype: str) -> tuple[int, int, int]:
    """Write them; return the number of documents, of tokens, and the largest id."""
    num_documents, end, largest = 0, 0, 0
    with ExitStack() as stack:
        tokens, offsets, masked_from, masked_to = (stack.enter_context((folder / name).open("wb")) for name in FILES)
        for document in documents:
            tokens.write(document.ids.astype(dtype).tobytes())
            offsets.write(end.to_bytes(8, "little"))
            for start, stop in document.masked:
                masked_from.write((end + start).to_bytes(8, "little"))
                masked_to.write((end + stop).to_bytes(8, "little"))
            num_documents += 1
            end += len(document.ids)
            largest = max(largest, int(document.ids.max(initial=0)))
        offsets.write(end.to_bytes(8, "little"))
        for file in (tokens, offsets, masked_from, masked_to):
            _sync(file)
    return num_documents, end, largest


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


@contextmanager
def _aside(folder: Path) -> Iterator[Path]:
    """A new folder beside the target, named after this machine and process; gone at the end unless it was renamed."""
    name = f".{folder.name}.{socket.gethostname()}.{os.getpid()}.{uuid.uuid4().hex[:8]}.tmp"
    temporary = folder.with_name(name)
    try:
        temporary.mkdir(parents=True)
        yield temporary
    except OSError as error:
        place = error.filename or folder.parent
        raise MoesaicError(f"{place}: cannot write the token cache ({error.strerror}); set MOESAIC_CACHE") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _remove_leftovers(folder: Path) -> None:
    """Remove what killed processes of this machine left of the same cache."""
    for temporary in folder.parent.glob(f".{folder.name}.{socket.gethostname()}.*.tmp"):
        if not _is_running(int(temporary.name.split(".")[-3])):
            shutil.rmtree(temporary, ignore_errors=True)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
