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
import typing
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from moesaic.analysis.inspection import LEVELS, Document, ExpertCard, Inspection, Reader, Statistics
from moesaic.common.errors import MoesaicError
from moesaic.common.files import explained, load_json
from moesaic.common.recipe import Count, load_document, recipe_values

FORMAT = "moesaic-inspection/1"

_T = TypeVar("_T")
_FACTS = "inspection.json"
_DOCUMENTS = "documents.json"
_EXPERTS = "experts.json"
_STATISTICS = "statistics.npz"
_READER = "reader.json"
_READER_ARRAYS = "reader.npz"
_AGAINST = "against"
_AGAIN = "run `moesaic inspect` again"


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
    facts = load_json(path / _FACTS, halves=True)  # of token strings, which broken tokenizers may cut anywhere
    if (found := facts.pop("format", None)) != FORMAT:
        raise MoesaicError(f"{path / _FACTS}: format is {found!r}, expected {FORMAT!r}; {_AGAIN}")
    documents = _load(_Documents, path / _DOCUMENTS).documents
    experts = _load(_Experts, path / _EXPERTS).experts
    statistics = Statistics(**_read_arrays(path / _STATISTICS, Statistics))
    inspection = load_document(
        Inspection,
        facts | {"documents": documents, "experts": experts, "statistics": statistics, "reader": _read_reader(path)},
        str(path / _FACTS),
        way_out=_AGAIN,
    )
    _check(inspection, path)
    if not (path / _AGAINST).is_dir():
        return inspection
    return dataclasses.replace(inspection, against=read_inspection(path / _AGAINST))


def is_inspection(folder: str | Path) -> bool:
    """Whether a folder looks like one that `moesaic inspect` wrote."""
    return (Path(folder) / _FACTS).is_file()


@dataclasses.dataclass(frozen=True, kw_only=True)
class _ReaderTexts:
    documents: tuple[Count, ...]
    sampled: Count
    strings: tuple[str, ...]


def _read_reader(path: Path) -> Reader:
    texts = _load(_ReaderTexts, path / _READER)
    return Reader(
        documents=texts.documents,
        sampled=texts.sampled,
        strings=texts.strings,
        **_read_arrays(path / _READER_ARRAYS, Reader),
    )


def _check(inspection: Inspection, path: Path) -> None:
    """Refuse files that are not of the model and the data that the facts name, or name what is not there."""
    model, data, statistics, reader = inspection.model, inspection.data, inspection.statistics, inspection.reader
    layers, experts, clustering = len(model.layers), model.num_experts, inspection.clustering
    clusters = len(clustering.clusters) if clustering else 0
    domains, documents, tokens = len(data.domains), len(inspection.documents), len(reader.string_R)
    ranked = [*(card.documents for card in inspection.experts)]
    ranked += [cluster.documents for cluster in clustering.clusters] if clustering else []
    near = [token.document for cluster in clustering.clusters for token in cluster.nearest] if clustering else []
    wanted = (
        (_FACTS, "verdicts", len(inspection.verdicts), layers),
        (_STATISTICS, "counts_SLE", statistics.counts_SLE.shape, (1 + domains, layers, experts)),
        (_STATISTICS, "probability_NLE", statistics.probability_NLE.shape, (domains, layers, experts)),
        (_STATISTICS, "cluster_mass_CLE", len(statistics.cluster_mass_CLE), clusters),
        (_EXPERTS, "experts", len(inspection.experts), layers * experts),
        (_DOCUMENTS, "documents", documents, data.documents),
        (_READER_ARRAYS, "ids_RLK", reader.ids_RLK.shape[1:], (layers, model.top_k)),
        (_READER_ARRAYS, "first_token_D1", len(reader.first_token_D1), len(reader.documents) + 1),
        (_READER_ARRAYS, "first_token_D1", (_ends(reader.first_token_D1)), (0, tokens)),
    )
    for name, key, found, expected in wanted:
        if found != expected:
            raise MoesaicError(f"{path / name}: {key}: belongs to another inspection ({found}, expected {expected})")
    within = (
        (_STATISTICS, "level_SL", statistics.level_SL, 0, len(LEVELS)),
        (_READER_ARRAYS, "string_R", reader.string_R, 0, len(reader.strings)),
        (_READER_ARRAYS, "cluster_R", reader.cluster_R, -1, clusters),
        (_READER_ARRAYS, "ids_RLK", reader.ids_RLK, 0, experts),
        (_READER, "documents", reader.documents, 0, documents),
        (_READER, "sampled", (reader.sampled,), 0, len(reader.documents) + 1),
        (_EXPERTS, "documents", [one.document for some in ranked for one in some], 0, documents),
        (_FACTS, "clustering.clusters.nearest", near, 0, documents),
        (_DOCUMENTS, "domain", [document.domain for document in inspection.documents], 0, domains),
        (_DOCUMENTS, "cluster", [document.cluster for document in inspection.documents], -1, clusters),
    )
    for name, key, values, low, end in within:
        if outside := [int(value) for value in _extremes(values) if not low <= value < end]:
            raise MoesaicError(f"{path / name}: {key}: has {outside[0]}, outside {low} to {end - 1}; {_AGAIN}")


def _ends(values: Any) -> tuple[int, ...]:
    """The first and the last of rising numbers; nothing where they do not rise."""
    return (int(values[0]), int(values[-1])) if len(values) and (np.diff(values) >= 0).all() else ()


def _extremes(values: Any) -> tuple[Any, ...]:
    return (np.min(values), np.max(values)) if np.size(values) else ()


def _load(cls: type[_T], path: Path) -> _T:
    return load_document(cls, load_json(path, halves=True), str(path), way_out=_AGAIN)


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
    """The arrays of a class, of the types and dimensions that it says; one letter is one number in all of them."""
    arrays = _load_arrays(path, _array_names(cls))
    sizes: dict[str, int] = {}
    for name, array in arrays.items():
        hint = typing.get_type_hints(cls)[name]
        dimensions = hint.dim_str.split()
        if array.dtype.name not in hint.dtypes or array.ndim != len(dimensions):
            found = f"{array.dtype.name} with {array.ndim} dimensions"
            raise MoesaicError(f"{path}: {name}: is {found}, not {hint.__name__}; {_AGAIN}")
        for dimension, size in zip(dimensions, array.shape, strict=True):
            if sizes.setdefault(dimension, size) != size:
                raise MoesaicError(f"{path}: {name}: has {size} {dimension}, not {sizes[dimension]}; {_AGAIN}")
    return arrays


def _load_arrays(path: Path, names: list[str]) -> dict[str, np.ndarray]:
    try:
        # Opened here: numpy leaves its own handle of a damaged file open.
        with path.open("rb") as raw:
            file = np.load(raw, allow_pickle=False)
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise MoesaicError(f"{path}: is one array (.npy), not an archive of arrays; {_AGAIN}")
            with file:
                return {name: file[name] for name in names}
    except FileNotFoundError as error:
        raise MoesaicError(f"{path}: no such file; {_AGAIN}") from error
    except KeyError as error:
        raise MoesaicError(f"{path}: has no array {error.args[0]!r}; {_AGAIN}") from error
    except (MoesaicError, MemoryError):
        raise
    except Exception as error:  # zip, zlib, struct and the parser of numpy's headers each have errors of their own
        reason = " ".join(str(error).split()) or type(error).__name__
        raise MoesaicError(f"{path}: damaged ({reason}); {_AGAIN}") from error
