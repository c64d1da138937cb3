"""One pass over a capture: sums over its tokens, and the numbers that are shown made of them.

Letters: T tokens of a block, S scopes, N domains, L MoE layers, E experts, K active, B buckets of positions, V frequent
token strings, R ranked documents.
"""

from collections.abc import Sequence
from functools import reduce
from operator import add
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor

from moesaic.analysis.capture import Block, Capture, blocks, router_probabilities
from moesaic.analysis.documents import Sample, Vocabulary
from moesaic.analysis.health import effective_experts, levels, normalised_entropy
from moesaic.common.progress import progress
from moesaic.routing.capture import Scoring
from moesaic.routing.rules import RoutingDecision
from moesaic.routing.stats import RoutingStats, load_shares, measure_stats, summarise_load, within_group_coselection

RANKED_DOCUMENTS = 5

Groups = Sequence[Sequence[int]] | None


class Measured:
    """Sums over all tokens of one model, or per domain: float64, and integers for counts."""

    def __init__(self, *, domains: int, layers: int, experts: int, strings: int, document_tokens: int) -> None:
        wide = torch.float64
        self.bucket_start_B = position_buckets(document_tokens)
        buckets = len(self.bucket_start_B)
        self.domains: list[RoutingStats] = []
        """One per domain, pairs included."""
        self.confidence_NL = torch.zeros(domains, layers, dtype=wide)
        """Sum over a domain's tokens of the largest probability."""
        self.first_LE = torch.zeros(layers, experts, dtype=wide)
        """Sum over first tokens of the probabilities."""
        self.bucket_tokens_B = torch.zeros(buckets, dtype=torch.int64)
        self.bucket_counts_BLE = torch.zeros(buckets, layers, experts, dtype=torch.int64)
        """Selections by tokens of a bucket."""
        self.bucket_confidence_BL, self.bucket_to_document_BL, self.bucket_to_previous_BL = torch.zeros(
            3, buckets, layers, dtype=wide
        )
        self.token_counts_VLE = torch.zeros(strings + 1, layers, experts, dtype=torch.int32)
        """How often a token string selected an expert; the last row is of the strings that are too rare."""
        self.top_documents_RLE = torch.full((RANKED_DOCUMENTS, layers, experts), -1, dtype=torch.int64)
        self.top_means_RLE = torch.full((RANKED_DOCUMENTS, layers, experts), -1.0)
        """For each expert the documents with the highest mean probability, best first; -1 where there are fewer."""

    def add_stats(self, block: Block, probability_TLE: Tensor, ids_TLK: Tensor, weights_TLK: Tensor) -> None:
        """What the routers chose."""
        decisions = [
            # Softmax of the logarithm of probabilities gives them back, whatever they were computed from.
            RoutingDecision(
                logits_TE=probability_TLE[:, layer].log(),
                expert_ids_TK=ids_TLK[:, layer],
                weights_TK=weights_TLK[:, layer],
            )
            for layer in range(probability_TLE.shape[1])
        ]
        stats = measure_stats(decisions, torch.ones(len(probability_TLE), dtype=torch.bool), pairs=True)
        if block.domain == len(self.domains):  # documents are ordered by domain
            self.domains.append(stats)
        else:
            self.domains[block.domain] += stats
        self.confidence_NL[block.domain] += probability_TLE.amax(dim=-1).sum(dim=0, dtype=torch.float64)

    def add_documents(self, block: Block, probability_TLE: Tensor, document_T: Tensor) -> Tensor:
        """Mean probabilities of the block's documents; keeps, for each expert, the best of them."""
        documents = block.last_document - block.first_document
        lengths_D = document_T.bincount(minlength=documents)
        means_DLE = torch.zeros(documents, *probability_TLE.shape[1:]).index_add_(0, document_T, probability_TLE)
        means_DLE /= lengths_D[:, None, None]
        first_T = torch.cat([torch.zeros(1, dtype=torch.int64), lengths_D.cumsum(0)[:-1]])
        self.first_LE += probability_TLE[first_T].sum(dim=0, dtype=torch.float64)
        here_D = torch.arange(block.first_document, block.last_document)
        candidates = torch.cat([self.top_documents_RLE, here_D[:, None, None].expand_as(means_DLE)])
        # Stable, so that of equal means the document that came first stays first.
        order = torch.cat([self.top_means_RLE, means_DLE]).sort(dim=0, descending=True, stable=True)
        self.top_means_RLE = order.values[:RANKED_DOCUMENTS].clone()
        self.top_documents_RLE = candidates.gather(0, order.indices[:RANKED_DOCUMENTS])
        return means_DLE

    def add_positions(self, bucket_T: Tensor, probability_TLE: Tensor, ids_TLK: Tensor, mean_TLE: Tensor) -> None:
        """How routing changes over a document; `mean_TLE` is that of each token's whole document."""
        self.bucket_tokens_B += bucket_T.bincount(minlength=len(self.bucket_tokens_B))
        self.bucket_confidence_BL.index_add_(0, bucket_T, probability_TLE.amax(dim=-1).double())
        cosine_TL = F.cosine_similarity(probability_TLE, mean_TLE, dim=-1)
        self.bucket_to_document_BL.index_add_(0, bucket_T, cosine_TL.double())
        # The first token of a document has none before it: bucket 0, which is not reported.
        before_TL = F.cosine_similarity(probability_TLE[1:], probability_TLE[:-1], dim=-1)
        self.bucket_to_previous_BL.index_add_(0, bucket_T[1:], before_TL.double())
        _count(self.bucket_counts_BLE, bucket_T, ids_TLK)


def _count(counts_XLE: Tensor, row_T: Tensor, ids_TLK: Tensor) -> None:
    """Add one for each selection, at its token's row, its layer and its expert."""
    _, layers, experts = counts_XLE.shape
    cell_TLK = (row_T[:, None, None] * layers + torch.arange(layers)[:, None]) * experts + ids_TLK
    ones = torch.ones(cell_TLK.numel(), dtype=counts_XLE.dtype)
    counts_XLE.view(-1).index_add_(0, cell_TLK.flatten(), ones)


def position_buckets(document_tokens: int) -> ndarray:
    """First positions of buckets that double in size: 0, 1, 2, 4, 8, ..."""
    starts = [0, *(2**power for power in range(32) if 2**power < document_tokens)]
    return np.array(starts, dtype=np.int64)


def measure(
    capture: Capture,
    sample: Sample,
    scoring: Scoring,
    vocabulary: Vocabulary,
    *,
    document_tokens: int,
    quiet: bool = True,
) -> Measured:
    """One pass over the captured tokens."""
    _, layers, experts = capture.logits.shape
    sums = Measured(
        domains=len(sample.domains),
        layers=layers,
        experts=experts,
        strings=len(vocabulary.ids_V),
        document_tokens=document_tokens,
    )
    position_T, starts_B = torch.from_numpy(sample.position_T), torch.from_numpy(sums.bucket_start_B)
    all_document_T = torch.from_numpy(sample.document_T)
    with progress(sample.tokens, unit="tokens", label="measuring", quiet=quiet) as tick:
        for block in blocks(sample):
            rows = slice(block.start, block.stop)
            probability_TLE = router_probabilities(capture.logits.read(block.start, block.stop), scoring)
            ids_TLK = torch.from_numpy(capture.ids.read(block.start, block.stop).astype(np.int64))
            weights_TLK = torch.from_numpy(capture.weights.read(block.start, block.stop))
            sums.add_stats(block, probability_TLE, ids_TLK, weights_TLK)
            document_T = all_document_T[rows].long() - block.first_document
            means_DLE = sums.add_documents(block, probability_TLE, document_T)
            bucket_T = torch.searchsorted(starts_B, position_T[rows].long(), right=True) - 1
            sums.add_positions(bucket_T, probability_TLE, ids_TLK, means_DLE[document_T])
            _count(sums.token_counts_VLE, torch.from_numpy(vocabulary.index_T[rows]), ids_TLK)
            tick(block.stop - block.start)
    return sums


def derive(
    measured: Measured, probability_NLE: Float[ndarray, "domains layers experts"], *, active: int, groups: Groups
) -> dict[str, ndarray]:
    """The fields of `Statistics` that need no clusters; `probability_NLE` is what `capture` gives."""
    scopes = [reduce(add, measured.domains), *measured.domains]
    confidence_SL = torch.cat([measured.confidence_NL.sum(dim=0, keepdim=True), measured.confidence_NL])
    tokens_S = torch.stack([scope.tokens for scope in scopes]).double()
    counts_SLE = torch.stack([scope.counts_LE for scope in scopes])
    load_SLE = torch.stack([load_shares(scope.counts_LE) for scope in scopes]).numpy()
    collapse = [summarise_load(scope.counts_LE) for scope in scopes]
    effective_SL = effective_experts(load_SLE)
    dead_SL = np.array([one["dead_experts"] for one in collapse])
    experts = load_SLE.shape[-1]
    pairs_LEE = scopes[0].pairs_LEE
    assert pairs_LEE is not None, "measured with pairs"
    entropies_SL = torch.stack([scope.entropy_L for scope in scopes])
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
        "pairs_LEE": pairs_LEE.numpy(),
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
