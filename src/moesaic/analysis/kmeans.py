"""Spherical k-means: rows of unit length, similarity by cosine, centres of unit length (Dhillon and Modha, 2001).

The rows are in a file and pass by in blocks. Starts are tried on a sample of the rows (k-means++, some restarts); the
best one is then improved on all rows.

Letters: T rows, P features, C clusters.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

from moesaic.analysis.components import unit
from moesaic.analysis.token_file import TokenFile

SAMPLE_ROWS = 20_000
RESTARTS = 3
MOST_ITERATIONS = 50
TOLERANCE = 1e-5
"""Iterations end when the mean cosine grows by less."""

_BLOCK_BYTES = 1 << 26


@dataclass(frozen=True, kw_only=True, eq=False)
class SphericalClusters:
    """A clustering, largest cluster first; none is empty."""

    centres_CP: Float[ndarray, "clusters features"]
    cluster_T: Int[ndarray, " rows"]
    cosine_T: Float[ndarray, " rows"]
    """Of each row with its centre."""
    iterations: int
    """On all rows."""


def spherical_kmeans(rows: TokenFile, clusters: int, *, seed: int) -> SphericalClusters:
    """Cluster the rows of a file; they must have unit length. The result depends on rows and seed alone.

    There are fewer clusters where the rows have fewer than that many different directions.
    """
    number = rows.shape[0]
    assert 1 <= clusters <= number, f"{clusters} clusters of {number} rows"
    draw = np.random.default_rng(seed)
    sample_SP = gather(rows, np.sort(draw.permutation(number)[:SAMPLE_ROWS]))
    starts = [_improve(sample_SP, seed_centres(sample_SP, clusters, draw)) for _ in range(RESTARTS)]
    centres_CP, _ = max(starts, key=lambda start: start[1])
    centres_CP, iterations = _improve_on_file(rows, centres_CP)
    assigned = [assign(block_TP, centres_CP) for _, block_TP in row_blocks(rows)]
    cluster_T = np.concatenate([cluster for cluster, _ in assigned])
    sizes_C = np.bincount(cluster_T, minlength=len(centres_CP))
    order = [index for index in np.argsort(-sizes_C, kind="stable") if sizes_C[index]]
    place_C = np.full(len(sizes_C), -1)
    place_C[order] = np.arange(len(order))
    return SphericalClusters(
        centres_CP=centres_CP[order],
        cluster_T=place_C[cluster_T].astype(np.int16),
        cosine_T=np.concatenate([cosine for _, cosine in assigned]),
        iterations=iterations,
    )


def assign(
    rows_TP: Float[ndarray, "rows features"], centres_CP: Float[ndarray, "clusters features"]
) -> tuple[Int[ndarray, " rows"], Float[ndarray, " rows"]]:
    """The centre with the largest cosine for each row (of equal ones the first), and that cosine."""
    cosine_TC = rows_TP @ centres_CP.T
    cluster_T = cosine_TC.argmax(axis=1)
    return cluster_T, cosine_TC[np.arange(len(rows_TP)), cluster_T]


def seed_centres(
    rows_TP: Float[ndarray, "rows features"], clusters: int, draw: np.random.Generator
) -> Float[ndarray, "clusters features"]:
    """k-means++: each next centre is a row drawn by its squared distance, 2 - 2 cos, to the nearest centre so far."""
    chosen = [int(draw.integers(len(rows_TP)))]
    nearest_T = np.full(len(rows_TP), np.inf)
    for _ in range(clusters - 1):
        distance_T = (1.0 - (rows_TP @ rows_TP[chosen[-1]]).astype(np.float64)).clip(min=0.0)
        nearest_T = np.minimum(nearest_T, distance_T)
        edges_T = nearest_T.cumsum()
        chosen.append(min(int(np.searchsorted(edges_T, draw.random() * edges_T[-1], side="right")), len(rows_TP) - 1))
    return rows_TP[chosen].copy()


def row_blocks(rows: TokenFile) -> Iterator[tuple[int, Float[ndarray, "rows features"]]]:
    """All rows with the number of their first, in blocks of about 64 MB."""
    size = max(1, _BLOCK_BYTES // (4 * rows.shape[1]))
    for start in range(0, rows.shape[0], size):
        yield start, rows.read(start, min(start + size, rows.shape[0]))


def gather(rows: TokenFile, index_S: Int[ndarray, " sample"]) -> Float[ndarray, "sample features"]:
    """Some rows, by their rising numbers."""
    parts = []
    for start, block_TP in row_blocks(rows):
        first, last = np.searchsorted(index_S, [start, start + len(block_TP)])
        parts.append(block_TP[index_S[first:last] - start])
    return np.concatenate(parts)


def _improve(
    rows_TP: Float[ndarray, "rows features"], centres_CP: Float[ndarray, "clusters features"]
) -> tuple[Float[ndarray, "clusters features"], float]:
    """Lloyd's iterations on rows in memory; the centres and the mean cosine with them."""
    before = -np.inf
    for _ in range(MOST_ITERATIONS):
        sums_CP, cosine = _sums(rows_TP, centres_CP)
        if cosine - before < TOLERANCE:
            break
        centres_CP, before = _moved(centres_CP, sums_CP), cosine
    return centres_CP, float(before)


def _improve_on_file(
    rows: TokenFile, centres_CP: Float[ndarray, "clusters features"]
) -> tuple[Float[ndarray, "clusters features"], int]:
    before = -np.inf
    for iteration in range(MOST_ITERATIONS):
        sums_CP = np.zeros(centres_CP.shape)
        cosine = 0.0
        for _, block_TP in row_blocks(rows):
            block_sums_CP, block_cosine = _sums(block_TP, centres_CP)
            sums_CP += block_sums_CP
            cosine += block_cosine * len(block_TP) / rows.shape[0]
        if cosine - before < TOLERANCE:
            return centres_CP, iteration
        centres_CP, before = _moved(centres_CP, sums_CP), cosine
    return centres_CP, MOST_ITERATIONS


def _sums(
    rows_TP: Float[ndarray, "rows features"], centres_CP: Float[ndarray, "clusters features"]
) -> tuple[Float[ndarray, "clusters features"], float]:
    """Sum of each cluster's rows, and the mean cosine."""
    cluster_T, cosine_T = assign(rows_TP, centres_CP)
    member_CT = np.zeros((len(centres_CP), len(rows_TP)), dtype=rows_TP.dtype)
    member_CT[cluster_T, np.arange(len(rows_TP))] = 1
    return member_CT @ rows_TP, float(cosine_T.mean(dtype=np.float64))


def _moved(
    centres_CP: Float[ndarray, "clusters features"], sums_CP: Float[ndarray, "clusters features"]
) -> Float[ndarray, "clusters features"]:
    """The directions of the sums; a cluster without rows keeps its centre."""
    moved_CP = unit(sums_CP).astype(centres_CP.dtype)
    return np.where(np.any(sums_CP, axis=1, keepdims=True), moved_CP, centres_CP)
