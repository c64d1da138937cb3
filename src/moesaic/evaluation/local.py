"""What is measured in local files, and under which selections: the rows of each part in the hub's form, one selection
for all tasks or a folder with one per task or category, and the rows that these were made on. Torch-free.
"""

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from moesaic.checkpoint.source import Checkpoint
from moesaic.common.errors import MoesaicError
from moesaic.common.files import explained
from moesaic.common.recipe import convert_fields
from moesaic.data.calibration import in_split, record_digest
from moesaic.data.files import DataFile, Record, hash_files, read_records, rows_file
from moesaic.evaluation.benchmarks import Benchmark
from moesaic.evaluation.rows import index_of, lacking
from moesaic.evaluation.tasks import Row
from moesaic.families.identity import describe, refuse_other_model
from moesaic.families.moe import detect_running
from moesaic.routing.subset import Selection, load_selection

_COMPRESSIONS = ("", ".gz", ".zst")
_DIGITS = 16  # of a record's digest
WHOLE = ""
"""The part of a benchmark that has no parts."""


class DataMissingError(Exception):
    """The data of a benchmark is not there; the text says what was looked for."""


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """The share of the evaluated rows that selections were made on, and the seed that drew it."""

    share: float
    seed: int
    rows: frozenset[str] | None = None
    """Digests of the rows, where a selection says them; None: the draw by a row's content says."""

    def holds(self, digest: str) -> bool:
        """Whether a row is in it, by its content."""
        return digest in self.rows if self.rows is not None else in_split(digest, share=self.share, seed=self.seed)

    def record(self) -> dict[str, Any]:
        """What results say of it."""
        return {"share": self.share, "seed": self.seed}


@dataclass(frozen=True, kw_only=True)
class LocalData:
    """The rows of a benchmark."""

    rows: Mapping[str, Mapping[str, list[Row]]]
    """Part (value of the benchmark's `part_field`, or `WHOLE`) -> split -> rows; parts without rows are left out."""
    places: Mapping[str, list[tuple[int, str]]]
    """Part -> of each evaluated row, the number and the digest of the record that it is of."""
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
    name: str, benchmark: Benchmark, folder: Path | None, *, shots: int, held_out: HeldOut | None = None
) -> LocalData:
    """Read the rows of a benchmark and, where demonstrations come from a split, of that split.

    Raises:
        DataMissingError: a file that is needed is not there, or has no row of any part.
        MoesaicError: a row that is broken, with its file and line.
    """
    refuse_too_many_shots(benchmark, shots)
    splits = [benchmark.split]
    if shots and benchmark.shot_split is not None:
        splits.append(benchmark.shot_split)
    files = {split: find_rows(name, benchmark, folder, split, shots=shots) for split in splits}
    parts = dict.fromkeys(benchmark.parts.values() if benchmark.part_field else (WHOLE,))
    rows: dict[str, dict[str, list[Row]]] = {part: {split: [] for split in splits} for part in parts}
    places: dict[str, list[tuple[int, str]]] = {part: [] for part in parts}
    for split, file in files.items():
        evaluated = split == benchmark.split
        for part, row, place in _rows(file, benchmark, held_out if evaluated else None):
            if part in rows:
                rows[part][split].append(row)
            if part in rows and evaluated:
                places[part].append(place)
    _refuse_few_demonstrations(benchmark, files, rows, shots=shots)
    complete = {part: by_split for part, by_split in rows.items() if all(by_split.values())}
    if not complete:
        raise DataMissingError(f"{files[benchmark.split]} has no rows of {name}")
    return LocalData(
        rows=complete,
        places=places,
        hashes=file_hashes([rows_file(path) for path in files.values()]),
        missing_parts=tuple(part for part in parts if part not in complete),
    )


def _refuse_few_demonstrations(
    benchmark: Benchmark, files: Mapping[str, Path], rows: Mapping[str, Mapping[str, list[Row]]], *, shots: int
) -> None:
    """Refuse a split with fewer rows than a question has demonstrations; one that is asked itself needs one more."""
    split = benchmark.shot_split
    if not shots or split is None:
        return
    itself = int(split == benchmark.split)
    for part, by_split in rows.items():
        found = len(by_split[split])
        if 0 < found < shots + itself and by_split[benchmark.split]:
            of = f" of {part}" if part else ""
            raise DataMissingError(
                f"{files[split]} has {found} rows{of}, and each question needs {shots} others as demonstrations; "
                f"take {found - itself} shots at most"
            )


def refuse_too_many_shots(benchmark: Benchmark, shots: int) -> None:
    """Refuse more demonstrations than a benchmark has."""
    if benchmark.demonstrations is not None and shots > benchmark.demonstrations:
        raise DataMissingError(f"it has {benchmark.demonstrations} demonstrations, not {shots}")


def find_rows(name: str, benchmark: Benchmark, folder: Path | None, split: str, *, shots: int) -> Path:
    """The file of a split, where the task says it is or in the folder.

    Raises:
        DataMissingError: there is none.
    """
    if benchmark.paths:
        return benchmark.paths[split]
    if folder is None:
        raise DataMissingError(f"{name}: its rows are files of a folder; give it with --data-dir")
    try:
        return find_split(folder, benchmark.files or name, split)
    except DataMissingError as error:
        if split == benchmark.split:
            raise
        raise DataMissingError(f"{error}, from which its {shots} demonstrations come; --shots 0 takes none") from error


def _rows(file: Path, benchmark: Benchmark, held_out: HeldOut | None) -> Iterator[tuple[str, Row, tuple[int, str]]]:
    """Part, row and place of what a file has of a benchmark."""
    for number, record in enumerate(read_records(rows_file(file), None, lambda _amount: None)):
        digest = record_digest(record.fields)
        if held_out is not None and held_out.holds(digest):
            continue
        part = _part(record, benchmark.part_field)
        for row in _adapted(record, benchmark):
            yield part, row, (number, digest)


def digests_of(file: Path) -> list[str]:
    """The digest of every record of a file with rows."""
    return [record_digest(record.fields) for record in read_records(rows_file(file), None, lambda _amount: None)]


def _adapted(record: Record, benchmark: Benchmark) -> list[Row]:
    """The rows of a record in the hub's form, every field in its type."""
    _refuse_surrogates(record)
    rows, local = [record.fields], benchmark.local
    missing = lacking(benchmark.fields, record.fields)
    if missing and local is not None:
        if still := lacking(local, record.fields):
            raise _not_a_row(record, benchmark, still[0])
        read = convert_fields(local, record.fields, name=record.where)
        with _at(record):
            if local.get("answer") is int:
                index_of("choices")(read)
            rows = list(benchmark.adapt(read))
    elif missing:
        raise _not_a_row(record, benchmark, missing[0])
    typed = [convert_fields(benchmark.fields, row, name=record.where) for row in rows]
    if benchmark.check is not None:
        with _at(record):
            for row in typed:
                benchmark.check(row)
    return typed


def _refuse_surrogates(record: Record) -> None:
    """Refuse text that no tokenizer takes, wherever it lies in the record."""
    for name, value in record.fields.items():
        try:
            json.dumps(value, ensure_ascii=False, default=str).encode()
        except UnicodeEncodeError as error:
            raise MoesaicError(f"{record.where}: {name}: is not valid Unicode (a lone surrogate); remove it") from error


@contextlib.contextmanager
def _at(record: Record) -> Iterator[None]:
    """Put a record's place before what is wrong with it."""
    try:
        yield
    except MoesaicError as error:
        raise MoesaicError(f"{record.where}: {error}") from error


def _not_a_row(record: Record, benchmark: Benchmark, missing: str) -> MoesaicError:
    forms = [", ".join(benchmark.fields)]
    if benchmark.local is not None:
        forms.append(", ".join(name for name in benchmark.local if lacking({name: benchmark.local[name]}, {})))
    # A task of one's own has no rows on the hub.
    known = f"its file asks for {forms[-1]}" if benchmark.paths else f"the hub's are {', or those here '.join(forms)}"
    return MoesaicError(
        f"{record.where}: not a row of {benchmark.title} (no field {missing!r}); its fields are "
        f"{', '.join(map(str, record.fields))}, and {known}"
    )


def _part(record: Record, field: str | None) -> str:
    if field is None:
        return WHOLE
    if field not in record.fields:
        raise MoesaicError(f"{record.where}: no field {field!r}, which says what part of the benchmark the row is of")
    return str(record.fields[field]).strip().lower().replace(" ", "_")


def file_hashes(files: Sequence[DataFile]) -> dict[str, str]:
    """File name -> xxh3_128 of its bytes."""
    hashes = hash_files(tuple(files), label="hashing", quiet=True)
    return {file.path.name: digest for file, digest in zip(files, hashes, strict=True)}


# --- selections that an evaluation runs under -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Subset:
    """A selection and the file it came from."""

    file: Path
    digest: str
    selection: Selection

    def record(self) -> dict[str, Any]:
        """What results say of it."""
        counts = self.selection.counts
        return {
            "file": str(self.file),
            "hash": self.digest,
            "method": self.selection.method,
            "kept": counts[0] if len(set(counts)) == 1 else list(counts),
            "of": self.selection.source.num_experts,
        }

    def drawn(self) -> HeldOut | None:
        """The share of the rows that it was made on, where it was made on a share."""
        share = self._data.get("split")
        if share is None or share >= 1:
            return None
        return HeldOut(share=float(share), seed=int(self._data.get("seed", 0)), rows=self.rows)

    @property
    def rows(self) -> frozenset[str] | None:
        """Digests of the records that it was made on; None where it does not say."""
        text = self._data.get("rows")
        if not isinstance(text, str):
            return None
        return frozenset(text[start : start + _DIGITS] for start in range(0, len(text), _DIGITS))

    @property
    def needs_rows(self) -> bool:
        """Whether it was made on records at all."""
        return bool(self._data) or bool(self.selection.details.get("domains"))

    def seen(self, digests: Iterable[str]) -> int:
        """How many of some records it was made on; of one that does not say, 0."""
        rows = self.rows or frozenset()
        return sum(digest in rows for digest in digests)

    @property
    def _data(self) -> dict[str, Any]:
        return self.selection.details.get("data") or {}


@dataclass(frozen=True, kw_only=True)
class Subsets:
    """Selections by the stem of their file; a single file is for every task."""

    path: Path
    by_name: dict[str, Subset]
    single: bool

    def find(self, task: str) -> Subset:
        """The selection for a task.

        Raises:
            DataMissingError: the folder has none for it.
        """
        if self.single:
            return next(iter(self.by_name.values()))
        names = dict.fromkeys((task, task.removeprefix("mmlu_pro_").removeprefix("mmlu_")))  # MMLU: by category as well
        for name in names:
            if name in self.by_name:
                return self.by_name[name]
        raise DataMissingError(f"no selection {' or '.join(f'{name}.json' for name in names)} in {self.path}")


def load_subsets(path: Path, checkpoint: Checkpoint) -> Subsets:
    """Read one selection, or all of a folder, and check that they were made for this checkpoint.

    Raises:
        MoesaicError: a file that is no selection or is of another model; a checkpoint without routed experts.
    """
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not files:
        raise MoesaicError(f"--selection {path}: the folder has no selection (.json); make them with `moesaic select`")
    source = describe(checkpoint, detect_running(checkpoint))
    found = {}
    for file in files:
        selection = load_selection(file)
        refuse_other_model(selection.source, source, str(file))
        with explained(file):
            digest = xxhash.xxh3_128_hexdigest(file.read_bytes())
        found[file.stem] = Subset(file=file, digest=digest, selection=selection)
    return Subsets(path=path, by_name=found, single=not path.is_dir())
