"""Token clusters as in EMO, section 5.3 and appendix D.

Features of a token are its router's probabilities in all layers, one after the other (L * E numbers); centred, PCA to
95% of the variance, unit length, spherical k-means: similarity by cosine, centres of unit length (Dhillon and Modha,
2001). Starts are tried on a sample of the rows (k-means++, some restarts); the best one is then improved on all rows.

PCA and k-means are written here, and the metrics are scikit-learn's: a million tokens of 2,000 features are 8 GB, so
rows pass by in blocks from a file, for which scikit-learn has IncrementalPCA and MiniBatchKMeans only. Their results
depend on the size of the blocks, and KMeans adds what its threads found in the order in which they end.

Letters: T tokens (rows), D documents, N domains, L MoE layers, E experts, F features, P components, C clusters.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float, Float32, Float64, Int
from numpy import ndarray

from moesaic.analysis.capture import BLOCK_TOKENS, Capture, TokenFile, create_tokens, router_probabilities
from moesaic.common.errors import MoesaicError
from moesaic.common.progress import progress
from moesaic.routing.capture import Scoring

SILHOUETTE_TOKENS = 10_000
VARIANCE = 0.95
SAMPLE_ROWS = 20_000
"""Starts are tried on so many: about 600 for each of 32 clusters, which is enough to tell a bad start."""
RESTARTS = 3
MOST_ITERATIONS = 50
TOLERANCE = 1e-5
"""Iterations end when the mean cosine grows by less."""

_LEAST_VARIANCE = 1e-12
_BLOCK_BYTES = 1 << 26


@dataclass(frozen=True, kw_only=True, eq=False)
class Components:
    """The directions of most variance."""

    mean_F: Float64[ndarray, " features"]
    axes_FP: Float32[ndarray, "features components"]
    variance_kept: float
    """Share of the variance along the axes."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SphericalClusters:
    """A clustering, largest cluster first; none is empty."""

    centres_CP: Float[ndarray, "clusters features"]
    cluster_T: Int[ndarray, " rows"]
    cosine_T: Float[ndarray, " rows"]
    """Of each row with its centre."""
    iterations: int
    """On all rows."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenClusters:
    """The clusters of all tokens, and how they were made."""

    components: Components
    clusters: SphericalClusters
    mass_CLE: Float64[ndarray, "clusters layers experts"]
    """Mean probabilities of a cluster's tokens."""
    silhouette: float | None
    """Mean cosine silhouette of the sampled tokens; None where they are all in one cluster."""
    silhouette_tokens: int


def features(
    capture: Capture, scoring: Scoring, tick: Callable[[float], None] = lambda _tokens: None
) -> Iterator[Float32[ndarray, "tokens features"]]:
    """The features of all tokens, in blocks."""
    tokens = capture.logits.shape[0]
    for start in range(0, tokens, BLOCK_TOKENS):
        stop = min(start + BLOCK_TOKENS, tokens)
        yield router_probabilities(capture.logits.read(start, stop), scoring).flatten(1).numpy()
        tick(stop - start)


def cluster_tokens(
    capture: Capture,
    scoring: Scoring,
    mean_F: Float64[ndarray, " features"],
    scratch: Path,
    *,
    clusters: int = 32,
    seed: int,
    quiet: bool = True,
) -> TokenClusters | str:
    """Cluster the tokens of a capture; where that cannot be done, the reason.

    `mean_F` is the mean of the features over all tokens, `scratch` a file to make and remove (4 bytes per token and
    component); the seed is that of the starts and of the silhouette's sample.
    """
    tokens, layers, experts = capture.logits.shape
    if clusters == 0:
        return "none were asked for"
    if tokens < clusters:
        return f"there are {tokens} tokens for {clusters} clusters; give more data"
    require_scikit_learn()
    with progress(3 * tokens, unit="tokens", label="clustering", quiet=quiet) as tick:
        components = principal_components(covariance(features(capture, scoring, tick), mean_F), mean_F)
        if components is None:
            return "all tokens are routed alike; there is nothing to tell them apart by"
        try:
            width = components.axes_FP.shape[1]
            with create_tokens(scratch, (tokens, width), np.dtype(np.float32)) as rows:
                write_unit_rows(features(capture, scoring), components, rows, tick)
                found = spherical_kmeans(rows, clusters, seed=seed)
                chosen_S = np.sort(np.random.default_rng(seed).permutation(tokens)[:SILHOUETTE_TOKENS])
                quality = silhouette(gather(rows, chosen_S), found.cluster_T[chosen_S])
        finally:
            scratch.unlink(missing_ok=True)
        mass_CF = _cluster_means(features(capture, scoring, tick), found)
    return TokenClusters(
        components=components,
        clusters=found,
        mass_CLE=mass_CF.reshape(-1, layers, experts),
        silhouette=quality,
        silhouette_tokens=len(chosen_S),
    )


def _cluster_means(
    blocks: Iterator[Float32[ndarray, "tokens features"]], found: SphericalClusters
) -> Float64[ndarray, "clusters features"]:
    clusters = len(found.centres_CP)
    sums_CF: ndarray | None = None
    start = 0
    for block_TF in blocks:
        cluster_T = found.cluster_T[start : start + len(block_TF)]
        member_CT = np.zeros((clusters, len(block_TF)), dtype=np.float32)
        member_CT[cluster_T, np.arange(len(block_TF))] = 1
        sums_CF = (0 if sums_CF is None else sums_CF) + (member_CT @ block_TF).astype(np.float64)
        start += len(block_TF)
    assert sums_CF is not None, "there are tokens"
    return sums_CF / np.bincount(found.cluster_T, minlength=clusters)[:, None]


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


def require_scikit_learn() -> None:
    """Say in one line how to get it."""
    try:
        import sklearn  # noqa: F401
    except ImportError as error:
        raise MoesaicError("token clusters need scikit-learn; pip install 'moesaic[analysis]'") from error


def silhouette(rows_SP: Float[ndarray, "tokens components"], cluster_S: Int[ndarray, " tokens"]) -> float | None:
    """Mean silhouette by cosine distance; None with one cluster, or one for each token."""
    from sklearn import config_context
    from sklearn.metrics import silhouette_score

    if not 2 <= len(np.unique(cluster_S)) < len(cluster_S):
        return None
    with config_context(working_memory=128):  # MiB; all distances of 10,000 tokens are 800
        return float(silhouette_score(rows_SP, cluster_S, metric="cosine"))


def purity(table_CN: Int[ndarray, "clusters domains"]) -> float:
    """Share of the tokens that belong to the largest domain of their cluster."""
    return float(table_CN.max(axis=1).sum() / table_CN.sum())


def mutual_information(cluster_T: Int[ndarray, " tokens"], domain_T: Int[ndarray, " tokens"]) -> float | None:
    """Mutual information of clusters and domains over the mean of their entropies; None with one domain."""
    from sklearn.metrics import normalized_mutual_info_score

    if len(np.unique(domain_T)) < 2:
        return None
    return float(normalized_mutual_info_score(domain_T, cluster_T))


def cross_table(
    row_T: Int[ndarray, " tokens"], column_T: Int[ndarray, " tokens"], rows: int, columns: int
) -> Int[ndarray, "rows columns"]:
    """Tokens of each row (document, token string) in each column (cluster)."""
    cell_T = row_T.astype(np.int64) * columns + column_T
    return np.bincount(cell_T, minlength=rows * columns).reshape(rows, columns)


def concentration(table_DC: Int[ndarray, "documents clusters"]) -> Float[ndarray, " documents"]:
    """Share of each document's tokens in its main cluster."""
    return table_DC.max(axis=1) / table_DC.sum(axis=1)
