"""What `moesaic inspect` finds out about one model on one data set. Torch-free.

Letters: L MoE layers, E routed experts, K active experts, N domains, S scopes (0 is all the data, 1 + n is domain n),
C clusters, B buckets of positions in a document, D documents, T tokens, R tokens of the reader.

A token's probabilities are its router's as the family defines them: softmax over all experts, or sigmoid scores over
their sum. A selection is one token using one expert; a token makes K of them per layer.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Float, Int, UInt
from numpy import ndarray

from moesaic.common.shown import Shown

Level = Literal["healthy", "skewed", "collapsed"]
LEVELS: tuple[Level, ...] = ("healthy", "skewed", "collapsed")
"""Verdicts, best first; arrays of levels hold an index into this."""


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """The model that was looked into."""

    name: str
    """As the user gave it."""
    revision: str | None
    model_type: str
    sample_hash: str
    """Of the weights, see `moesaic.families.identity.sample_hash`."""
    num_layers: int
    """Decoder layers, dense ones included."""
    layers: tuple[int, ...]
    """The MoE layers, by their index in the model; all arrays over L follow this order."""
    num_experts: int
    top_k: int
    num_shared_experts: int
    scoring: Literal["softmax", "sigmoid"]
    groups: tuple[tuple[int, ...], ...] | None
    """Group of each expert, per MoE layer; None where the model has none. Within-group co-selection is about these."""
    groups_are: str
    """What the groups are, in words; empty without groups."""


@dataclass(frozen=True, kw_only=True)
class DomainFacts:
    """One domain of the data."""

    name: str
    documents: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class DataFacts:
    """The tokens that it was looked into with."""

    sources: tuple[str, ...]
    domain_field: str | None
    """The field that names a record's domain; None where domains are the names of the files."""
    domains: tuple[DomainFacts, ...]
    documents: int
    tokens: int
    document_tokens: int
    """The first so many tokens of each document were used."""
    min_length: int
    max_length: int
    """Documents with fewer or more tokens than these were left out."""
    similarity_tokens: int | None = None
    """The first so many tokens of each document that the similarity of domains is of; None: all."""
    records: int
    """Records that were read; `documents` of them were used."""
    too_short: int
    too_long: int
    """Records left out for their length, of those that were tokenised on the way to the sample."""
    seed: int


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the load of the experts means, in plain words."""

    level: Level
    sentence: str
    """Such as "Layer 5 is collapsed: 2 of 8 experts take 96% of the selections."."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """Something counted, with its share of a whole that the field that holds it names."""

    name: str
    count: int
    share: float


@dataclass(frozen=True, kw_only=True)
class RankedDocument:
    """A document in a list, best first."""

    document: int
    """Index into `Inspection.documents`."""
    share: float
    """Clusters: share of the document's tokens in the cluster. Experts: the document's mean probability."""


@dataclass(frozen=True, kw_only=True)
class CentralToken:
    """A token near the centre of its cluster, with what stands around it."""

    document: int
    position: int
    """Counted from 0 in the document."""
    before: str
    text: str
    after: str
    similarity: float
    """Cosine with the centre."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Tokens that are routed alike. Clusters are ordered by size, largest first."""

    tokens: int
    domains: tuple[int, ...]
    """Tokens of each domain."""
    purity: float
    """Share of its tokens that the largest domain has."""
    documents: tuple[RankedDocument, ...]
    nearest: tuple[CentralToken, ...]
    frequent: tuple[Share, ...]
    """Token strings by how much more often they are here than elsewhere; `share` is of the string's occurrences."""


@dataclass(frozen=True, kw_only=True)
class Clustering:
    """Token clusters as in EMO, section 5.3."""

    clusters: tuple[Cluster, ...]
    features: int
    components: int
    """Principal components kept."""
    variance_kept: float
    iterations: int
    cosine: float
    """Mean cosine of a token with its centre."""
    purity: float
    nmi: float | None
    """Normalised mutual information with the domains; None with one domain."""
    silhouette: float | None
    """Mean cosine silhouette of `silhouette_tokens` sampled tokens; None where all of them are in one cluster."""
    silhouette_tokens: int
    concentration: float
    """Mean share of a document's tokens in its main cluster."""
    concentration_by_chance: float
    """The same with the clusters dealt to the tokens at random."""


@dataclass(frozen=True, kw_only=True)
class FirstToken:
    """EMO, appendix D: is the first token of a document routed in its own way?"""

    cluster: int | None
    """The cluster of most first tokens; None without clusters."""
    first_in_cluster: float
    """Share of the first tokens that are in it."""
    second_in_cluster: float
    """Share of the second tokens that are in it."""
    cluster_is_first: float
    """Share of its tokens that are first tokens."""
    cosine_to_rest: tuple[float, ...]
    """Per MoE layer: cosine of the mean probabilities of the first tokens and those of all others."""
    sentence: str


@dataclass(frozen=True, kw_only=True)
class CoExpert:
    """An expert that is selected together with another."""

    expert: int
    share: float
    """Share of the other's tokens that also select it."""
    lift: float
    """That share over the one expected if experts were chosen independently, each as often as it is."""


@dataclass(frozen=True, kw_only=True)
class ExpertCard:
    """Whom one expert serves. Its load and domains are in `Statistics.counts_SLE` (`load_SLE`)."""

    layer: int
    """Index of the layer in the model."""
    expert: int
    documents: tuple[RankedDocument, ...]
    tokens: tuple[Share, ...]
    """Token strings that go to it most of all; `share` is of the string's occurrences."""
    experts: tuple[CoExpert, ...]


@dataclass(frozen=True, kw_only=True)
class Document:
    """One document of the sample."""

    domain: int
    tokens: int
    """Tokens that were used."""
    source: str
    """Where it came from: file and line or row."""
    opening: str
    """Its first characters."""
    cluster: int
    """The cluster of most of its tokens; -1 without clusters."""
    concentration: float
    """Share of its tokens in that cluster."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Statistics:
    """All numbers over layers, experts, domains and positions (statistics.npz)."""

    counts_SLE: Int[ndarray, "scopes layers experts"]
    """Tokens that selected the expert."""
    load_SLE: Float[ndarray, "scopes layers experts"]
    """Share of the selections; sums to 1."""
    mass_SLE: Float[ndarray, "scopes layers experts"]
    """Mean probability over the tokens; sums to 1."""
    entropy_SL: Float[ndarray, "scopes layers"]
    """Entropy of the load over log E: 1 is even."""
    largest_SL: Float[ndarray, "scopes layers"]
    """Share of the selections that the busiest expert took."""
    two_busiest_SL: Float[ndarray, "scopes layers"]
    """Share that the two busiest took."""
    dead_SL: Int[ndarray, "scopes layers"]
    """Experts that no token selected."""
    effective_SL: Float[ndarray, "scopes layers"]
    """exp of the load's entropy: the number of equally busy experts that are as uneven."""
    coselection_SL: Float[ndarray, "scopes layers"]
    """Share of the pairs that a token selects together which lie in one group; NaN without groups or pairs."""
    confidence_SL: Float[ndarray, "scopes layers"]
    """Mean over the tokens of the largest probability."""
    uncertainty_SL: Float[ndarray, "scopes layers"]
    """Mean over the tokens of the entropy of their probabilities, over log E."""
    level_SL: Int[ndarray, "scopes layers"]
    """Verdict, an index into `LEVELS`."""
    pairs_LEE: Int[ndarray, "layers experts experts"]
    """Tokens that selected both experts; the diagonal is `counts_SLE[0]`."""
    probability_NLE: Float[ndarray, "domains layers experts"]
    """Mean probability per document, then per domain (EMO 5.3)."""
    similarity_LNN: Float[ndarray, "layers domains domains"]
    """Cosine between domains of `probability_NLE`, in each layer."""
    similarity_NN: Float[ndarray, "domains domains"]
    """The same over all layers at once."""
    bucket_start_B: Int[ndarray, " buckets"]
    """First position (from 0) of each bucket; the last one ends at `document_tokens`."""
    bucket_tokens_B: Int[ndarray, " buckets"]
    position_confidence_BL: Float[ndarray, "buckets layers"]
    """Mean of the largest probability."""
    position_entropy_BL: Float[ndarray, "buckets layers"]
    """Entropy of the load of the bucket's tokens over log E."""
    position_to_document_BL: Float[ndarray, "buckets layers"]
    """Mean cosine of a token's probabilities with the mean of its whole document."""
    position_to_previous_BL: Float[ndarray, "buckets layers"]
    """Mean cosine with the token before; NaN for the first bucket."""
    cluster_mass_CLE: Float[ndarray, "clusters layers experts"]
    """Mean probability over a cluster's tokens."""
    cluster_cosine_CC: Float[ndarray, "clusters clusters"]
    """Cosine between centres."""
    token_cluster_T: Int[ndarray, " tokens"]
    """Cluster of every token, documents one after the other; -1 without clusters."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Reader:
    """Documents to read with the routing of every token (reader.json, reader.npz).

    Of the documents, the first `sampled` are a random sample by the seed; the rest are those that clusters rank
    highest.
    """

    documents: tuple[int, ...]
    """Indices into `Inspection.documents`."""
    sampled: int
    strings: tuple[str, ...]
    """All different token strings. They are pieces of the text as it was: joined, they give the document back, except
    that a special token stands for itself. Empty: a further token of the character before."""
    first_token_D1: Int[ndarray, " documents_and_one"]
    """Where each reader document starts in the arrays over R; the last entry is R."""
    string_R: UInt[ndarray, " tokens"]
    """Index into `strings`."""
    cluster_R: Int[ndarray, " tokens"]
    """Cluster; -1 without clusters."""
    ids_RLK: UInt[ndarray, "tokens layers active"]
    """Selected experts, largest weight first."""
    weights_RLK: Float[ndarray, "tokens layers active"]
    """Their weights in the model, float16."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Inspection(Shown):
    """All of it, for one model; `against` is the same of the second model on the same documents."""

    model: ModelFacts
    data: DataFacts
    verdict: Verdict
    """Of the model: its worst layer's."""
    verdicts: tuple[Verdict, ...]
    """Per MoE layer, on all the data."""
    rule: str
    """How verdicts are made, in words."""
    clustering: Clustering | None
    """None where there are fewer tokens than clusters."""
    why_no_clusters: str
    """Empty where there are some."""
    first_token: FirstToken
    versions: dict[str, str]
    documents: tuple[Document, ...]
    experts: tuple[ExpertCard, ...]
    """By layer, then by expert."""
    statistics: Statistics
    reader: Reader
    against: "Inspection | None" = None

    @property
    def scopes(self) -> tuple[str, ...]:
        """Names of the scopes: "all", then the domains."""
        return ("all", *(domain.name for domain in self.data.domains))

    def lines(self) -> list[str]:
        """The summary, as `moesaic inspect` prints it."""
        from moesaic.analysis.summary import Screen, render  # which is above this module

        return render(self, Screen()).splitlines()

    def brief(self) -> str:
        """The verdict."""
        return f"{self.model.name}: {self.verdict.level}: {self.verdict.sentence}"

    def to_dict(self) -> dict[str, Any]:
        """The summary as plain values; the arrays are in `statistics` and `reader`."""
        from moesaic.analysis.summary import summarise

        return summarise(self)

    def rows(self) -> list[dict[str, Any]]:
        """The health of every MoE layer, on all data and on each domain."""
        from moesaic.analysis.summary import layer_rows

        return [
            {"scope": name, **row} for scope, name in enumerate(self.scopes) for row in layer_rows(self, scope=scope)
        ]


def level_name(index: int | np.integer) -> Level:
    """The verdict that an array's entry stands for."""
    return LEVELS[int(index)]
