"""One inspected model for the page: all statistics, and of the reader as many layers as fit."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from moesaic.analysis.inspection import Clustering, ExpertCard, Inspection, Reader, Statistics, level_name
from moesaic.reporting.packing import fold, indices, pack, quantise, size


def inspected_models(inspection: Inspection) -> Iterator[Inspection]:
    """The model, and then the one that it was inspected against."""
    yield inspection
    if inspection.against is not None:
        yield inspection.against


def model_payload(inspection: Inspection, name: str) -> dict[str, Any]:
    """The model under the name that the page gives it, all but its reader."""
    data = inspection.data
    return {
        "name": name,
        "model": {key: value for key, value in asdict(inspection.model).items() if key != "groups"},
        "data": asdict(data),
        "scopes": inspection.scopes,
        "verdict": asdict(inspection.verdict),
        "verdicts": [asdict(verdict) for verdict in inspection.verdicts],
        "rule": inspection.rule,
        "versions": inspection.versions,
        "health": _health(inspection.statistics),
        "load": quantise(inspection.statistics.load_SLE, bits=16),
        "mass": quantise(inspection.statistics.mass_SLE, bits=16),
        "similarity": {
            "layers": quantise(inspection.statistics.similarity_LNN, bits=16),
            "all": inspection.statistics.similarity_NN,
        },
        "clusters": _clusters(inspection),
        "why_no_clusters": inspection.why_no_clusters,
        "documents": fold(_documents(inspection)),
        "experts": fold([_card(card) for card in inspection.experts]),
        "position": _position(inspection),
    }


def _health(statistics: Statistics) -> dict[str, Any]:
    """Per scope and layer, what the page shows of how the experts are used."""
    return {
        "entropy": statistics.entropy_SL,
        "largest": statistics.largest_SL,
        "two_busiest": statistics.two_busiest_SL,
        "dead": statistics.dead_SL,
        "effective": statistics.effective_SL,
        "coselection": statistics.coselection_SL,
        "confidence": statistics.confidence_SL,
        "uncertainty": statistics.uncertainty_SL,
        "level": [[level_name(level) for level in row] for row in statistics.level_SL],
    }


def _clusters(inspection: Inspection) -> dict[str, Any] | None:
    clustering: Clustering | None = inspection.clustering
    if clustering is None:
        return None
    facts = {key: value for key, value in asdict(clustering).items() if key != "clusters"}
    return facts | {
        "list": fold([asdict(cluster) for cluster in clustering.clusters]),
        "sizes": [cluster.tokens for cluster in clustering.clusters],
        "mass": quantise(inspection.statistics.cluster_mass_CLE),
        "cosine": np.round(inspection.statistics.cluster_cosine_CC, 3),
    }


def _documents(inspection: Inspection) -> dict[str, Any]:
    """The documents that some view names, by their index in the sample."""
    named = set(inspection.reader.documents)
    for cluster in inspection.clustering.clusters if inspection.clustering else ():
        named.update(ranked.document for ranked in cluster.documents)
        named.update(token.document for token in cluster.nearest)
    for card in inspection.experts:
        named.update(ranked.document for ranked in card.documents)
    return {str(index): asdict(inspection.documents[index]) for index in sorted(named)}


def _card(card: ExpertCard) -> list[Any]:
    """A card without the names of its keys, of which there may be thousands; `experts.js` reads it."""
    return [
        [[ranked.document, round(ranked.share, 4)] for ranked in card.documents],
        [[token.name, token.count, round(token.share, 4)] for token in card.tokens],
        [[other.expert, round(other.share, 4), round(other.lift, 3)] for other in card.experts],
    ]


def _position(inspection: Inspection) -> dict[str, Any]:
    statistics = inspection.statistics
    return {
        "first_token": asdict(inspection.first_token),
        "start": statistics.bucket_start_B,
        "tokens": statistics.bucket_tokens_B,
        "confidence": statistics.position_confidence_BL,
        "entropy": statistics.position_entropy_BL,
        "to_document": statistics.position_to_document_BL,
        "to_previous": statistics.position_to_previous_BL,
    }


def reader_payload(reader: Reader, most_bytes: int) -> dict[str, Any]:
    """The reader's texts with their clusters, and the routing of as many layers as fit, but one at least."""
    texts = {
        "documents": reader.documents,
        "sampled": reader.sampled,
        "first": pack(np.asarray(reader.first_token_D1).astype(np.int32)),
        "tokens": len(reader.string_R),
        "strings": fold(reader.strings),
        "string": pack(np.asarray(reader.string_R).astype(np.int32)),
        "cluster": pack(np.asarray(reader.cluster_R).astype(np.int32)),
    }
    count = reader.ids_RLK.shape[1]
    sample = [size(_layer(reader, layer)) for layer in sorted({0, count // 2, count - 1})]
    fitting = max(1, int((most_bytes - size(texts)) / (1.05 * max(sample))))
    chosen = spread(count, fitting)
    return texts | {"layers": chosen, "routing": [_layer(reader, layer) for layer in chosen]}


def _layer(reader: Reader, layer: int) -> dict[str, Any]:
    return {
        "ids": indices(reader.ids_RLK[:, layer]),
        "weights": quantise(reader.weights_RLK[:, layer]),
    }


def spread(count: int, most: int) -> Sequence[int]:
    """At most `most` of `count` layers, evenly spread, the last among them (and the first where two fit)."""
    if most >= count:
        return range(count)
    if most == 1:
        return [count - 1]
    return [round(index * (count - 1) / (most - 1)) for index in range(most)]
