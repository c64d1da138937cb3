"""Which files a source consists of, and the hash of their content."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import xxhash

from moesaic.common.errors import MoesaicError
from moesaic.common.progress import Tick, notice, progress
from moesaic.data.recipe import SourceRecipe

Format = Literal["jsonl", "parquet", "text"]
SUFFIXES: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".txt": "text",
    ".md": "text",
}
COMPRESSED = (".gz", ".zst")
HASH_CHUNK = 1 << 22


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
    found = [file for file in path.rglob("*") if file.is_file() and not _is_hidden(file.relative_to(path))]
    kinds: list[tuple[Path, Format | None]] = [(file, _format_of(file, source)) for file in sorted(found)]
    files = tuple(_data_file(file, kind) for file, kind in kinds if kind is not None)
    if not files:
        raise MoesaicError(f"{path}: no data files in this folder ({', '.join(SUFFIXES)}); set format to read others")
    if len(files) < len(found):
        notice(
            f"{path}: reading {len(files)} files, passing over {len(found) - len(files)} of other kinds", quiet=quiet
        )
    return files


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


def _is_hidden(relative: Path) -> bool:
    return any(part.startswith(".") for part in relative.parts)
