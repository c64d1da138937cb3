"""Records of data files as texts with a domain. Torch-free."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from moesaic.common.errors import MoesaicError
from moesaic.common.progress import notice, progress
from moesaic.data.calibration import domain_of, render
from moesaic.data.files import DataFile, find_files
from moesaic.data.hub import PREFIX, read_hub, resolve_hub
from moesaic.data.readers import Record, import_optional, read_records
from moesaic.data.recipe import SourceRecipe

DOMAIN_FIELD = "domain"
"""Used where the records have it and no other field is named."""


class Entry(NamedTuple):
    """One record."""

    text: str
    domain: str
    where: str
    """File and line or row."""


class Entries:
    """The records of all data, in the order given; `domain_field` is known after they were read."""

    def __init__(self, data: Sequence[str], domain_field: str | None, *, quiet: bool = True) -> None:
        self._data = data
        self._asked = domain_field
        self._quiet = quiet
        self.domain_field: str | None = None
        """The field that domains came from; None where all are names of files."""

    def __iter__(self) -> Iterator[Entry]:
        for source in self._data:
            if source.startswith(PREFIX):
                yield from self._entries(read_hub(resolve_hub(source)), source)
                continue
            files = find_files(SourceRecipe(path=source, domain="inspect"), quiet=self._quiet)
            with progress(sum(file.size for file in files), label=f"reading {source}", quiet=self._quiet) as tick:
                for file in files:
                    records = read_records(file, _fields(file), tick)
                    yield from self._entries(records, str(file.path), has_fields=file.format != "text")

    def _entries(self, records: Iterator[Record], name: str, *, has_fields: bool = True) -> Iterator[Entry]:
        field = self._asked or DOMAIN_FIELD
        from_field: bool | None = None
        for record in records:
            if from_field is None:
                from_field = has_fields and (self._asked is not None or field in record.fields)
                self._tell(name, field, from_field)
            domain = _domain(record, field) if from_field else domain_of(name)
            yield Entry(_text(record), domain, record.where)

    def _tell(self, name: str, field: str, from_field: bool) -> None:
        if from_field:
            self.domain_field = field
        else:
            notice(f"{name}: has no field {field!r}; the domain is {domain_of(name)!r}", quiet=self._quiet)


def _fields(file: DataFile) -> tuple[str, ...]:
    """The fields to ask for: of parquet all columns, of text the one that it gets; jsonl gives all of them anyway."""
    if file.format != "parquet":
        return ("text",)
    parquet: Any = import_optional("pyarrow.parquet", f"{file.path}: parquet files need")
    arrow: Any = import_optional("pyarrow", f"{file.path}: parquet files need")
    try:
        return tuple(parquet.read_schema(file.path).names)
    except (OSError, arrow.ArrowException) as error:
        raise MoesaicError(f"{file.path}: damaged or not parquet ({str(error).splitlines()[0]})") from error


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


def _text(record: Record) -> str:
    text = render(record.fields, None, record.where)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise MoesaicError(
            f"{record.where}: the text is not valid Unicode (a lone surrogate at character {error.start}); remove it"
        ) from error
    return text


def data_name(data: Sequence[str]) -> str:
    """The data's name in messages."""
    return ", ".join(str(Path(one)) if not one.startswith(PREFIX) else one for one in data)
