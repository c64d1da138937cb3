"""Scores of experts from statistics: pure functions, higher is better, one row per MoE layer; L layers, E experts.

docs/select.md. An expert that no token reached scores 0, never NaN. A new scorer is a function and its line in
`SCORERS`. NumPy is imported by the functions, because the names are read for `moesaic select --help`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from moesaic.common import seeds

if TYPE_CHECKING:
    from jaxtyping import Float64
    from numpy import ndarray

    from moesaic.selection.statistics import ExpertStatistics


def score_router(statistics: ExpertStatistics) -> Float64[ndarray, "layers experts"]:
    """Mean probability over the tokens (EMO, section 4.2)."""
    return statistics.probability_LE / statistics.tokens


def score_easy_ep(statistics: ExpertStatistics) -> Float64[ndarray, "layers experts"]:
    """Sum of g_e * ||E_e(x)|| * max(0, 1 - cos(x, x + y)), x before the block's norm (arXiv 2504.06792)."""
    return statistics.drift_original_LE


def score_easy_ep_emo(statistics: ExpertStatistics) -> Float64[ndarray, "layers experts"]:
    """The same with the block's input as x and the shared experts in y (EMO's code)."""
    return statistics.drift_emo_LE


def score_reap(statistics: ExpertStatistics) -> Float64[ndarray, "layers experts"]:
    """Mean of g_e * ||E_e(x)|| over the tokens that selected the expert (arXiv 2510.13999)."""
    return statistics.weighted_norm_LE / statistics.counts_LE.clip(min=1)


def score_frequency(statistics: ExpertStatistics) -> Float64[ndarray, "layers experts"]:
    """Share of the tokens that selected the expert."""
    return statistics.counts_LE / statistics.tokens


SCORERS: Mapping[str, Callable[[ExpertStatistics], ndarray]] = {
    "router": score_router,
    "easy_ep": score_easy_ep,
    "easy_ep:emo": score_easy_ep_emo,
    "reap": score_reap,
    "frequency": score_frequency,
}
"""Name of `--method`, or METHOD:VARIANT -> its scores."""

METHODS = (*(name for name in SCORERS if ":" not in name), "random")


def score(
    statistics: Sequence[ExpertStatistics], method: str, variant: str = "original"
) -> Float64[ndarray, "layers experts"]:
    """Scores by a method that reads statistics, of one domain or mixed over several."""
    scorer = SCORERS.get(f"{method}:{variant}", SCORERS[method])
    scores = [scorer(one) for one in statistics]
    return scores[0] if len(scores) == 1 else mix_domains(scores)


def score_random(layers: Sequence[int], num_experts: int, seed: int) -> Float64[ndarray, "layers experts"]:
    """Uniform random scores; a layer's depend on the seed and its index alone."""
    import numpy as np

    return np.stack([np.random.default_rng(seeds.order("select", seed, layer)).random(num_experts) for layer in layers])


def mix_domains(scores: Sequence[Float64[ndarray, "layers experts"]]) -> Float64[ndarray, "layers experts"]:
    """Give each domain the same say: each layer's row normalised to sum 1, then added (docs/select.md).

    A row of zeros (no expert has a score) stays zero.
    """
    import numpy as np

    total = np.zeros_like(scores[0])
    for scores_LE in scores:
        sums_L1 = scores_LE.sum(axis=1, keepdims=True)
        total += np.divide(scores_LE, sums_L1, out=np.zeros_like(scores_LE), where=sums_L1 > 0)
    return total


def routing_mass(statistics: Sequence[ExpertStatistics], kept: Sequence[Sequence[int]]) -> tuple[float, ...]:
    """Share of the router's probability on the kept experts, per layer; the mean over domains."""
    shares = mix_domains([one.probability_LE for one in statistics]) / len(statistics)
    return tuple(min(1.0, float(row[list(ids)].sum())) for row, ids in zip(shares, kept, strict=True))
