"""The folder that `moesaic inspect` writes and `moesaic report` reads. Torch-free, nothing is unpickled.

```
OUT/
  inspection.json   model, data, verdicts, clusters, first token: all of `Inspection` that has no file of its own
  documents.json    every document of the sample
  experts.json      expert cards
  statistics.npz    the arrays of `Statistics`
  reader.json       documents and token strings of the reader
  reader.npz        its arrays
  capture/          logits.npy and more, see `moesaic.analysis.capture`; not read by `read_inspection`, may be deleted
  against/          the same files for the second model
```
"""

import dataclasses
import json
import zipfile
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from moesaic.analysis.inspection import Document, ExpertCard, Inspection, Reader, Statistics
from moesaic.checkpoint.headers import load_json
from moesaic.checkpoint.pio import explained
from moesaic.common.errors import MoesaicError
from moesaic.common.recipe import load_recipe, recipe_values

FORMAT = "moesaic-inspection/1"

_T = TypeVar("_T")
_FACTS = "inspection.json"
_DOCUMENTS = "documents.json"
_EXPERTS = "experts.json"
_STATISTICS = "statistics.npz"
_READER = "reader.json"
_READER_ARRAYS = "reader.npz"
_AGAINST = "against"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Documents:
    documents: tuple[Document, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Experts:
    experts: tuple[ExpertCard, ...]


def write_inspection(inspection: Inspection, folder: Path) -> None:
    """Write all files of an inspection into a folder that exists."""
    own_files = ("documents", "experts", "statistics", "reader", _AGAINST)
    facts = {
        field.name: recipe_values(getattr(inspection, field.name))
        for field in dataclasses.fields(inspection)
        if field.name not in own_files
    }
    _write_json(folder / _FACTS, {"format": FORMAT, **facts})
    _write_json(folder / _DOCUMENTS, recipe_values(_Documents(documents=inspection.documents)))
    _write_json(folder / _EXPERTS, recipe_values(_Experts(experts=inspection.experts)))
    _write_arrays(folder / _STATISTICS, inspection.statistics)
    reader = inspection.reader
    plain = {"documents": list(reader.documents), "sampled": reader.sampled, "strings": list(reader.strings)}
    _write_json(folder / _READER, plain)
    _write_arrays(folder / _READER_ARRAYS, reader)
    if inspection.against is not None:
        with explained(folder / _AGAINST):
            (folder / _AGAINST).mkdir(exist_ok=True)
        write_inspection(inspection.against, folder / _AGAINST)


def read_inspection(folder: str | Path) -> Inspection:
    """Read what `write_inspection` wrote.

    Raises:
        MoesaicError: not such a folder, another version of the format, a file that is missing, damaged or does not fit
            the others.
    """
    path = Path(folder)
    if not is_inspection(path):
        raise MoesaicError(f"{path}: not a folder that `moesaic inspect` wrote (it has no {_FACTS})")
    facts = load_json(path / _FACTS)
    if (found := facts.pop("format", None)) != FORMAT:
        raise MoesaicError(f"{path / _FACTS}: format is {found!r}, expected {FORMAT!r}; run `moesaic inspect` again")
    documents = _load(_Documents, path / _DOCUMENTS).documents
    experts = _load(_Experts, path / _EXPERTS).experts
    statistics = Statistics(**_read_arrays(path / _STATISTICS, Statistics))
    inspection = load_recipe(
        Inspection,
        facts | {"documents": documents, "experts": experts, "statistics": statistics, "reader": _read_reader(path)},
        name=str(path / _FACTS),
    )
    _check(inspection, path)
    if not (path / _AGAINST).is_dir():
        return inspection
    return dataclasses.replace(inspection, against=read_inspection(path / _AGAINST))


def is_inspection(folder: str | Path) -> bool:
    """Whether a folder looks like one that `moesaic inspect` wrote."""
    return (Path(folder) / _FACTS).is_file()


def _read_reader(path: Path) -> Reader:
    plain = load_json(path / _READER)
    arrays = _read_arrays(path / _READER_ARRAYS, Reader)
    if plain.keys() != {"documents", "sampled", "strings"}:
        raise MoesaicError(f"{path / _READER}: damaged: expected documents, sampled and strings")
    return Reader(
        documents=tuple(plain["documents"]), sampled=plain["sampled"], strings=tuple(plain["strings"]), **arrays
    )


def _check(inspection: Inspection, path: Path) -> None:
    """Refuse arrays that are not of the model and the data that the facts name."""
    model, data, statistics, reader = inspection.model, inspection.data, inspection.statistics, inspection.reader
    layers, experts = len(model.layers), model.num_experts
    wanted = {
        _STATISTICS: (statistics.counts_SLE.shape, (1 + len(data.domains), layers, experts)),
        _EXPERTS: (len(inspection.experts), layers * experts),
        _DOCUMENTS: (len(inspection.documents), data.documents),
        _READER_ARRAYS: (reader.ids_RLK.shape[1:], (layers, model.top_k)),
        _READER: (len(reader.documents) + 1, len(reader.first_token_D1)),
    }
    for name, (found, expected) in wanted.items():
        if found != expected:
            raise MoesaicError(f"{path / name}: belongs to another inspection ({found}, expected {expected})")


def _load(cls: type[_T], path: Path) -> _T:
    return load_recipe(cls, load_json(path), name=str(path))


def _write_json(path: Path, value: Any) -> None:
    # ASCII: any text survives, whatever a broken tokenizer made of it.
    with explained(path):
        path.write_text(json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":")) + "\n")


def _array_names(cls: type) -> list[str]:
    """The fields that are arrays: those with a shape suffix."""
    return [field.name for field in dataclasses.fields(cls) if field.name.rpartition("_")[2].rstrip("1").isupper()]


def _write_arrays(path: Path, value: Any) -> None:
    with explained(path):
        np.savez_compressed(path, **{name: getattr(value, name) for name in _array_names(type(value))})


def _read_arrays(path: Path, cls: type) -> dict[str, Any]:
    try:
        # Opened here: numpy leaves its own handle of a damaged file open.
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            return {name: file[name] for name in _array_names(cls)}
    except FileNotFoundError as error:
        raise MoesaicError(f"{path}: no such file; run `moesaic inspect` again") from error
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        reason = " ".join(str(error).split())
        raise MoesaicError(f"{path}: damaged ({reason}); run `moesaic inspect` again") from error
