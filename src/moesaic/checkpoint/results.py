"""results.json, which `moesaic eval` leaves with a checkpoint: how it is known, and read by others. Torch-free."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moesaic.checkpoint.headers import load_format
from moesaic.common.errors import MoesaicError
from moesaic.common.recipe import Count, Size, load_document

FORMAT = "moesaic-results/1"


@dataclass(frozen=True, kw_only=True)
class _Experts:
    kept: Count
    of: Size


@dataclass(frozen=True, kw_only=True)
class _Checkpoint:
    name: str
    revision: str | None
    model_type: str | None
    weights_hash: str
    sample_hash: str
    verb: str | None
    made_from: tuple[str, ...]
    full_model: str
    experts: _Experts | None


@dataclass(frozen=True, kw_only=True)
class _Settings:
    limit: Any
    seed: Count


@dataclass(frozen=True, kw_only=True)
class _Suite:
    about: str
    tasks: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class _Number:
    score: float | None
    standard_error: float | None
    samples: Count


@dataclass(frozen=True, kw_only=True)
class _Text:
    """Held-out text of one domain, or of all."""

    loss: float | None
    standard_error: float | None
    perplexity: float | None
    bits_per_byte: float | None
    bits_per_byte_error: float | None
    documents: Count
    tokens: Count


@dataclass(frozen=True, kw_only=True)
class _Texts:
    all: _Text
    domains: dict[str, _Text]


@dataclass(frozen=True, kw_only=True)
class _Subset:
    kept: Count | tuple[Count, ...]
    of: Size

    def __post_init__(self) -> None:
        if self.kept == ():
            raise MoesaicError("kept has no layer")


@dataclass(frozen=True, kw_only=True)
class _QuestionRows:
    """What runs are paired by: each question's score, and a hash of the questions."""

    hash: str
    scores: tuple[float | None, ...]


@dataclass(frozen=True, kw_only=True)
class _DocumentRows:
    """The same of held-out text, document by document."""

    hash: str
    domains: tuple[str, ...]
    losses: tuple[float | None, ...]
    tokens: tuple[Count, ...]
    bytes: tuple[Count, ...]

    def __post_init__(self) -> None:
        if len({len(self.domains), len(self.losses), len(self.tokens), len(self.bytes)}) > 1:
            raise MoesaicError("losses, domains, tokens and bytes are not equally many")


@dataclass(frozen=True, kw_only=True)
class _Task(_Number):
    title: str
    metric: str
    higher_is_better: bool
    shots: Count | None
    selection: _Subset | None
    identity: dict[str, Any]
    chance: float | None = None
    parts: dict[str, _Number] = field(default_factory=dict)
    missing_parts: tuple[str, ...] = ()
    text: _Texts | None = None
    rows: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.rows:
            kind = _QuestionRows if self.text is None else _DocumentRows
            load_document(kind, self.rows, "rows", others=True)


@dataclass(frozen=True, kw_only=True)
class _Average:
    suite: str
    name: str
    score: float | None
    standard_error: float | None
    over: tuple[str, ...]
    missing: tuple[str, ...]
    partial: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class _Results:
    """What readers rely on; a results file has more."""

    checkpoint: _Checkpoint
    settings: _Settings
    versions: dict[str, str]
    suites: dict[str, _Suite]
    tasks: dict[str, _Task]
    missing: dict[str, str]
    averages: tuple[_Average, ...]


def read_results(path: Path) -> dict[str, Any]:
    """Read a results file, all keys of it; one that is none, or is damaged, is a MoesaicError."""
    document = load_format(path, FORMAT, "a results file")
    load_document(_Results, document, str(path), others=True, way_out="evaluate again")
    return {"format": FORMAT, **document}


def mean_error(errors: Sequence[float | None]) -> float | None:
    """Standard error of the mean of independent scores; None where one of theirs is unknown."""
    known = [error for error in errors if error is not None]
    if not errors or len(known) < len(errors):
        return None
    return math.sqrt(math.fsum(error * error for error in known)) / len(known)
