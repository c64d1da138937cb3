"""What clusters and experts are about: documents, tokens near the centre, token strings, experts used together; and
documents to read, with the routing of every token.

Letters: T tokens, D documents, R tokens of the reader, N domains, C clusters, L MoE layers, E experts, K active, V
frequent token strings.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

from moesaic.analysis.capture import Capture
from moesaic.analysis.clusters import TokenClusters, concentration, cross_table, mutual_information, purity
from moesaic.analysis.documents import Sample, Vocabulary, token_strings
from moesaic.analysis.inspection import (
    CentralToken,
    Cluster,
    Clustering,
    CoExpert,
    Document,
    ExpertCard,
    FirstToken,
    RankedDocument,
    Reader,
    Share,
)
from moesaic.analysis.measure import Measured

RANKED_DOCUMENTS = 10
NEAREST_TOKENS = 12
TOKEN_STRINGS = 10
CO_EXPERTS = 5
READER_TOKENS = 25_000
_CONTEXT_TOKENS = 8
_OPENING_CHARACTERS = 100


@dataclass(frozen=True, kw_only=True, eq=False)
class Source:
    """What descriptions are made from."""

    sample: Sample
    vocabulary: Vocabulary
    string: Callable[[int], str]
    """Token id -> text."""


def describe_clusters(source: Source, found: TokenClusters, *, seed: int) -> Clustering:
    """The clusters in words and numbers."""
    sample, vocabulary, clusters = source.sample, source.vocabulary, found.clusters
    number = len(clusters.centres_CP)
    document_T = sample.document_T
    domain_T = sample.domain_D[document_T]
    table_DC = cross_table(document_T, clusters.cluster_T, len(sample.documents), number)
    domains_CN = cross_table(clusters.cluster_T, domain_T, number, len(sample.domains))
    shuffled_T = np.random.default_rng(seed).permutation(clusters.cluster_T)
    chance_DC = cross_table(document_T, shuffled_T, len(sample.documents), number)
    strings_VC = cross_table(vocabulary.index_T, clusters.cluster_T, len(vocabulary.ids_V) + 1, number)[:-1]
    return Clustering(
        clusters=tuple(
            Cluster(
                tokens=int(domains_CN[index].sum()),
                domains=tuple(domains_CN[index].tolist()),
                purity=purity(domains_CN[index : index + 1]),
                documents=_ranked(table_DC[:, index], table_DC.sum(axis=1)),
                nearest=_nearest(source, index, found),
                frequent=characteristic(source, strings_VC[:, index], float(domains_CN[index].sum() / sample.tokens)),
            )
            for index in range(number)
        ),
        features=len(found.components.mean_F),
        components=found.components.axes_FP.shape[1],
        variance_kept=found.components.variance_kept,
        iterations=clusters.iterations,
        cosine=float(clusters.cosine_T.mean(dtype=np.float64)),
        purity=purity(domains_CN),
        nmi=mutual_information(clusters.cluster_T, domain_T),
        silhouette=found.silhouette,
        silhouette_tokens=found.silhouette_tokens,
        concentration=float(concentration(table_DC).mean()),
        concentration_by_chance=float(concentration(chance_DC).mean()),
    )


def describe_first_token(
    sample: Sample, cluster_T: Int[ndarray, " tokens"], cosine_to_rest: Sequence[float]
) -> FirstToken:
    """Whether first tokens have a cluster of their own (EMO, appendix D); `cluster_T` is -1 without clusters."""
    first_T, second_T = sample.position_T == 0, sample.position_T == 1
    mean = sum(cosine_to_rest) / len(cosine_to_rest)
    alike = f"routing of first tokens has a cosine of {mean:.2f} with that of all others, in the mean over layers"
    if cluster_T.min() < 0:
        return FirstToken(
            cluster=None,
            first_in_cluster=0.0,
            second_in_cluster=0.0,
            cluster_is_first=0.0,
            cosine_to_rest=tuple(cosine_to_rest),
            sentence=alike,
        )
    main = int(np.bincount(cluster_T[first_T]).argmax())
    inside_T = cluster_T == main
    first, is_first = float(inside_T[first_T].mean()), float(first_T[inside_T].mean())
    second = float(inside_T[second_T].mean()) if second_T.any() else 0.0
    return FirstToken(
        cluster=main,
        first_in_cluster=first,
        second_in_cluster=second,
        cluster_is_first=is_first,
        cosine_to_rest=tuple(cosine_to_rest),
        sentence=f"{first:.0%} of the first tokens and {second:.0%} of the second ones are in cluster {main}, of which "
        f"{is_first:.0%} are first tokens; {alike}",
    )


def describe_documents(sample: Sample, cluster_T: Int[ndarray, " tokens"]) -> tuple[Document, ...]:
    """Every document, with the cluster of most of its tokens."""
    has_clusters = bool(cluster_T.min() >= 0)
    number = int(cluster_T.max()) + 1 if has_clusters else 1
    table_DC = cross_table(sample.document_T, cluster_T.clip(min=0), len(sample.documents), number)
    main_D, share_D = table_DC.argmax(axis=1), concentration(table_DC)
    return tuple(
        Document(
            domain=int(sample.domain_D[index]),
            tokens=len(text.ids),
            source=text.source,
            opening=text.text[:_OPENING_CHARACTERS],
            cluster=int(main_D[index]) if has_clusters else -1,
            concentration=float(share_D[index]) if has_clusters else 0.0,
        )
        for index, text in enumerate(sample.documents)
    )


def describe_experts(
    source: Source,
    measured: Measured,
    layers: Sequence[int],
    counts_LE: Int[ndarray, "layers experts"],
    pairs_LEE: Int[ndarray, "layers experts experts"],
) -> tuple[ExpertCard, ...]:
    """A card for every expert of every layer."""
    tokens = source.sample.tokens
    strings_VLE = measured.token_counts_VLE[:-1].numpy()
    documents_RLE, means_RLE = measured.top_documents_RLE.numpy(), measured.top_means_RLE.numpy()
    return tuple(
        ExpertCard(
            layer=layer,
            expert=expert,
            documents=tuple(
                RankedDocument(document=int(document), share=float(mean))
                for document, mean in zip(documents_RLE[:, row, expert], means_RLE[:, row, expert], strict=True)
                if document >= 0
            ),
            tokens=characteristic(
                source, strings_VLE[:, row, expert], max(float(counts_LE[row, expert]), 1.0) / tokens
            ),
            experts=co_experts(pairs_LEE[row], expert, tokens),
        )
        for row, layer in enumerate(layers)
        for expert in range(counts_LE.shape[1])
    )


def co_experts(pairs_EE: Int[ndarray, "experts experts"], expert: int, tokens: int) -> tuple[CoExpert, ...]:
    """The experts that most of an expert's tokens also select, most first."""
    own = pairs_EE[expert, expert]
    others_E = pairs_EE[expert].copy()
    others_E[expert] = 0
    best = np.argsort(-others_E, kind="stable")[:CO_EXPERTS]
    return tuple(
        CoExpert(
            expert=int(other),
            share=float(others_E[other] / own),
            lift=float(others_E[other] * tokens / (own * pairs_EE[other, other])),
        )
        for other in best
        if others_E[other]
    )


def _ranked(tokens_D: Int[ndarray, " documents"], lengths_D: Int[ndarray, " documents"]) -> tuple[RankedDocument, ...]:
    """Documents by the share of their tokens, then by their number of tokens."""
    share_D = tokens_D / lengths_D
    best = np.lexsort((-tokens_D, -share_D))[:RANKED_DOCUMENTS]
    return tuple(RankedDocument(document=int(one), share=float(share_D[one])) for one in best if tokens_D[one])


def _nearest(source: Source, cluster: int, found: TokenClusters) -> tuple[CentralToken, ...]:
    """The tokens nearest the centre, one per document."""
    sample = source.sample
    member_M = np.flatnonzero(found.clusters.cluster_T == cluster)
    cosine_M: Float[ndarray, " members"] = found.clusters.cosine_T[member_M]
    order_M = member_M[np.argsort(-cosine_M, kind="stable")]
    document_M = np.searchsorted(sample.start_D1, order_M, side="right") - 1
    _, first = np.unique(document_M, return_index=True)
    chosen = order_M[np.sort(first)[:NEAREST_TOKENS]]
    return tuple(_central(source, int(token), float(found.clusters.cosine_T[token])) for token in chosen)


def _central(source: Source, token: int, similarity: float) -> CentralToken:
    sample = source.sample
    document = int(np.searchsorted(sample.start_D1, token, side="right") - 1)
    position = token - int(sample.start_D1[document])
    pieces = token_strings(sample.documents[document], source.string)
    return CentralToken(
        document=document,
        position=position,
        before="".join(pieces[max(0, position - _CONTEXT_TOKENS) : position]),
        text=pieces[position],
        after="".join(pieces[position + 1 : position + 1 + _CONTEXT_TOKENS]),
        similarity=similarity,
    )


def characteristic(source: Source, counts_V: Int[ndarray, " vocabulary"], expected: float) -> tuple[Share, ...]:
    """The strings that go somewhere (an expert, a cluster) more than others, most characteristic first.

    `counts_V` is how often each went there, `expected` the share of all tokens that did. Ranked by
    n * log(share / expected): how many, times how much more often. Strings at or below the expected share are left out.
    """
    vocabulary = source.vocabulary
    share_V = counts_V / vocabulary.counts_V
    with np.errstate(divide="ignore", invalid="ignore"):
        score_V: Float[ndarray, " vocabulary"] = counts_V * np.log(share_V / expected)
    score_V = np.where(share_V > expected, score_V, 0.0)
    best = np.argsort(-score_V, kind="stable")[:TOKEN_STRINGS]
    return tuple(
        Share(name=source.string(int(vocabulary.ids_V[index])), count=int(counts_V[index]), share=float(share_V[index]))
        for index in best
        if score_V[index] > 0
    )


def make_reader(
    source: Source, capture: Capture, cluster_T: Int[ndarray, " tokens"], clusters: Iterable[Cluster]
) -> Reader:
    """A random sample of at least `READER_TOKENS` (all documents where there are fewer), then what clusters rank."""
    sample = source.sample
    drawn = first_documents(sample, READER_TOKENS)
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
