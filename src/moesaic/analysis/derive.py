"""From sums to the numbers that are shown.

Letters: S scopes, N domains, L MoE layers, E experts, B buckets of positions.
"""

from collections.abc import Sequence
from functools import reduce
from operator import add
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor

from moesaic.analysis.documents import Sample
from moesaic.analysis.health import effective_experts, levels, normalised_entropy
from moesaic.analysis.measure import Measured
from moesaic.routing.stats import RoutingStats, load_shares, summarise_load, within_group_coselection

Groups = Sequence[Sequence[int]] | None


def derive(measured: Measured, sample: Sample, *, active: int, groups: Groups) -> dict[str, ndarray]:
    """The fields of `Statistics` that need no clusters."""
    scopes = [reduce(add, measured.domains), *measured.domains]
    confidence_SL = torch.cat([measured.confidence_NL.sum(dim=0, keepdim=True), measured.confidence_NL])
    tokens_S = torch.stack([scope.tokens for scope in scopes]).double()
    counts_SLE = torch.stack([scope.counts_LE for scope in scopes])
    load_SLE = torch.stack([load_shares(scope.counts_LE) for scope in scopes]).numpy()
    collapse = [summarise_load(scope.counts_LE) for scope in scopes]
    effective_SL = effective_experts(load_SLE)
    dead_SL = np.array([one["dead_experts"] for one in collapse])
    experts = load_SLE.shape[-1]
    entropies_SL = torch.stack([scope.entropy_L for scope in scopes])
    documents_N = np.bincount(sample.domain_D, minlength=len(sample.domains))
    probability_NLE = measured.document_sum_NLE.numpy() / documents_N[:, None, None]
    return {
        "counts_SLE": counts_SLE.numpy(),
        "load_SLE": load_SLE,
        "mass_SLE": torch.stack([scope.probability_LE / scope.tokens for scope in scopes]).numpy(),
        "entropy_SL": np.array([one["load_entropy"] for one in collapse]),
        "largest_SL": np.array([one["largest_share"] for one in collapse]),
        "two_busiest_SL": np.array([one["two_busiest_share"] for one in collapse]),
        "dead_SL": dead_SL,
        "effective_SL": effective_SL,
        "coselection_SL": np.stack([_coselection(scope, groups) for scope in scopes]),
        "confidence_SL": (confidence_SL / tokens_S[:, None]).numpy(),
        "uncertainty_SL": (entropies_SL / tokens_S[:, None]).numpy() / np.log(max(2, experts)),
        "level_SL": levels(counts_SLE.numpy(), effective_SL, dead_SL, active),
        "pairs_LEE": _pairs(scopes[0]).numpy(),
        "probability_NLE": probability_NLE,
        "similarity_LNN": np.stack([cosine(layer_NE) for layer_NE in probability_NLE.swapaxes(0, 1)]),
        "similarity_NN": cosine(probability_NLE.reshape(len(probability_NLE), -1)),
        **_positions(measured),
    }


def cosine(rows_NX: Float[ndarray, "rows features"]) -> Float[ndarray, "rows rows"]:
    """Cosine of every row with every other."""
    unit_NX = rows_NX / np.linalg.norm(rows_NX, axis=-1, keepdims=True)
    return unit_NX @ unit_NX.T


def first_token_cosine(measured: Measured) -> tuple[float, ...]:
    """Per layer, cosine of the mean probabilities of first tokens and of all others; 0 where there are no others."""
    rest_LE = reduce(add, measured.domains).probability_LE - measured.first_LE
    if measured.bucket_tokens_B[1:].sum() == 0:
        return (0.0,) * len(rest_LE)
    return tuple(torch.nn.functional.cosine_similarity(measured.first_LE, rest_LE, dim=-1).tolist())


def _pairs(stats: RoutingStats) -> Tensor:
    assert stats.pairs_LEE is not None, "measured with pairs"
    return stats.pairs_LEE


def _coselection(stats: RoutingStats, groups: Groups) -> Float[ndarray, " layers"]:
    layers = len(stats.counts_LE)
    if groups is None:
        return np.full(layers, np.nan)
    return np.array([float(within_group_coselection(stats, groups[layer])[layer]) for layer in range(layers)])


def _positions(measured: Measured) -> dict[str, Any]:
    tokens_B1 = measured.bucket_tokens_B[:, None].double()
    counts_BLE = measured.bucket_counts_BLE.double().numpy()
    with np.errstate(invalid="ignore"):
        load_BLE = np.nan_to_num(counts_BLE / counts_BLE.sum(axis=-1, keepdims=True))
    to_previous_BL = (measured.bucket_to_previous_BL / tokens_B1).numpy()
    to_previous_BL[0] = np.nan
    return {
        "bucket_start_B": measured.bucket_start_B,
        "bucket_tokens_B": measured.bucket_tokens_B.numpy(),
        "position_confidence_BL": (measured.bucket_confidence_BL / tokens_B1).numpy(),
        "position_entropy_BL": normalised_entropy(load_BLE),
        "position_to_document_BL": (measured.bucket_to_document_BL / tokens_B1).numpy(),
        "position_to_previous_BL": to_previous_BL,
    }
