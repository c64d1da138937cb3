"""From a capture to an `Inspection`: the passes over the tokens, and what is made of them."""

from pathlib import Path
from typing import Any, cast

import numpy as np

from moesaic.analysis.capture import Capture
from moesaic.analysis.clusters import TokenClusters, cluster_tokens
from moesaic.analysis.derive import cosine, derive, first_token_cosine
from moesaic.analysis.describe import (
    Source,
    describe_clusters,
    describe_documents,
    describe_experts,
    describe_first_token,
)
from moesaic.analysis.documents import Sample
from moesaic.analysis.health import RULE, layer_verdict, model_verdict
from moesaic.analysis.inspection import DataFacts, Inspection, ModelFacts, Statistics, Verdict, level_name
from moesaic.analysis.measure import measure
from moesaic.analysis.reading import make_reader
from moesaic.analysis.vocabulary import frequent_tokens, string_of
from moesaic.routing.capture import Scoring


def assemble(
    capture: Capture,
    sample: Sample,
    model: ModelFacts,
    data: DataFacts,
    tokenizer: Any,
    *,
    scratch: Path,
    clusters: int,
    versions: dict[str, str],
    quiet: bool = True,
) -> Inspection:
    """Measure, cluster and describe one model's capture; `scratch` is a file that is made and removed."""
    scoring = cast(Scoring, model.scoring)
    source = Source(sample=sample, vocabulary=frequent_tokens(sample.ids_T), string=string_of(tokenizer))
    measured = measure(capture, sample, scoring, source.vocabulary, document_tokens=data.document_tokens, quiet=quiet)
    numbers = derive(measured, sample, active=model.top_k, groups=model.groups)
    mean_F = numbers["mass_SLE"][0].reshape(-1)
    found = cluster_tokens(capture, scoring, mean_F, scratch, clusters=clusters, seed=data.seed, quiet=quiet)
    clustering = describe_clusters(source, found, seed=data.seed) if isinstance(found, TokenClusters) else None
    statistics = Statistics(**numbers, **_cluster_numbers(found, sample, model))
    cluster_T = statistics.token_cluster_T
    verdicts = _verdicts(statistics, model)
    return Inspection(
        model=model,
        data=data,
        verdict=model_verdict(verdicts),
        verdicts=verdicts,
        rule=RULE,
        clustering=clustering,
        why_no_clusters=found if isinstance(found, str) else "",
        first_token=describe_first_token(sample, cluster_T, first_token_cosine(measured)),
        versions=versions,
        documents=describe_documents(sample, cluster_T),
        experts=describe_experts(source, measured, model.layers, statistics.counts_SLE[0], statistics.pairs_LEE),
        statistics=statistics,
        reader=make_reader(source, capture, cluster_T, clustering.clusters if clustering else ()),
    )


def _cluster_numbers(found: TokenClusters | str, sample: Sample, model: ModelFacts) -> dict[str, np.ndarray]:
    if isinstance(found, str):
        return {
            "cluster_mass_CLE": np.zeros((0, len(model.layers), model.num_experts)),
            "cluster_cosine_CC": np.zeros((0, 0)),
            "token_cluster_T": np.full(sample.tokens, -1, dtype=np.int16),
        }
    return {
        "cluster_mass_CLE": found.mass_CLE,
        "cluster_cosine_CC": cosine(found.clusters.centres_CP),
        "token_cluster_T": found.clusters.cluster_T,
    }


def _verdicts(statistics: Statistics, model: ModelFacts) -> tuple[Verdict, ...]:
    return tuple(
        layer_verdict(layer, level_name(statistics.level_SL[0, row]), statistics.load_SLE[0, row], model.top_k)
        for row, layer in enumerate(model.layers)
    )
