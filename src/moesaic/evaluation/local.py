"""Benchmarks in local files: which files, and the rows of each part in the hub's form. Torch-free."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from moesaic.common.errors import MoesaicError
from moesaic.data.files import SUFFIXES, DataFile, Record, hash_files, read_records
from moesaic.evaluation.benchmark import Benchmark
from moesaic.evaluation.rows import Row, as_is, is_choice
from moesaic.selection.calibration import in_split

_COMPRESSIONS = ("", ".gz", ".zst")
WHOLE = ""
"""The part of a benchmark that has no parts."""


class DataMissingError(Exception):
    """The data of a benchmark is not there; the text says what was looked for."""


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """The share of the evaluated rows that selections were made on, and the seed that drew it."""

    share: float
    seed: int


@dataclass(frozen=True, kw_only=True)
class LocalData:
    """The rows of a benchmark."""

    rows: Mapping[str, Mapping[str, list[Row]]]
    """Part (value of the benchmark's `part_field`, or `WHOLE`) -> split -> rows; parts without rows are left out."""
    hashes: Mapping[str, str]
    """File name -> xxh3_128 of its bytes."""
    missing_parts: tuple[str, ...]


def find_split(folder: Path, stem: str, split: str) -> Path:
    """The file STEM.SPLIT.jsonl, or STEM.SPLIT_anything.jsonl, plain or compressed.

    Raises:
        DataMissingError: there is none.
        MoesaicError: there are several.
    """
    endings = tuple(f".jsonl{compression}" for compression in _COMPRESSIONS)
    found = sorted(
        file
        for file in folder.iterdir()
        if file.name.endswith(endings) and file.name.startswith((f"{stem}.{split}.", f"{stem}.{split}_"))
    )
    if not found:
        raise DataMissingError(f"no {stem}.{split}.jsonl in {folder}")
    if len(found) > 1:
        raise MoesaicError(
            f"{folder}: {found[0].name} and {found[1].name} are both {stem}'s {split} rows; keep one of them"
        )
    return found[0]


def read_local(
    name: str, benchmark: Benchmark, folder: Path, *, shots: int, held_out: HeldOut | None = None
) -> LocalData:
    """Read the rows of a benchmark and, where demonstrations come from a split, of that split.

    Raises:
        DataMissingError: a file that is needed is not there, or has no row of any part.
        MoesaicError: a row that is broken, with its file and line.
    """
    refuse_too_many_shots(benchmark, shots)
    stem = benchmark.files or name
    splits = [benchmark.split]
    if shots and benchmark.shot_split is not None:
        splits.append(benchmark.shot_split)
    files = {split: _find(folder, stem, split, shots=shots, evaluated=benchmark.split) for split in splits}
    parts = dict.fromkeys(benchmark.parts.values() if benchmark.part_field else (WHOLE,))
    rows: dict[str, dict[str, list[Row]]] = {part: {split: [] for split in splits} for part in parts}
    for split, file in files.items():
        left_out = held_out if split == benchmark.split else None
        for part, row in _rows(file, benchmark, left_out):
            if part in rows:
                rows[part][split].append(row)
    complete = {part: by_split for part, by_split in rows.items() if all(by_split.values())}
    if not complete:
        raise DataMissingError(f"{files[benchmark.split]} has no rows of {name}")
    return LocalData(
        rows=complete,
        hashes=_hashes(files),
        missing_parts=tuple(part for part in parts if part not in complete),
    )


def refuse_too_many_shots(benchmark: Benchmark, shots: int) -> None:
    """Refuse more demonstrations than a benchmark has."""
    if benchmark.demonstrations is not None and shots > benchmark.demonstrations:
        raise DataMissingError(f"it has {benchmark.demonstrations} demonstrations, not {shots}")


def _find(folder: Path, stem: str, split: str, *, shots: int, evaluated: str) -> Path:
    try:
        return find_split(folder, stem, split)
    except DataMissingError as error:
        if split == evaluated:
            raise
        raise DataMissingError(f"{error}, from which its {shots} demonstrations come; --shots 0 takes none") from error


def _rows(file: Path, benchmark: Benchmark, held_out: HeldOut | None) -> Iterator[tuple[str, Row]]:
    for number, record in enumerate(_records(file)):
        if held_out is not None and in_split(number, share=held_out.share, seed=held_out.seed):
            continue
        part = _part(record, benchmark.part_field)
        for row in _adapted(record, benchmark):
            yield part, row


def _adapted(record: Record, benchmark: Benchmark) -> list[Row]:
    """The rows of a record in the hub's form."""
    adapt = benchmark.adapt if benchmark.adapts_all or is_choice(record.fields) else as_is
    try:
        rows = list(adapt(record.fields))
    except KeyError as error:
        raise _not_a_row(record, benchmark, f"no field {error}") from error
    except (ValueError, TypeError, AttributeError, IndexError) as error:
        raise _not_a_row(record, benchmark, str(error)) from error
    for row in rows:
        if lacking := [name for name in benchmark.fields if name not in row]:
            raise _not_a_row(record, benchmark, f"no field {lacking[0]!r}")
    return rows


def _not_a_row(record: Record, benchmark: Benchmark, reason: str) -> MoesaicError:
    return MoesaicError(
        f"{record.where}: not a row of {benchmark.title} ({reason}); it has {', '.join(map(str, record.fields))}, and "
        f"the hub's fields are {', '.join(benchmark.fields)}"
    )


def _records(file: Path) -> Iterator[Record]:
    return read_records(_data_file(file), ("text",), lambda _amount: None)


def _part(record: Record, field: str | None) -> str:
    if field is None:
        return WHOLE
    if field not in record.fields:
        raise MoesaicError(f"{record.where}: no field {field!r}, which says what part of the benchmark the row is of")
    return str(record.fields[field]).strip().lower().replace(" ", "_")


def _data_file(path: Path) -> DataFile:
    return DataFile(path=path, format=SUFFIXES[".jsonl"], size=path.stat().st_size)


def _hashes(files: Mapping[str, Path]) -> dict[str, str]:
    found = tuple(_data_file(path) for path in files.values())
    hashes = hash_files(found, label="hashing", quiet=True)
    return {file.path.name: digest for file, digest in zip(found, hashes, strict=True)}
