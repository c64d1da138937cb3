"""Token clusters as in EMO, section 5.3 and appendix D.

Features of a token are its router's probabilities in all layers, one after the other (L * E numbers); centred, PCA to
95% of the variance, unit length, spherical k-means.

Letters: T tokens, D documents, N domains, L MoE layers, E experts, F features, P components, C clusters.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Float32, Float64, Int
from numpy import ndarray

from moesaic.analysis.blocks import BLOCK_TOKENS, router_probabilities
from moesaic.analysis.capture import Capture
from moesaic.analysis.components import Components, covariance, principal_components, write_unit_rows
from moesaic.analysis.kmeans import SphericalClusters, gather, spherical_kmeans
from moesaic.analysis.token_file import create_tokens
from moesaic.common.errors import MoesaicError
from moesaic.common.progress import progress
from moesaic.routing.capture import Scoring

CLUSTERS = 32
SILHOUETTE_TOKENS = 10_000


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
    clusters: int = CLUSTERS,
    seed: int,
    quiet: bool = True,
) -> TokenClusters | str:
    """Cluster the tokens of a capture; where that cannot be done, the reason.

    Args:
        capture: the routers' logits.
        scoring: what turns them into probabilities.
        mean_F: mean of the features over all tokens.
        scratch: a file to make and remove: 4 bytes per token and component.
        clusters: their number.
        seed: of the starts and of the silhouette's sample.
        quiet: print no progress.
    """
    tokens, layers, experts = capture.logits.shape
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


def document_table(
    cluster_T: Int[ndarray, " tokens"], document_T: Int[ndarray, " tokens"], documents: int, clusters: int
) -> Int[ndarray, "documents clusters"]:
    """Tokens of each document in each cluster."""
    cell_T = document_T.astype(np.int64) * clusters + cluster_T
    return np.bincount(cell_T, minlength=documents * clusters).reshape(documents, clusters)


def concentration(table_DC: Int[ndarray, "documents clusters"]) -> Float[ndarray, " documents"]:
    """Share of each document's tokens in its main cluster."""
    return table_DC.max(axis=1) / table_DC.sum(axis=1)


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


def string_counts(
    cluster_T: Int[ndarray, " tokens"], string_T: Int[ndarray, " tokens"], strings: int, clusters: int
) -> Int[ndarray, "vocabulary clusters"]:
    """How often each token string is in each cluster; the string number `strings` is none."""
    cell_T = torch.from_numpy(string_T) * clusters + torch.from_numpy(cluster_T.astype(np.int64))
    counts = cell_T.bincount(minlength=(strings + 1) * clusters)
    return counts.view(strings + 1, clusters)[:-1].numpy()
