"""Documents where they lie: files, folders and hub data sets, and their records one after the other in bounded memory.

What a source consists of is settled before anything is read: `find_files` with `hash_files`, or `resolve_hub` with a
commit. These say what the content is; `read_records` and `read_hub` give it.
"""

import csv
import importlib
import io
import json
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import xxhash

from moesaic.common.errors import MoesaicError
from moesaic.common.progress import Tick, notice, progress
from moesaic.data.recipe import SourceRecipe

Format = Literal["jsonl", "parquet", "text", "csv"]
Fields = tuple[str, ...] | None
SUFFIXES: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".txt": "text",
    ".md": "text",
}
COMPRESSED = (".gz", ".zst")
PREFIX = "hf://"
HASH_CHUNK = 1 << 22
READ_CHUNK = 1 << 16
MOST_BYTES = 1 << 26
"""Of one document: ten times the longest book. What is longer lacks its line ends, or is no text."""
PACKED_BYTES = 1 << 8
"""Of a compressed file, unpacked at once: zstd makes at most 128 KiB of four bytes."""
PARQUET_ROWS, PARQUET_BYTES = 256, 1 << 28
"""At once, because a row may hold a whole book."""

_REFERENCE = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(@(?P<revision>[^:@]+))?(:(?P<first>[^:]+))?(:(?P<second>[^:]+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, kw_only=True)
class DataFile:
    """One file with documents."""

    path: Path
    format: Format
    size: int
    """Bytes on disk."""

    @property
    def compression(self) -> str:
        """The ending that says how the file is compressed, or nothing."""
        return self.path.suffix if self.path.suffix in COMPRESSED else ""


@dataclass(frozen=True, kw_only=True)
class HubData:
    """A split of a hub data set at one commit, which stands for its content."""

    name: str
    commit: str
    config: str | None
    split: str


class Record(NamedTuple):
    """One record and the place it came from."""

    where: str
    """For messages: `FILE:LINE`, `FILE: row N` or `FILE`."""
    fields: dict[str, Any]


def find_files(source: SourceRecipe, *, quiet: bool = False) -> tuple[DataFile, ...]:
    """The files of a source that is a file or a folder, in the order of their paths below it.

    Hidden files are passed over; in a folder with `format: auto`, so are files of other kinds, which is said.
    Raises `MoesaicError` where there is nothing to read, or where `auto` cannot tell what a file is.
    """
    path = Path(source.path).expanduser()
    if path.is_file():
        kind = _format_of(path, source)
        if kind is None:
            known = ", ".join(SUFFIXES)
            raise MoesaicError(
                f"{path}: cannot tell the format from the name ({known}); set format: jsonl|parquet|text"
            )
        return (_data_file(path, kind),)
    if not path.is_dir():
        raise MoesaicError(f"{source.path}: no such file or folder; give a path, or hf://org/name for a hub data set")
    names = {file: file.relative_to(path).parts for file in sorted(path.rglob("*")) if file.is_file()}
    found = [file for file, parts in names.items() if not any(part.startswith(".") for part in parts)]
    kinds: list[tuple[Path, Format | None]] = [(file, _format_of(file, source)) for file in found]
    files = tuple(_data_file(file, kind) for file, kind in kinds if kind is not None)
    if not files:
        raise MoesaicError(f"{path}: no data files in this folder ({', '.join(SUFFIXES)}); set format to read others")
    if len(files) < len(found):
        notice(
            f"{path}: reading {len(files)} files, passing over {len(found) - len(files)} of other kinds", quiet=quiet
        )
    return files


def rows_file(path: Path) -> DataFile:
    """A file with the rows of a task; tables with commas as well, which a folder of texts is not searched for.

    Raises:
        MoesaicError: its name does not say how it is to be read.
    """
    name = path.with_suffix("") if path.suffix in COMPRESSED else path
    known: dict[str, Format] = {**SUFFIXES, ".csv": "csv"}
    kind = known.get(name.suffix)
    if kind is None or kind == "text":
        raise MoesaicError(f"{path}: rows of a task are .jsonl, .parquet or .csv, {' or '.join(COMPRESSED)} included")
    return _data_file(path, kind)


def _data_file(path: Path, kind: Format) -> DataFile:
    size = path.stat().st_size
    if size == 0 and kind != "text":  # an empty text is an empty document, which is counted
        raise MoesaicError(f"{path}: the file is empty; remove it from the data")
    return DataFile(path=path, format=kind, size=size)


def _format_of(path: Path, source: SourceRecipe) -> Format | None:
    if source.format != "auto":
        return source.format
    name = path.with_suffix("") if path.suffix in COMPRESSED else path
    return SUFFIXES.get(name.suffix)


def hash_files(files: tuple[DataFile, ...], *, label: str, quiet: bool = False) -> list[str]:
    """The xxh3_128 of each file's bytes."""
    with progress(sum(file.size for file in files), label=label, quiet=quiet) as tick, ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda file: _hash(file.path, tick), files))


def _hash(path: Path, tick: Tick) -> str:
    digest = xxhash.xxh3_128()
    try:
        with path.open("rb", buffering=0) as file:
            while chunk := file.read(HASH_CHUNK):
                digest.update(chunk)
                tick(len(chunk))
    except OSError as error:
        raise MoesaicError(f"{path}: cannot be read ({error.strerror})") from error
    return digest.hexdigest()


def read_records(file: DataFile, fields: Fields, tick: Tick) -> Iterator[Record]:
    """The records of one file; `tick` is told the bytes read from the disk.

    A text file is one record with the first of `fields`. Of parquet, only `fields` are read. None: all fields there
    are, and `text` of a text file.
    Raises `MoesaicError` with the file and the line or row for anything that cannot be read.
    """
    try:
        yield from _READERS[file.format](file, fields, tick)
    except OSError as error:
        raise MoesaicError(f"{file.path}: cannot be read ({error.strerror or error})") from error


def _read_jsonl(file: DataFile, _fields: Fields, tick: Tick) -> Iterator[Record]:
    for number, line in enumerate(_lines(_chunks(file.path, tick), file.path), start=1):
        if number == 1:
            line = line.removeprefix(_BYTE_ORDER_MARK)
        if line.isspace() or not line:
            continue
        where = f"{file.path}:{number}"
        text = _text(line, where)
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise MoesaicError(f"{where}: not JSON ({error}); expected one object per line") from error
        if not isinstance(fields, dict):
            raise MoesaicError(f"{where}: expected a JSON object, found {type(fields).__name__}")
        yield Record(where, fields)


def _read_text(file: DataFile, fields: Fields, tick: Tick) -> Iterator[Record]:
    content = _whole(file, tick)
    yield Record(str(file.path), {(fields or ("text",))[0]: _text(content, str(file.path))})


def _read_csv(file: DataFile, _fields: Fields, tick: Tick) -> Iterator[Record]:
    number = 0
    try:
        for number, values in enumerate(
            csv.DictReader(io.StringIO(_text(_whole(file, tick), str(file.path)))), start=1
        ):
            where = f"{file.path}: row {number}"
            if None in values or None in values.values():
                raise MoesaicError(
                    f"{where}: has another number of fields than the first line names; put texts in quotes"
                )
            yield Record(where, values)
    except csv.Error as error:
        raise MoesaicError(f"{file.path}: after row {number}: not a table with commas ({error})") from error


def _whole(file: DataFile, tick: Tick) -> bytes:
    parts, size = [], 0
    for chunk in _chunks(file.path, tick):
        parts.append(chunk)
        size = _bounded(size + len(chunk), str(file.path))
    return b"".join(parts).removeprefix(_BYTE_ORDER_MARK)


def _text(content: bytes, where: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise MoesaicError(f"{where}: not UTF-8 ({error.reason} at byte {error.start}); re-encode it") from error


def _read_parquet(file: DataFile, fields: Fields, tick: Tick) -> Iterator[Record]:
    pyarrow = import_optional("pyarrow", f"{file.path}: parquet files need")
    parquet = import_optional("pyarrow.parquet", f"{file.path}: parquet files need")
    row = 0
    try:
        with parquet.ParquetFile(file.path, buffer_size=1 << 20) as table:
            names = table.schema_arrow.names
            for name in fields or ():
                if name not in names:
                    raise missing_field(str(file.path), name, names)
            rows = _rows_at_once(table.metadata, str(file.path))
            for batch in table.iter_batches(batch_size=rows, columns=fields and list(fields)):
                tick(file.size * batch.num_rows / table.metadata.num_rows)
                for values in batch.to_pylist():
                    row += 1
                    where = f"{file.path}: row {row}"
                    _bounded(sum(len(one) for one in values.values() if isinstance(one, str)), where)
                    yield Record(where, values)
    except UnicodeDecodeError as error:
        raise MoesaicError(f"{file.path}: near row {row + 1}: not UTF-8 ({error.reason}); re-encode it") from error
    except pyarrow.ArrowException as error:
        raise MoesaicError(f"{file.path}: damaged or not parquet ({str(error).splitlines()[0]})") from error


def _rows_at_once(metadata: Any, where: str) -> int:
    """How many rows are unpacked at once: a text that many rows share is stored once, and each of them gets a copy."""
    largest = 1
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        for column in map(group.column, range(group.num_columns)):
            largest = max(largest, column.total_uncompressed_size)  # no text in it is longer
            _bounded(column.total_uncompressed_size // max(group.num_rows, 1), where)
    return min(max(PARQUET_BYTES // largest, 1), PARQUET_ROWS)


_READERS: dict[str, Callable[[DataFile, Fields, Tick], Iterator[Record]]] = {
    "jsonl": _read_jsonl,
    "parquet": _read_parquet,
    "text": _read_text,
    "csv": _read_csv,
}


def missing_field(where: str, name: str, present: Any) -> MoesaicError:
    """The error for a record without a field that the recipe names."""
    found = ", ".join(sorted(map(str, present))) or "none"
    return MoesaicError(f"{where}: no field {name!r}; the record has {found}; set text, messages, prompt or tokens")


def import_optional(module: str, purpose: str) -> Any:
    """Import a package of the `train` extra, or say in one line how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MoesaicError(f"{purpose} {module}; pip install 'moesaic[train]'") from error


def _lines(chunks: Iterator[bytes], path: Path) -> Iterator[bytes]:
    parts: list[bytes] = []
    number, size = 1, 0
    for chunk in chunks:
        first, *others = chunk.split(b"\n")
        parts.append(first)
        size = _bounded(size + len(first), f"{path}:{number}")
        if others:
            yield b"".join(parts)
            yield from others[:-1]
            parts, size, number = [others[-1]], len(others[-1]), number + len(others)
    if any(parts):
        yield b"".join(parts)


def _bounded(size: int, where: str) -> int:
    """The bytes of a document, or of what there is of it so far, that are not too many."""
    if size > MOST_BYTES:
        most = MOST_BYTES >> 20
        raise MoesaicError(f"{where}: the document has more than {most} MiB; cut it, one document per line")
    return size


def _chunks(path: Path, tick: Tick) -> Iterator[bytes]:
    """The decompressed bytes of a file, at most `HASH_CHUNK` at once, whatever they were made of."""
    with path.open("rb", buffering=0) as file:
        packed = iter(lambda: file.read(READ_CHUNK), b"")
        new_decoder = _DECODERS.get(path.suffix)
        for chunk in packed if new_decoder is None else _unpacked(path, packed, new_decoder, tick):
            if new_decoder is None:
                tick(len(chunk))
            yield from (chunk[start : start + HASH_CHUNK] for start in range(0, len(chunk), HASH_CHUNK))


def _unpacked(path: Path, packed: Iterator[bytes], new_decoder: Callable[[Path], Any], tick: Tick) -> Iterator[bytes]:
    """A compressed file may consist of several streams one after the other.

    The decoders are driven here because gzip.open and zstandard's reader do not both tell a file that is cut off.
    """
    decoder = None
    for chunk in packed:
        tick(len(chunk))
        try:
            for start in range(0, len(chunk), PACKED_BYTES):
                left = chunk[start : start + PACKED_BYTES]
                while left:
                    decoder = decoder or new_decoder(path)
                    yield decoder.decompress(left)
                    left = decoder.unused_data if decoder.eof else b""
                    decoder = None if decoder.eof else decoder
        except (zlib.error, getattr(sys.modules.get("zstandard"), "ZstdError", zlib.error)) as error:
            raise MoesaicError(f"{path}: damaged {path.suffix} file ({error}); fetch it again") from error
    if decoder is not None:
        raise MoesaicError(f"{path}: the {path.suffix} file is cut off; fetch it again")


def _zstd_decoder(path: Path) -> Any:
    zstandard = import_optional("zstandard", f"{path}: .zst files need")
    return zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()


_DECODERS: dict[str, Callable[[Path], Any]] = {
    ".gz": lambda _path: zlib.decompressobj(wbits=31),  # 16 + 15: a gzip header, and the largest window
    ".zst": _zstd_decoder,
}


def resolve_hub(path: str) -> HubData:
    """Parse `hf://org/name[@revision][:config][:split]` and find the commit of its revision.

    With one part after the name it is the split, with two the config and the split. No request is made where the
    revision is a commit already.
    """
    match = _REFERENCE.fullmatch(path.removeprefix(PREFIX))
    if match is None:
        raise MoesaicError(f"{path}: expected hf://org/name[@revision][:config][:split]")
    name, revision, first, second = match.group("name", "revision", "first", "second")
    config, split = (first, second) if second else (None, first or "train")
    commit = revision if revision and _COMMIT.fullmatch(revision) else _find_commit(path, name, revision)
    return HubData(name=name, commit=commit, config=config, split=split)


def _find_commit(path: str, name: str, revision: str | None) -> str:
    from huggingface_hub import HfApi

    try:
        commit = HfApi().dataset_info(name, revision=revision).sha
    except Exception as error:
        reason = _first_line(error)
        raise MoesaicError(f"{path}: cannot find the revision on the hub ({reason}); offline, give @COMMIT") from error
    assert commit is not None
    return commit


def read_hub(data: HubData) -> Iterator[Record]:
    """The records of the split, as they arrive."""
    where = f"{PREFIX}{data.name}:{data.split}"
    datasets = import_optional("datasets", f"{where}: hub data sets need")
    try:
        rows = datasets.load_dataset(data.name, data.config, split=data.split, revision=data.commit, streaming=True)
    except Exception as error:  # not found, no such config or split, gated, offline: the library says which
        raise MoesaicError(f"{where}: cannot be opened ({_first_line(error)})") from error
    number = 0
    try:
        for number, fields in enumerate(rows, start=1):
            yield Record(f"{where}: row {number}", fields)
    except Exception as error:  # whatever the network or the data set's files raise
        raise MoesaicError(f"{where}: reading stopped after row {number} ({_first_line(error)})") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
