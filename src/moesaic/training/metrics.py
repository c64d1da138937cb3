"""metrics.jsonl, a line per step and per validation, and the same numbers for TensorBoard."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from moesaic.checkpoint.pio import explained

METRICS_FILE = "metrics.jsonl"


class MetricsLog:
    """Appends to OUT/metrics.jsonl and, where TensorBoard is installed, OUT/state/tensorboard.

    Lines differ between two runs of one recipe in `timing` only. On a rank that isn't the main one, nothing is written.
    """

    def __init__(self, out: Path, *, start_bytes: int, start_step: int, active: bool) -> None:
        """Cut the file to `start_bytes`, what it had when the state of `start_step` was saved."""
        self._file = None
        self._board = None
        if not active:
            return
        self._path = out / METRICS_FILE
        with explained(self._path):
            self._file = self._path.open("ab")
            self._file.truncate(min(start_bytes, self._path.stat().st_size))  # truncate would also lengthen it
        self._board = _open_board(out / "state" / "tensorboard", start_step)

    def write(self, line: Mapping[str, Any]) -> None:
        """Append one line; `line["step"]` counts from 1."""
        if self._file is None:
            return
        with explained(self._path):
            self._file.write(json.dumps(line).encode() + b"\n")
            self._file.flush()
        if self._board is not None:
            for name, value in _scalars(line):
                self._board.add_scalar(name, value, line["step"])

    def sync(self) -> int:
        """Make the file durable; return its length in bytes."""
        if self._file is None:
            return 0
        with explained(self._path):
            os.fsync(self._file.fileno())
            return self._file.seek(0, os.SEEK_END)

    def close(self) -> None:
        """Close both."""
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()


def _open_board(folder: Path, start_step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=start_step + 1)


def _scalars(line: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in line.items():
        if isinstance(value, Mapping):
            yield from _scalars(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)) and name != "step":
            yield prefix + name, value
