"""Records of jsonl, parquet and text files, one after the other, in bounded memory."""

import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from moesaic.common.errors import MoesaicError
from moesaic.common.progress import Tick
from moesaic.data.files import DataFile

READ_CHUNK = 1 << 16
PARQUET_ROWS = 256


class Record(NamedTuple):
    """One record and the place it came from."""

    where: str
    """For messages: `FILE:LINE`, `FILE: row N` or `FILE`."""
    fields: dict[str, Any]


def read_records(file: DataFile, fields: tuple[str, ...], tick: Tick) -> Iterator[Record]:
    """The records of one file; `tick` is told the bytes read from the disk.

    A text file is one record with the single one of `fields`. Of parquet, only `fields` are read.
    Raises `MoesaicError` with the file and the line or row for anything that cannot be read.
    """
    try:
        yield from _READERS[file.format](file, fields, tick)
    except OSError as error:
        raise MoesaicError(f"{file.path}: cannot be read ({error.strerror or error})") from error


def _read_jsonl(file: DataFile, _fields: tuple[str, ...], tick: Tick) -> Iterator[Record]:
    number = 0
    for number, line in enumerate(_lines(_chunks(file.path, tick)), start=1):
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if line.isspace() or not line:
            continue
        where = f"{file.path}:{number}"
        try:
            fields = json.loads(line.decode())
        except UnicodeDecodeError as error:
            raise MoesaicError(f"{where}: not UTF-8 ({error.reason} at byte {error.start}); re-encode it") from error
        except (ValueError, RecursionError) as error:
            raise MoesaicError(f"{where}: not JSON ({error}); expected one object per line") from error
        if not isinstance(fields, dict):
            raise MoesaicError(f"{where}: expected a JSON object, found {type(fields).__name__}")
        yield Record(where, fields)


def _read_text(file: DataFile, fields: tuple[str, ...], tick: Tick) -> Iterator[Record]:
    content = b"".join(_chunks(file.path, tick)).removeprefix(b"\xef\xbb\xbf")
    try:
        yield Record(str(file.path), {fields[0]: content.decode()})
    except UnicodeDecodeError as error:
        raise MoesaicError(f"{file.path}: not UTF-8 ({error.reason} at byte {error.start}); re-encode it") from error


def _read_parquet(file: DataFile, fields: tuple[str, ...], tick: Tick) -> Iterator[Record]:
    pyarrow = import_optional("pyarrow", f"{file.path}: parquet files need")
    parquet = import_optional("pyarrow.parquet", f"{file.path}: parquet files need")
    row = 0
    try:
        with parquet.ParquetFile(file.path, buffer_size=1 << 20) as table:
            names = table.schema_arrow.names
            for name in fields:
                if name not in names:
                    raise missing_field(str(file.path), name, names)
            for batch in table.iter_batches(batch_size=PARQUET_ROWS, columns=list(fields)):
                tick(file.size * batch.num_rows / table.metadata.num_rows)
                for values in batch.to_pylist():
                    row += 1
                    yield Record(f"{file.path}: row {row}", values)
    except UnicodeDecodeError as error:
        raise MoesaicError(f"{file.path}: near row {row + 1}: not UTF-8 ({error.reason}); re-encode it") from error
    except pyarrow.ArrowException as error:
        raise MoesaicError(f"{file.path}: damaged or not parquet ({str(error).splitlines()[0]})") from error


_READERS: dict[str, Callable[[DataFile, tuple[str, ...], Tick], Iterator[Record]]] = {
    "jsonl": _read_jsonl,
    "parquet": _read_parquet,
    "text": _read_text,
}


def missing_field(where: str, name: str, present: Any) -> MoesaicError:
    """The error for a record without a field that the recipe names."""
    found = ", ".join(sorted(map(str, present))) or "none"
    return MoesaicError(f"{where}: no field {name!r}; the record has {found}; set text, messages, prompt or tokens")


def import_optional(module: str, purpose: str) -> Any:
    """Import a package of the `train` extra, or say in one line how to get it."""
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MoesaicError(f"{purpose} {module}; pip install 'moesaic[train]'") from error


def _lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    parts: list[bytes] = []
    for chunk in chunks:
        first, *others = chunk.split(b"\n")
        parts.append(first)
        if others:
            yield b"".join(parts)
            yield from others[:-1]
            parts = [others[-1]]
    if any(parts):
        yield b"".join(parts)


def _chunks(path: Path, tick: Tick) -> Iterator[bytes]:
    """The decompressed bytes of a file. A compressed file may consist of several streams one after the other."""
    new_decoder = _DECODERS.get(path.suffix)
    with path.open("rb", buffering=0) as file:
        decoder = None
        while chunk := file.read(READ_CHUNK):
            tick(len(chunk))
            if new_decoder is None:
                yield chunk
                continue
            try:
                while chunk:
                    decoder = decoder or new_decoder(path)
                    yield decoder.decompress(chunk)
                    chunk = decoder.unused_data if decoder.eof else b""
                    decoder = None if decoder.eof else decoder
            except _decoder_errors() as error:
                raise MoesaicError(f"{path}: damaged {path.suffix} file ({error}); fetch it again") from error
        if decoder is not None:
            raise MoesaicError(f"{path}: the {path.suffix} file is cut off; fetch it again")


def _zstd_decoder(path: Path) -> Any:
    zstandard = import_optional("zstandard", f"{path}: .zst files need")
    return zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()


_DECODERS: dict[str, Callable[[Path], Any]] = {
    ".gz": lambda _path: zlib.decompressobj(wbits=31),
    ".zst": _zstd_decoder,
}


def _decoder_errors() -> tuple[type[Exception], ...]:
    import sys

    zstandard = sys.modules.get("zstandard")
    return (zlib.error,) if zstandard is None else (zlib.error, zstandard.ZstdError)
