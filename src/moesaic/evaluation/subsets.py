"""The selections that an evaluation runs under: one for all tasks, or a folder with one per task or category."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from moesaic.checkpoint.pio import explained
from moesaic.checkpoint.source import Checkpoint
from moesaic.common.errors import MoesaicError
from moesaic.data.files import find_files
from moesaic.data.recipe import SourceRecipe
from moesaic.evaluation.benchmarks import categories_of_selection
from moesaic.evaluation.local import DataMissingError, HeldOut
from moesaic.families.moe import detect_running
from moesaic.selection.selection import Selection, load_selection
from moesaic.selection.source import describe, refuse_other_model


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
        data = self.selection.details.get("data") or {}
        share = data.get("split")
        return None if share is None or share >= 1 else HeldOut(share=float(share), seed=int(data.get("seed", 0)))

    def made_on(self, file: Path) -> bool:
        """Whether it was made on rows of a file, or of a folder with it."""
        data = self._data_path()
        return data is not None and file.resolve().is_relative_to(data)

    def drawn_from(self, file: Path) -> HeldOut | None:
        """The share of a file's rows that it was made on.

        None also for all but the first file of a folder: rows are counted over all files, so theirs are not known.
        """
        data = self._data_path()
        if data is None or not self.made_on(file):
            return None
        first = (
            data
            if data.is_file()
            else find_files(SourceRecipe(path=str(data), domain="calibration"), quiet=True)[0].path
        )
        return self.drawn() if first.resolve() == file.resolve() else None

    def _data_path(self) -> Path | None:
        path = (self.selection.details.get("data") or {}).get("path")
        return None if path is None else Path(path).expanduser().resolve()


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
        names = categories_of_selection(task)
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
