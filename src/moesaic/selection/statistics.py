"""Sums over calibration tokens from which every score is computed. They add up: merging two files is exact. Torch-free.

Letters: L MoE layers, E routed experts.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64
from numpy import ndarray

from moesaic.checkpoint.headers import load_format
from moesaic.common.errors import MoesaicError
from moesaic.common.files import write_file
from moesaic.common.recipe import Count, Size, load_document
from moesaic.families.identity import SourceModel, refuse_other_model

FORMAT = "moesaic-statistics/1"

_AGAIN = "collect them again"

SUMS = ("probability_LE", "weighted_norm_LE", "drift_original_LE", "drift_emo_LE")


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertStatistics:
    """Sums over the tokens of one domain that are not padding; `a + b` is what one pass over both would have given."""

    source: SourceModel
    domain: str
    """What the tokens are about; statistics of one domain are added, of several are mixed by `mix_domains`."""
    path: str | None = None
    """Where the data lies, where no domain was named: files of one name in two folders are two domains."""
    tokens: int
    counts_LE: Int64[ndarray, "layers experts"]
    """Tokens that selected the expert."""
    probability_LE: Float64[ndarray, "layers experts"]
    """Sum over all tokens of the router's probability: softmax over all experts, or sigmoid scores over their sum."""
    weighted_norm_LE: Float64[ndarray, "layers experts"]
    """Sum of g_e(x) * ||E_e(x)||_2 over the tokens that selected the expert."""
    drift_original_LE: Float64[ndarray, "layers experts"]
    """The same times max(0, 1 - cos(x, x + y)): x the residual stream before the block, y the routed output."""
    drift_emo_LE: Float64[ndarray, "layers experts"]
    """The same with x the block's (normalised) input and y the output with the shared experts."""

    def __post_init__(self) -> None:
        shape = (len(self.source.layers), self.source.num_experts)
        for name in ("counts_LE", *SUMS):
            assert getattr(self, name).shape == shape, f"{name} is not {shape}"

    def __add__(self, other: "ExpertStatistics") -> "ExpertStatistics":
        refuse_other_model(self.source, other.source, f"statistics of {self.source.name}")
        if (self.domain, self.path) != (other.domain, other.path):
            raise MoesaicError(
                f"statistics of {self.domain!r} and {other.domain!r} cannot be added; several domains are mixed, "
                "each with the same weight"
            )
        return ExpertStatistics(
            source=self.source,
            domain=self.domain,
            path=self.path,
            tokens=self.tokens + other.tokens,
            **{name: getattr(self, name) + getattr(other, name) for name in ("counts_LE", *SUMS)},
        )


def merge_by_domain(parts: Sequence[ExpertStatistics]) -> list[ExpertStatistics]:
    """Add what belongs to one domain; the domains come in the order of their names."""
    merged: dict[tuple[str, str], ExpertStatistics] = {}
    for part in parts:
        key = (part.domain, part.path or "")
        merged[key] = merged[key] + part if key in merged else part
    for other in merged.values():
        refuse_other_model(parts[0].source, other.source, f"statistics of {other.domain!r}")
    names = [domain for domain, _ in merged]
    return [
        replace(merged[name, path], domain=f"{name} ({path})") if path and names.count(name) > 1 else merged[name, path]
        for name, path in sorted(merged)
    ]


def save_statistics(statistics: ExpertStatistics, file: str | Path) -> None:
    """Write statistics as JSON; floats are written so that they read back as the same float64."""
    document = {
        "format": FORMAT,
        "source": statistics.source.to_json(),
        "domain": statistics.domain,
        **({"path": statistics.path} if statistics.path is not None else {}),
        "tokens": statistics.tokens,
        **{name: getattr(statistics, name).tolist() for name in ("counts_LE", *SUMS)},
    }
    write_file(Path(file), json.dumps(document, allow_nan=False) + "\n")


@dataclass(frozen=True, kw_only=True)
class _Document:
    """The file, as JSON has it."""

    source: SourceModel
    domain: str
    tokens: Size
    counts_LE: tuple[tuple[Count, ...], ...]
    probability_LE: tuple[tuple[float, ...], ...]
    weighted_norm_LE: tuple[tuple[float, ...], ...]
    drift_original_LE: tuple[tuple[float, ...], ...]
    drift_emo_LE: tuple[tuple[float, ...], ...]
    path: str | None = None


def load_statistics(file: str | Path) -> ExpertStatistics:
    """Read statistics; anything that is not what `save_statistics` writes is a MoesaicError that names the file."""
    path = Path(file)
    document = load_document(_Document, load_format(path, FORMAT, "a statistics file"), str(path), way_out=_AGAIN)
    shape = (len(document.source.layers), document.source.num_experts)
    tables: dict[str, Any] = {}
    for name in ("counts_LE", *SUMS):
        rows = getattr(document, name)
        if len(rows) != shape[0] or {len(row) for row in rows} - {shape[1]}:
            raise MoesaicError(f"{path}: {name}: is not {shape[0]} layers of {shape[1]} experts; {_AGAIN}")
        if any(value < 0 for row in rows for value in row):
            raise MoesaicError(f"{path}: {name}: has a number below 0; {_AGAIN}")
        tables[name] = np.array(rows, dtype=np.int64 if name == "counts_LE" else np.float64).reshape(shape)
    return ExpertStatistics(
        source=document.source, domain=document.domain, path=document.path, tokens=document.tokens, **tables
    )
