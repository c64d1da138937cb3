"""Principal components of more rows than fit in memory, and the rows in their coordinates at unit length.

Letters: T tokens, F features, P components kept.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float32, Float64
from numpy import ndarray

from moesaic.analysis.token_file import TokenFile

VARIANCE = 0.95
_LEAST_VARIANCE = 1e-12


@dataclass(frozen=True, kw_only=True, eq=False)
class Components:
    """The directions of most variance."""

    mean_F: Float64[ndarray, " features"]
    axes_FP: Float32[ndarray, "features components"]
    variance_kept: float
    """Share of the variance along the axes."""


def covariance(
    blocks: Iterable[Float32[ndarray, "tokens features"]], mean_F: Float64[ndarray, " features"]
) -> Float64[ndarray, "features features"]:
    """Covariance of all rows in float64, from blocks of at most some thousand rows.

    A block is centred and multiplied in fp32, which is twice as fast; its product is added in float64, so the error
    does not grow with the number of rows.
    """
    total_FF = np.zeros((len(mean_F), len(mean_F)))
    rows = 0
    centre_F = mean_F.astype(np.float32)
    for block_TF in blocks:
        centred_TF = block_TF - centre_F
        total_FF += centred_TF.T @ centred_TF  # numpy sees the same matrix twice and computes half of it
        rows += len(block_TF)
    return total_FF / rows


def principal_components(
    covariance_FF: Float64[ndarray, "features features"],
    mean_F: Float64[ndarray, " features"],
    variance: float = VARIANCE,
) -> Components | None:
    """The fewest axes that hold `variance` of the variance; None where all rows are the same."""
    if np.trace(covariance_FF) < _LEAST_VARIANCE:
        return None
    values_F, vectors_FF = np.linalg.eigh(covariance_FF)
    values_F, vectors_FF = values_F[::-1].clip(min=0.0), vectors_FF[:, ::-1]
    shares_F = np.cumsum(values_F) / values_F.sum()
    kept = min(int(np.searchsorted(shares_F, variance)) + 1, len(values_F))
    return Components(
        mean_F=mean_F,
        axes_FP=np.ascontiguousarray(vectors_FF[:, :kept], dtype=np.float32),
        variance_kept=float(shares_F[kept - 1]),
    )


def write_unit_rows(
    blocks: Iterable[Float32[ndarray, "tokens features"]],
    components: Components,
    file: TokenFile,
    tick: Callable[[float], None] = lambda _rows: None,
) -> None:
    """Write each row's coordinates along the axes, divided by their length; a row of zeros stays one."""
    centre_F = components.mean_F.astype(np.float32)
    start = 0
    for block_TF in blocks:
        file.write(start, unit((block_TF - centre_F) @ components.axes_FP))
        start += len(block_TF)
        tick(len(block_TF))


def unit(rows_TP: Float[ndarray, "rows features"]) -> Float[ndarray, "rows features"]:
    """Rows divided by their lengths; zeros stay zeros."""
    length_T1 = np.linalg.norm(rows_TP, axis=1, keepdims=True)
    return rows_TP / np.where(length_T1 > 0, length_T1, 1)
