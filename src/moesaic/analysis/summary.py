"""An inspection in short: one JSON document. Torch-free."""

from itertools import pairwise
from typing import Any

import numpy as np

from moesaic.analysis.inspection import Inspection, level_name
from moesaic.common.recipe import recipe_values

LAYER_FIGURES = (
    "entropy",
    "effective",
    "largest",
    "two_busiest",
    "dead",
    "coselection",
    "confidence",
    "uncertainty",
)
"""Fields of `Statistics` without their suffix that there is one number of per scope and layer."""


def layer_rows(inspection: Inspection, scope: int = 0) -> list[dict[str, Any]]:
    """The health of every MoE layer, on all data or one domain."""
    statistics = inspection.statistics
    return [
        {
            "layer": layer,
            "level": level_name(statistics.level_SL[scope, row]),
            **{name: getattr(statistics, f"{name}_SL")[scope, row].item() for name in LAYER_FIGURES},
        }
        for row, layer in enumerate(inspection.model.layers)
    ]


def domain_experts(inspection: Inspection) -> list[dict[str, Any]]:
    """For each domain, the experts that are used most above what they are used on all data, best first."""
    load_SLE = inspection.statistics.load_SLE
    rows = []
    for index, domain in enumerate(inspection.data.domains):
        excess_LE = load_SLE[1 + index] - load_SLE[0]
        best = np.argsort(-excess_LE, axis=None, kind="stable")[:5]
        experts = [tuple(map(int, np.unravel_index(place, excess_LE.shape))) for place in best]
        rows.append(
            {
                "domain": domain.name,
                "experts": [
                    {
                        "layer": inspection.model.layers[layer],
                        "expert": expert,
                        "load": float(load_SLE[1 + index, layer, expert]),
                        "load_on_all": float(load_SLE[0, layer, expert]),
                    }
                    for layer, expert in experts
                    if excess_LE[layer, expert] > 0
                ],
            }
        )
    return rows


def distinctness(inspection: Inspection) -> dict[str, float | None]:
    """Mean cosine between different domains in the first and the last MoE layer and over all; None for one domain."""
    statistics = inspection.statistics
    different = ~np.eye(len(inspection.data.domains), dtype=bool)
    if not different.any():
        return {"first_layer": None, "last_layer": None, "all_layers": None}
    return {
        "first_layer": float(statistics.similarity_LNN[0][different].mean()),
        "last_layer": float(statistics.similarity_LNN[-1][different].mean()),
        "all_layers": float(statistics.similarity_NN[different].mean()),
    }


def bucket_names(starts: np.ndarray, document_tokens: int) -> list[str]:
    """Positions of each bucket, counted from 1: 1, 2, 3-4, 5-8, ..."""
    return [
        str(start + 1) if stop == start + 1 else f"{start + 1}-{stop}"
        for start, stop in pairwise([*starts.tolist(), document_tokens])
    ]


def summarise(inspection: Inspection) -> dict[str, Any]:
    """Everything that fits on a page, as plain values; `against` is the second model's."""
    clustering = inspection.clustering
    figures = None
    if clustering is not None:
        figures = {key: value for key, value in recipe_values(clustering).items() if key != "clusters"}
        figures["sizes"] = [cluster.tokens for cluster in clustering.clusters]
    return {
        "model": recipe_values(inspection.model),
        "data": recipe_values(inspection.data),
        "verdict": recipe_values(inspection.verdict),
        "rule": inspection.rule,
        "layers": layer_rows(inspection),
        "domains": {
            "similarity": inspection.statistics.similarity_NN.tolist(),
            "mean_similarity": distinctness(inspection),
            "experts": domain_experts(inspection),
        },
        "clustering": figures,
        "why_no_clusters": inspection.why_no_clusters,
        "first_token": recipe_values(inspection.first_token),
        "against": None if inspection.against is None else summarise(inspection.against),
    }
