"""What `moesaic inspect` is asked for. Torch-free."""

import re
from dataclasses import dataclass, field
from pathlib import Path

from moesaic.analysis.documents import Choice
from moesaic.common.errors import MoesaicError

_COUNT = re.compile(r"(\d[\d_]*(?:\.\d+)?)([kMB]?)")
_UNITS = {"": 1, "k": 10**3, "M": 10**6, "B": 10**9}


@dataclass(frozen=True, kw_only=True)
class InspectRequest:
    """A model, data, and how much of it."""

    checkpoint: str | Path
    data: tuple[str, ...]
    """Files, folders or hf:// data sets, in this order."""
    domain_field: str | None = None
    """Of the records; None: `domain` where they have it, else the file's name."""
    against: str | Path | None = None
    """A second model, for the same documents."""
    choice: Choice = field(default_factory=Choice)
    clusters: int = 32
    batch_size: int = 16
    device: str | None = None
    dtype: str | None = None

    def __post_init__(self) -> None:
        if not self.data:
            raise MoesaicError("--data: is needed; give a file or folder of text")
        if not 2 <= self.clusters <= 1000:
            raise MoesaicError(f"--clusters {self.clusters}: must be from 2 to 1000")
        if self.batch_size < 1:
            raise MoesaicError(f"--batch-size {self.batch_size}: must be at least 1")


def parse_count(text: str | int, flag: str) -> int:
    """A number of tokens, such as 1M, 500k or 20000."""
    match = _COUNT.fullmatch(str(text))
    if match is None:
        raise MoesaicError(f"{flag} {text}: not a number of tokens; give one such as 1M, 500k or 20000")
    return round(float(match[1].replace("_", "")) * _UNITS[match[2]])
