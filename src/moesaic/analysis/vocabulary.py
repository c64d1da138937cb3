"""The token strings of a sample that are frequent enough to say something about."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int, UInt
from numpy import ndarray

from moesaic.analysis.inspection import Share

MOST_TOKENS = 8192
LEAST_OCCURRENCES = 5
_BROKEN = "\ufffd"


@dataclass(frozen=True, kw_only=True, eq=False)
class Vocabulary:
    """The most frequent token ids of a sample, and which of them each token is."""

    ids_V: Int[ndarray, " vocabulary"]
    counts_V: Int[ndarray, " vocabulary"]
    """Occurrences in the sample."""
    index_T: Int[ndarray, " tokens"]
    """Index into `ids_V`; V for a token that is too rare."""


def frequent_tokens(ids_T: UInt[ndarray, " tokens"]) -> Vocabulary:
    """The ids with at least `LEAST_OCCURRENCES`, and no more than `MOST_TOKENS` of them: by frequency, then by id."""
    ids, inverse_T, counts = np.unique(ids_T, return_inverse=True, return_counts=True)
    order = np.lexsort((ids, -counts))
    kept = order[counts[order] >= LEAST_OCCURRENCES][:MOST_TOKENS]
    place = np.full(len(ids), len(kept), dtype=np.int64)
    place[kept] = np.arange(len(kept))
    return Vocabulary(ids_V=ids[kept].astype(np.int64), counts_V=counts[kept], index_T=place[inverse_T])


def characteristic(
    counts_V: Int[ndarray, " vocabulary"],
    vocabulary: Vocabulary,
    expected: float,
    string: Callable[[int], str],
    *,
    most: int,
) -> tuple[Share, ...]:
    """The strings that go somewhere (an expert, a cluster) more than others, most characteristic first.

    `counts_V` is how often each went there, `expected` the share of all tokens that did. Ranked by
    n * log(share / expected): how many, times how much more often. Strings at or below the expected share are left out.
    """
    share_V = counts_V / vocabulary.counts_V
    with np.errstate(divide="ignore", invalid="ignore"):
        score_V: Float[ndarray, " vocabulary"] = counts_V * np.log(share_V / expected)
    score_V = np.where(share_V > expected, score_V, 0.0)
    best = np.argsort(-score_V, kind="stable")[:most]
    return tuple(
        Share(name=string(int(vocabulary.ids_V[index])), count=int(counts_V[index]), share=float(share_V[index]))
        for index in best
        if score_V[index] > 0
    )


def string_of(tokenizer: Any) -> Callable[[int], str]:
    """Token id -> its text; for a part of a character the tokenizer's own spelling of its bytes."""
    known: dict[int, str] = {}

    def string(token: int) -> str:
        if token not in known:
            text = tokenizer.decode([token])
            spelled = str(tokenizer.convert_ids_to_tokens(token))
            known[token] = spelled if _BROKEN in text or not text else text
        return known[token]

    return string
