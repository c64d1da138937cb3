"""Documents to read, with the routing of every token.

Letters: D reader documents, R their tokens, L MoE layers, K active experts.
"""

from collections.abc import Iterable

import numpy as np
from jaxtyping import Int
from numpy import ndarray

from moesaic.analysis.capture import Capture
from moesaic.analysis.describe import Source
from moesaic.analysis.documents import Sample, token_strings
from moesaic.analysis.inspection import Cluster, Reader

SAMPLED_TOKENS = 25_000


def make_reader(
    source: Source, capture: Capture, cluster_T: Int[ndarray, " tokens"], clusters: Iterable[Cluster]
) -> Reader:
    """A random sample of at least `SAMPLED_TOKENS` (all documents where there are fewer), then what clusters rank."""
    sample = source.sample
    drawn = first_documents(sample, SAMPLED_TOKENS)
    ranked = [one.document for cluster in clusters for one in cluster.documents]
    documents = list(dict.fromkeys([*drawn, *ranked]))
    spans = [(int(sample.start_D1[one]), int(sample.start_D1[one + 1])) for one in documents]
    ids_RLK = np.concatenate([capture.ids.read(*span) for span in spans])
    weights_RLK = np.concatenate([capture.weights.read(*span) for span in spans])
    order_RLK = np.argsort(-weights_RLK, axis=-1, kind="stable")
    table: dict[str, int] = {}
    string_R = [
        table.setdefault(piece, len(table))
        for document in documents
        for piece in token_strings(sample.documents[document], source.string)
    ]
    return Reader(
        documents=tuple(documents),
        sampled=len(drawn),
        strings=tuple(table),
        first_token_D1=np.cumsum([0, *(stop - start for start, stop in spans)]),
        string_R=np.array(string_R, dtype=np.uint32),
        cluster_R=np.concatenate([cluster_T[start:stop] for start, stop in spans]),
        ids_RLK=np.take_along_axis(ids_RLK, order_RLK, axis=-1),
        weights_RLK=np.take_along_axis(weights_RLK, order_RLK, axis=-1),
    )


def first_documents(sample: Sample, tokens: int) -> list[int]:
    """The first documents of the draw that together have so many tokens, or all."""
    order = sorted(range(len(sample.documents)), key=lambda document: sample.documents[document].place)
    reached = np.cumsum([len(sample.documents[document].ids) for document in order])
    return order[: int(np.searchsorted(reached, tokens)) + 1]
