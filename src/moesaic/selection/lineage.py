"""Which experts of which model a subset's experts are, through fine-tuning and repeated extraction. Torch-free."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moesaic.checkpoint.provenance import read_provenance
from moesaic.checkpoint.source import Checkpoint
from moesaic.errors import MoesaicError
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
    """The record of `extract` in moesaic.json, of the checkpoint or of the one that it was trained from; else None."""
    folder = checkpoint.path
    for _ in range(_MOST_RUNS):
        record = read_provenance(folder)
        if record is None:
            return None
        if "lineage" in record:
            return _read(record["lineage"], str(folder / "moesaic.json"))
        sources = record.get("sources") or []
        if record.get("verb") != "train" or len(sources) != 1:
            return None
        folder = Path(str(sources[0].get("path")))
        if not folder.is_dir():
            raise MoesaicError(
                f"{checkpoint.name}: was trained from {folder}, which is not there any more, so its experts' original "
                "ids are unknown; put that folder back"
            )
    return None


_MOST_RUNS = 1000


def _read(value: Any, where: str) -> Lineage:
    try:
        ancestors = tuple(
            (source_from_json(one["model"], where), tuple(tuple(map(int, row)) for row in one["ids"])) for one in value
        )
    except (TypeError, KeyError, ValueError) as error:
        raise MoesaicError(f"{where}: its lineage cannot be read ({error}); extract the subset again") from error
    return Lineage(ancestors=ancestors)
