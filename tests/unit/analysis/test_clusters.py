"""Components, spherical k-means and their metrics against numpy and scikit-learn on small data."""

import math
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.cluster import KMeans
from sklearn.decomposition import PCA
from sklearn.metrics import silhouette_samples

from moesaic.analysis import clusters as clustering
from moesaic.analysis.capture import Capture, create_tokens
from moesaic.analysis.clusters import (
    TokenClusters,
    assign,
    cluster_tokens,
    concentration,
    covariance,
    cross_table,
    gather,
    mutual_information,
    principal_components,
    purity,
    seed_centres,
    silhouette,
    spherical_kmeans,
    unit,
    write_unit_rows,
)
from moesaic.analysis.describe import describe_first_token
from tests.tiny_texts import made_up_sample


@contextmanager
def rows_file(folder: Path, rows: np.ndarray):
    with create_tokens(folder / "rows.npy", rows.shape, rows.dtype) as file:
        file.write(0, rows)
        yield file


def directions(
    number: int, groups: int, features: int, *, noise: float, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Unit rows around a few directions, and the direction of each."""
    draw = np.random.default_rng(seed)
    centres = unit(draw.standard_normal((groups, features)))
    group = draw.integers(0, groups, number)
    return unit(centres[group] + noise * draw.standard_normal((number, features))).astype(np.float32), group


def pieces(rows: np.ndarray, size: int):
    return (rows[start : start + size] for start in range(0, len(rows), size))


def test_streamed_covariance_and_components_are_those_of_scikit_learn(tmp_path):
    draw = np.random.default_rng(0)
    rows = (draw.standard_normal((500, 12)) * np.geomspace(3, 0.01, 12) + 5).astype(np.float32)
    mean = rows.mean(axis=0, dtype=np.float64)
    found = covariance(pieces(rows, 64), mean)
    assert found == pytest.approx(np.cov(rows.T.astype(np.float64), bias=True), rel=1e-5, abs=1e-6)
    components = principal_components(found, mean)
    assert components is not None
    reference = PCA(n_components=0.95, svd_solver="full").fit(rows.astype(np.float64))
    assert components.axes_FP.shape[1] == reference.n_components_
    assert components.variance_kept == pytest.approx(reference.explained_variance_ratio_.sum(), rel=1e-5)
    expected = unit(reference.transform(rows.astype(np.float64)))
    with create_tokens(tmp_path / "rows.npy", expected.shape, np.dtype(np.float32)) as file:
        write_unit_rows(pieces(rows, 64), components, file)
        found = file.read(0, 500)
    signs = np.sign((found * expected).sum(axis=0))
    assert found * signs == pytest.approx(expected, abs=1e-3)


def test_components_keep_all_of_a_line_and_none_of_a_point():
    line = np.outer(np.arange(10.0), [1.0, 2.0]).astype(np.float32)
    mean = line.mean(axis=0, dtype=np.float64)
    found = principal_components(covariance([line], mean), mean)
    assert found is not None
    assert found.axes_FP.shape == (2, 1)
    same = np.ones((10, 2), dtype=np.float32)
    assert principal_components(covariance([same], np.ones(2)), np.ones(2)) is None


def test_spherical_kmeans_finds_directions_that_are_there(tmp_path):
    rows, group = directions(600, 5, 8, noise=0.1)
    with rows_file(tmp_path, rows) as file:
        found = spherical_kmeans(file, 5, seed=0)
    assert mutual_information(found.cluster_T, group) == pytest.approx(1.0)
    sizes = np.bincount(found.cluster_T)
    assert sizes.tolist() == sorted(sizes.tolist(), reverse=True)
    for cluster in range(5):
        mean = rows[found.cluster_T == cluster].sum(axis=0)
        assert found.centres_CP[cluster] == pytest.approx(mean / np.linalg.norm(mean), abs=1e-5)
        assert found.cosine_T[found.cluster_T == cluster] == pytest.approx(
            rows[found.cluster_T == cluster] @ found.centres_CP[cluster], abs=1e-6
        )


def test_lloyd_goes_where_scikit_learn_goes_from_the_same_start(tmp_path):
    """On unit rows around directions far apart, k-means and spherical k-means have the same clusters."""
    rows, _ = directions(400, 4, 6, noise=0.05, seed=3)
    start = seed_centres(rows, 4, np.random.default_rng(1))
    k_means: Any = KMeans  # its types say that an array is no init
    reference = k_means(4, init=start, n_init=1, max_iter=100).fit(rows)
    with rows_file(tmp_path, rows) as file:
        centres, _ = clustering._improve_on_file(file, start)
    cluster, _ = assign(rows, centres)
    assert (cluster == reference.labels_).all()
    assert centres == pytest.approx(unit(reference.cluster_centers_), abs=1e-5)


def test_blocks_and_sample_do_not_change_what_is_found(tmp_path, monkeypatch):
    rows, group = directions(500, 4, 6, noise=0.1)
    monkeypatch.setattr(clustering, "_BLOCK_BYTES", 4 * 6 * 37)
    monkeypatch.setattr(clustering, "SAMPLE_ROWS", 100)
    with rows_file(tmp_path, rows) as file:
        found = spherical_kmeans(file, 4, seed=0)
        again = spherical_kmeans(file, 4, seed=0)
        picked = gather(file, np.array([0, 36, 37, 499]))
    assert mutual_information(found.cluster_T, group) == pytest.approx(1.0)
    assert (found.cluster_T == again.cluster_T).all()
    assert (found.centres_CP == again.centres_CP).all()
    assert (picked == rows[[0, 36, 37, 499]]).all()


def test_fewer_directions_than_clusters_give_fewer_clusters(tmp_path):
    rows = np.repeat(np.eye(3, dtype=np.float32), 5, axis=0)
    with rows_file(tmp_path, rows) as file:
        found = spherical_kmeans(file, 6, seed=0)
    assert len(found.centres_CP) == 3
    assert np.bincount(found.cluster_T).tolist() == [5, 5, 5]


def test_metrics_against_the_definitions():
    draw = np.random.default_rng(0)
    cluster, domain = draw.integers(0, 4, 200), draw.integers(0, 3, 200)
    table = np.array([[((cluster == c) & (domain == n)).sum() for n in range(3)] for c in range(4)])
    assert purity(table) == sum(max(row) for row in table) / 200
    p = table / 200
    information = sum(
        p[c, n] * math.log(p[c, n] / p[c].sum() / p[:, n].sum()) for c in range(4) for n in range(3) if p[c, n]
    )
    entropies = [-sum(x * math.log(x) for x in p.sum(axis=axis)) for axis in (0, 1)]
    assert mutual_information(cluster, domain) == pytest.approx(2 * information / sum(entropies))
    assert mutual_information(cluster, np.zeros(200, dtype=int)) is None
    document = np.sort(draw.integers(0, 10, 200))
    found = cross_table(document, cluster, 10, 4)
    for d in range(10):
        counts = [((document == d) & (cluster == c)).sum() for c in range(4)]
        assert found[d].tolist() == counts
        assert concentration(found)[d] == max(counts) / sum(counts)


def test_tokens_of_each_string_in_each_cluster():
    counts = cross_table(np.array([0, 0, 2, 1]), np.array([0, 1, 1, 0], dtype=np.int16), 3, 2)
    assert counts.tolist() == [[1, 1], [1, 0], [0, 1]]


def test_silhouette_is_the_naive_one():
    rows, group = directions(60, 3, 4, noise=0.4)
    distance = 1 - rows @ rows.T
    naive = []
    for t in range(60):
        others = [[u for u in range(60) if group[u] == g and u != t] for g in range(3)]
        own = distance[t, others[group[t]]].mean()
        nearest = min(distance[t, others[g]].mean() for g in range(3) if g != group[t])
        naive.append((nearest - own) / max(nearest, own))
    assert silhouette(rows, group) == pytest.approx(np.mean(naive), abs=1e-5)
    samples: Any = silhouette_samples
    assert silhouette(rows, group) == pytest.approx(samples(rows, group, metric="cosine").mean(), abs=1e-6)
    assert silhouette(rows, np.zeros(60, dtype=int)) is None


def made_up_capture(stack: ExitStack, folder: Path, logits: np.ndarray) -> Capture:
    file = stack.enter_context(create_tokens(folder / "logits.npy", logits.shape, logits.dtype))
    file.write(0, logits)
    return Capture(logits=file, ids=file, weights=file)


def test_all_of_it_against_scikit_learn_and_numpy(tmp_path, monkeypatch):
    monkeypatch.setattr(clustering, "BLOCK_TOKENS", 50)
    draw = np.random.default_rng(0)
    group = draw.integers(0, 4, 300)
    logits = draw.standard_normal((4, 2, 5))[group] * 3 + 0.2 * draw.standard_normal((300, 2, 5))
    logits = logits.astype(np.float16)
    wide = np.exp(logits.astype(np.float64))
    p = (wide / wide.sum(axis=-1, keepdims=True)).reshape(300, 10)
    with ExitStack() as stack:
        capture = made_up_capture(stack, tmp_path, logits)
        found = cluster_tokens(capture, "softmax", p.mean(axis=0), tmp_path / "scratch.npy", clusters=4, seed=0)
    assert isinstance(found, TokenClusters)
    projected = unit(PCA(n_components=0.95, svd_solver="full").fit_transform(p))
    k_means: Any = KMeans
    reference = k_means(4, n_init=10, random_state=0).fit_predict(projected)
    assert mutual_information(found.clusters.cluster_T, reference) == pytest.approx(1.0)
    assert mutual_information(found.clusters.cluster_T, group) == pytest.approx(1.0)
    assert found.silhouette == pytest.approx(silhouette(projected, reference), abs=1e-4)
    for cluster in range(4):
        mean = p[found.clusters.cluster_T == cluster].mean(axis=0).reshape(2, 5)
        assert found.mass_CLE[cluster] == pytest.approx(mean, abs=1e-5)
    assert not (tmp_path / "scratch.npy").exists()


@pytest.mark.parametrize(
    ("logits", "reason"),
    [
        (np.zeros((3, 1, 4), dtype=np.float16), "there are 3 tokens for 4 clusters; give more data"),
        (np.ones((9, 1, 4), dtype=np.float16), "all tokens are routed alike"),
    ],
)
def test_what_cannot_be_clustered_has_a_reason(tmp_path, logits, reason):
    mean = np.full(4, 0.25)
    with ExitStack() as stack:
        capture = made_up_capture(stack, tmp_path, logits)
        found = cluster_tokens(capture, "softmax", mean, tmp_path / "scratch.npy", clusters=4, seed=0)
    assert isinstance(found, str)
    assert found.startswith(reason)


def test_first_tokens_with_a_cluster_of_their_own():
    sample = made_up_sample([4, 4, 4], [0, 0, 0])
    cluster = np.array([1, 0, 0, 0, 1, 1, 0, 0, 2, 0, 2, 2], dtype=np.int16)
    found = describe_first_token(sample, cluster, [0.5, 0.7])
    assert found.cluster == 1
    assert found.first_in_cluster == pytest.approx(2 / 3)
    assert found.second_in_cluster == pytest.approx(1 / 3)
    assert found.cluster_is_first == pytest.approx(2 / 3)
    assert "67% of the first tokens and 33% of the second ones are in cluster 1" in found.sentence
    assert describe_first_token(sample, np.full(12, -1, dtype=np.int16), [0.5]).cluster is None
