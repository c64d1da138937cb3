"""Scores of experts from statistics: pure functions, higher is better, one row per MoE layer. Torch-free.

methods.md, section 4. An expert that no token reached scores 0, never NaN.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import xxhash
from jaxtyping import Float64
from numpy import ndarray

from moesaic.selection.request import EasyEpVariant, Method
from moesaic.selection.statistics import ExpertStatistics


def score_router(statistics: ExpertStatistics) -> Float64[ndarray, "layers experts"]:
    """Mean probability over the tokens (EMO, section 4.2)."""
    return statistics.probability_LE / statistics.tokens


def score_easy_ep_original(statistics: ExpertStatistics) -> Float64[ndarray, "layers experts"]:
    """Sum of g_e * ||E_e(x)|| * max(0, 1 - cos(x, x + y)), x before the block's norm (arXiv 2504.06792)."""
    return statistics.drift_original_LE


def score_easy_ep_emo(statistics: ExpertStatistics) -> Float64[ndarray, "layers experts"]:
    """The same with the block's input as x and the shared experts in y (EMO's code)."""
    return statistics.drift_emo_LE


def score_reap(statistics: ExpertStatistics) -> Float64[ndarray, "layers experts"]:
    """Mean of g_e * ||E_e(x)|| over the tokens that selected the expert (arXiv 2510.13999)."""
    return statistics.weighted_norm_LE / np.maximum(statistics.counts_LE, 1)


def score_frequency(statistics: ExpertStatistics) -> Float64[ndarray, "layers experts"]:
    """Share of the tokens that selected the expert."""
    return statistics.counts_LE / statistics.tokens


_SCORERS: Mapping[tuple[Method, EasyEpVariant], Callable[[ExpertStatistics], ndarray]] = {
    ("router", "original"): score_router,
    ("easy_ep", "original"): score_easy_ep_original,
    ("easy_ep", "emo"): score_easy_ep_emo,
    ("reap", "original"): score_reap,
    ("frequency", "original"): score_frequency,
}


def score(
    statistics: Sequence[ExpertStatistics], method: Method, variant: EasyEpVariant = "original"
) -> Float64[ndarray, "layers experts"]:
    """Scores by a method that reads statistics, of one domain or mixed over several.

    `variant` matters to easy_ep only.
    """
    scorer = _SCORERS[method, variant if method == "easy_ep" else "original"]
    scores = [scorer(one) for one in statistics]
    return scores[0] if len(scores) == 1 else mix_domains(scores)


def score_random(layers: Sequence[int], num_experts: int, seed: int) -> Float64[ndarray, "layers experts"]:
    """Uniform random scores; a layer's depend on the seed and its index alone."""
    rows = [
        np.random.default_rng(xxhash.xxh3_64_intdigest(f"select/{seed}/{layer}".encode())).random(num_experts)
        for layer in layers
    ]
    return np.stack(rows)


def mix_domains(scores: Sequence[Float64[ndarray, "layers experts"]]) -> Float64[ndarray, "layers experts"]:
    """Give each domain the same say: each layer's row normalised to sum 1, then added (methods.md, section 4).

    A row of zeros (no expert has a score) stays zero.
    """
    total = np.zeros_like(scores[0])
    for scores_LE in scores:
        sums_L1 = scores_LE.sum(axis=1, keepdims=True)
        total += np.divide(scores_LE, sums_L1, out=np.zeros_like(scores_LE), where=sums_L1 > 0)
    return total


def routing_mass(statistics: Sequence[ExpertStatistics], kept: Sequence[Sequence[int]]) -> tuple[float, ...]:
    """Share of the router's probability on the kept experts, per layer; the mean over domains."""
    shares = mix_domains([one.probability_LE for one in statistics]) / len(statistics)
    return tuple(min(1.0, float(row[list(ids)].sum())) for row, ids in zip(shares, kept, strict=True))
