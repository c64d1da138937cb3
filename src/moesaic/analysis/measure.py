"""All sums over tokens that one pass over a capture gives.

Letters: T tokens of a block, N domains, L MoE layers, E experts, K active, B buckets of positions, V frequent token
strings, R ranked documents.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.analysis.blocks import Block, blocks, router_probabilities
from moesaic.analysis.capture import Capture
from moesaic.analysis.documents import Sample
from moesaic.analysis.vocabulary import Vocabulary
from moesaic.common.progress import progress
from moesaic.routing.capture import Scoring
from moesaic.routing.stats import RoutingStats, measure_stats
from moesaic.routing.types import RoutingDecision

RANKED_DOCUMENTS = 5


@dataclass(frozen=True, kw_only=True, eq=False)
class Measured:
    """Sums over all tokens, or per domain, of one model."""

    domains: tuple[RoutingStats, ...]
    """One per domain, pairs included."""
    confidence_NL: Tensor
    """Sum over a domain's tokens of the largest probability, float64."""
    document_sum_NLE: Tensor
    """Sum over a domain's documents of their mean probabilities, float64."""
    first_LE: Tensor
    """Sum over first tokens of the probabilities, float64."""
    bucket_start_B: np.ndarray
    bucket_tokens_B: Tensor
    bucket_counts_BLE: Tensor
    """Selections by tokens of a bucket, int64."""
    bucket_confidence_BL: Tensor
    bucket_to_document_BL: Tensor
    bucket_to_previous_BL: Tensor
    """Sums over a bucket's tokens, float64."""
    token_counts_VLE: Tensor
    """How often a token string selected an expert, int32."""
    top_documents_RLE: Tensor
    top_means_RLE: Tensor
    """For each expert the documents with the highest mean probability, best first; -1 where there are fewer."""


def position_buckets(document_tokens: int) -> np.ndarray:
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
    sums = _Sums(
        domains=len(sample.domains),
        layers=layers,
        experts=experts,
        strings=len(vocabulary.ids_V),
        starts_B=torch.from_numpy(position_buckets(document_tokens)),
    )
    position_T = torch.from_numpy(sample.position_T)
    with progress(sample.tokens, unit="tokens", label="measuring", quiet=quiet) as tick:
        for block in blocks(sample):
            rows = slice(block.start, block.stop)
            probability_TLE = router_probabilities(capture.logits.read(block.start, block.stop), scoring)
            ids_TLK = torch.from_numpy(capture.ids.read(block.start, block.stop).astype(np.int64))
            weights_TLK = torch.from_numpy(capture.weights.read(block.start, block.stop))
            sums.add_stats(block, probability_TLE, ids_TLK, weights_TLK)
            document_T = _documents(sample, block)
            means_DLE = sums.add_documents(block, probability_TLE, document_T)
            bucket_T = torch.searchsorted(sums.starts_B, position_T[rows].long(), right=True) - 1
            sums.add_positions(bucket_T, probability_TLE, ids_TLK, means_DLE[document_T])
            sums.add_strings(torch.from_numpy(vocabulary.index_T[rows]), ids_TLK)
            tick(block.stop - block.start)
    return sums.done()


def _documents(sample: Sample, block: Block) -> Tensor:
    """Document of each token, counted from the block's first."""
    lengths = np.diff(sample.start_D1[block.first_document : block.last_document + 1])
    return torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths))


class _Sums:
    def __init__(self, *, domains: int, layers: int, experts: int, strings: int, starts_B: Tensor) -> None:
        buckets = len(starts_B)
        self.starts_B = starts_B
        self._stats: list[RoutingStats | None] = [None] * domains
        self._confidence_NL = torch.zeros(domains, layers, dtype=torch.float64)
        self._document_sum_NLE = torch.zeros(domains, layers, experts, dtype=torch.float64)
        self._first_LE = torch.zeros(layers, experts, dtype=torch.float64)
        self._tokens_B = torch.zeros(buckets, dtype=torch.int64)
        self._counts_BLE = torch.zeros(buckets, layers, experts, dtype=torch.int64)
        self._confidence_BL, self._to_document_BL, self._to_previous_BL = torch.zeros(
            3, buckets, layers, dtype=torch.float64
        )
        self._strings_VLE = torch.zeros(strings + 1, layers, experts, dtype=torch.int32)
        self._top_documents_RLE = torch.full((RANKED_DOCUMENTS, layers, experts), -1, dtype=torch.int64)
        self._top_means_RLE = torch.full((RANKED_DOCUMENTS, layers, experts), -1.0)

    def add_stats(self, block: Block, probability_TLE: Tensor, ids_TLK: Tensor, weights_TLK: Tensor) -> None:
        decisions = [
            # Softmax of the logarithm of probabilities gives them back, whatever they were computed from.
            RoutingDecision(
                logits_TE=probability_TLE[:, layer].log(),
                expert_ids_TK=ids_TLK[:, layer],
                weights_TK=weights_TLK[:, layer],
            )
            for layer in range(probability_TLE.shape[1])
        ]
        everything_T = torch.ones(len(probability_TLE), dtype=torch.bool)
        stats = measure_stats(decisions, everything_T, pairs=True)
        before = self._stats[block.domain]
        self._stats[block.domain] = stats if before is None else before + stats
        self._confidence_NL[block.domain] += probability_TLE.amax(dim=-1).sum(dim=0, dtype=torch.float64)

    def add_documents(self, block: Block, probability_TLE: Tensor, document_T: Tensor) -> Tensor:
        """Mean probabilities of the block's documents; keeps their sum and, for each expert, the best of them."""
        documents = block.last_document - block.first_document
        lengths_D = document_T.bincount(minlength=documents)
        means_DLE = torch.zeros(documents, *probability_TLE.shape[1:]).index_add_(0, document_T, probability_TLE)
        means_DLE /= lengths_D[:, None, None]
        self._document_sum_NLE[block.domain] += means_DLE.sum(dim=0, dtype=torch.float64)
        first_T = torch.cat([torch.zeros(1, dtype=torch.int64), lengths_D.cumsum(0)[:-1]])
        self._first_LE += probability_TLE[first_T].sum(dim=0, dtype=torch.float64)
        here_D = torch.arange(block.first_document, block.last_document)
        candidates = torch.cat([self._top_documents_RLE, here_D[:, None, None].expand_as(means_DLE)])
        # Stable, so that of equal means the document that came first stays first.
        order = torch.cat([self._top_means_RLE, means_DLE]).sort(dim=0, descending=True, stable=True)
        self._top_means_RLE = order.values[:RANKED_DOCUMENTS].clone()
        self._top_documents_RLE = candidates.gather(0, order.indices[:RANKED_DOCUMENTS])
        return means_DLE

    def add_positions(self, bucket_T: Tensor, probability_TLE: Tensor, ids_TLK: Tensor, mean_TLE: Tensor) -> None:
        self._tokens_B += bucket_T.bincount(minlength=len(self.starts_B))
        self._confidence_BL.index_add_(0, bucket_T, probability_TLE.amax(dim=-1).double())
        cosine_TL = F.cosine_similarity(probability_TLE, mean_TLE, dim=-1)
        self._to_document_BL.index_add_(0, bucket_T, cosine_TL.double())
        # The first token of a document has none before it: bucket 0, which is not reported.
        before_TL = F.cosine_similarity(probability_TLE[1:], probability_TLE[:-1], dim=-1)
        self._to_previous_BL.index_add_(0, bucket_T[1:], before_TL.double())
        _, layers, experts = self._counts_BLE.shape
        cell_TLK = (bucket_T[:, None, None] * layers + torch.arange(layers)[:, None]) * experts + ids_TLK
        self._counts_BLE += cell_TLK.flatten().bincount(minlength=self._counts_BLE.numel()).view_as(self._counts_BLE)

    def add_strings(self, string_T: Tensor, ids_TLK: Tensor) -> None:
        _, layers, experts = self._strings_VLE.shape
        cell_TLK = (string_T[:, None, None] * layers + torch.arange(layers)[:, None]) * experts + ids_TLK
        ones = torch.ones(cell_TLK.numel(), dtype=torch.int32)
        self._strings_VLE.view(-1).index_add_(0, cell_TLK.flatten(), ones)

    def done(self) -> Measured:
        stats = [one for one in self._stats if one is not None]
        assert len(stats) == len(self._stats), "every domain has tokens"
        return Measured(
            domains=tuple(stats),
            confidence_NL=self._confidence_NL,
            document_sum_NLE=self._document_sum_NLE,
            first_LE=self._first_LE,
            bucket_start_B=self.starts_B.numpy(),
            bucket_tokens_B=self._tokens_B,
            bucket_counts_BLE=self._counts_BLE,
            bucket_confidence_BL=self._confidence_BL,
            bucket_to_document_BL=self._to_document_BL,
            bucket_to_previous_BL=self._to_previous_BL,
            token_counts_VLE=self._strings_VLE[:-1],
            top_documents_RLE=self._top_documents_RLE,
            top_means_RLE=self._top_means_RLE,
        )
