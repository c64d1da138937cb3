"""Which experts of which model a subset's experts are, through fine-tuning and repeated extraction. Torch-free."""

from dataclasses import dataclass
from typing import Any

from moesaic.checkpoint.record import PROVENANCE_FILE, read_provenance
from moesaic.checkpoint.source import Checkpoint
from moesaic.common.errors import MoesaicError
from moesaic.selection.source import SourceModel, source_from_json

Ids = tuple[tuple[int, ...], ...]
"""Expert ids per MoE layer."""


@dataclass(frozen=True, kw_only=True)
class Lineage:
    """The ids that a subset's experts have in its ancestors, nearest ancestor first."""

    ancestors: tuple[tuple[SourceModel, Ids], ...]

    def to_json(self) -> list[dict[str, Any]]:
        """Plain values, for moesaic.json."""
        return [{"model": model.to_json(), "ids": [list(row) for row in ids]} for model, ids in self.ancestors]


def extend(parent: SourceModel, kept: Ids, earlier: Lineage | None) -> Lineage:
    """The lineage of what is extracted from `parent`, whose own lineage is `earlier`."""
    further = []
    for model, ids in earlier.ancestors if earlier else ():
        chained = tuple(tuple(row[expert] for expert in rows) for row, rows in zip(ids, kept, strict=True))
        further.append((model, chained))
    return Lineage(ancestors=((parent, kept), *further))


def find_lineage(checkpoint: Checkpoint) -> Lineage | None:
    """The record of `extract` in moesaic.json, which training hands on; None for a model that is no subset."""
    record = read_provenance(checkpoint.path) or {}
    where = str(checkpoint.path / PROVENANCE_FILE)
    return _read(record["lineage"], where) if "lineage" in record else None


def _read(value: Any, where: str) -> Lineage:
    try:
        ancestors = tuple(
            (source_from_json(one["model"], where), tuple(tuple(map(int, row)) for row in one["ids"])) for one in value
        )
    except (TypeError, KeyError, ValueError) as error:
        raise MoesaicError(f"{where}: its lineage cannot be read ({error}); extract the subset again") from error
    return Lineage(ancestors=ancestors)
