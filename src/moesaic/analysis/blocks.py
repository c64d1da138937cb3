"""The tokens of a sample a few thousand at a time: whole documents of one domain, with their probabilities.

Letters: T tokens of the block, L MoE layers, E experts.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor

from moesaic.analysis.documents import Sample
from moesaic.routing.capture import Scoring

BLOCK_TOKENS = 4096


@dataclass(frozen=True, kw_only=True)
class Block:
    """Consecutive documents of one domain."""

    domain: int
    first_document: int
    last_document: int
    """One past the last."""
    start: int
    stop: int
    """Tokens."""


def blocks(sample: Sample, size: int = BLOCK_TOKENS) -> Iterator[Block]:
    """All documents in order; a block has about `size` tokens, and at least one document."""
    start_D1, domain_D = sample.start_D1.tolist(), sample.domain_D.tolist()
    first = 0
    for document in range(len(domain_D)):
        last = document + 1
        full = start_D1[last] - start_D1[first] >= size
        if last == len(domain_D) or full or domain_D[last] != domain_D[first]:
            yield Block(
                domain=domain_D[first],
                first_document=first,
                last_document=last,
                start=start_D1[first],
                stop=start_D1[last],
            )
            first = last


def router_probabilities(
    logits_TLE: Float[ndarray, "tokens layers experts"], scoring: Scoring
) -> Float[Tensor, "tokens layers experts"]:
    """The routers' probabilities in fp32: softmax over all experts, or sigmoid scores over their sum."""
    wide_TLE = torch.from_numpy(logits_TLE).float()
    if scoring == "softmax":
        return wide_TLE.softmax(dim=-1)
    scores_TLE = wide_TLE.sigmoid_()
    # Half precision has no smaller number; a token whose scores are all zero has no preference.
    scores_TLE.clamp_min_(torch.finfo(torch.float32).tiny)
    return scores_TLE / scores_TLE.sum(dim=-1, keepdim=True)
