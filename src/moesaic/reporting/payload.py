"""What the page shows of each input, as plain values: inspections, training runs, results of evaluations."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from moesaic.analysis.inspection import ExpertCard, Inspection, Reader, level_name
from moesaic.checkpoint.metrics import METRICS_FILE, Step, Validation, read_metrics
from moesaic.checkpoint.results import read_results
from moesaic.common.errors import MoesaicError
from moesaic.common.yaml_text import read_yaml
from moesaic.reporting.page import fold, indices, pack, quantise, size

RECIPE_FILE = "recipe.yaml"

_POINTS = 600  # of a curve: more than a screen can show
_NUMBERS = (
    "loss",
    "balance_loss",
    "router_z_loss",
    "lm_z_loss",
    "load_entropy",
    "largest_share",
    "dead_experts",
    "grad_norm",
    "lr",
)
_OF_A_TASK = (
    "title",
    "metric",
    "higher_is_better",
    "score",
    "standard_error",
    "shots",
    "samples",
    "chance",
    "parts",
    "missing_parts",
    "text",
)
_HEALTH = ("entropy", "largest", "two_busiest", "dead", "effective", "coselection", "confidence", "uncertainty")
"""What the page shows of how the experts are used: fields of `Statistics` without their suffix."""


def inspected_models(inspection: Inspection) -> Iterator[Inspection]:
    """The model, and then the one that it was inspected against."""
    yield inspection
    if inspection.against is not None:
        yield inspection.against


def model_payload(inspection: Inspection, name: str) -> dict[str, Any]:
    """The model under the name that the page gives it, all but its reader."""
    statistics = inspection.statistics
    return {
        "name": name,
        "model": {key: value for key, value in asdict(inspection.model).items() if key != "groups"},
        "data": asdict(inspection.data),
        "scopes": inspection.scopes,
        "verdict": asdict(inspection.verdict),
        "verdicts": [asdict(verdict) for verdict in inspection.verdicts],
        "rule": inspection.rule,
        "versions": inspection.versions,
        "health": {
            **{name: getattr(statistics, f"{name}_SL") for name in _HEALTH},
            "level": [[level_name(level) for level in row] for row in statistics.level_SL],
        },
        "load": quantise(statistics.load_SLE, bits=16),
        "mass": quantise(statistics.mass_SLE, bits=16),
        "similarity": {"layers": quantise(statistics.similarity_LNN, bits=16), "all": statistics.similarity_NN},
        "clusters": _clusters(inspection),
        "why_no_clusters": inspection.why_no_clusters,
        "documents": fold(_documents(inspection)),
        "experts": fold([_card(card) for card in inspection.experts]),
        "position": _position(inspection),
    }


def _clusters(inspection: Inspection) -> dict[str, Any] | None:
    clustering = inspection.clustering
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


def read_run(folder: Path, name: str) -> dict[str, Any]:
    """One training run: curves of its steps (means over neighbours where there are many) and its validations.

    Raises:
        MoesaicError: metrics.jsonl has no step, or a line that `moesaic train` did not write; names line and key.
    """
    lines = list(read_metrics(folder / METRICS_FILE))
    steps = [line for line in lines if isinstance(line, Step)]
    validations = [line for line in lines if isinstance(line, Validation)]
    if not steps:
        raise MoesaicError(f"{folder / METRICS_FILE}: has no step yet; report on it when the run has made some")
    size = math.ceil(len(steps) / _POINTS)
    points = [steps[start : start + size] for start in range(0, len(steps), size)]
    measured = [one.validation for one in validations]
    losses = _columns([{domain: found.loss for domain, found in one.items()} for one in measured])
    errors = _columns([{domain: _number(found.standard_error) for domain, found in one.items()} for one in measured])
    return {
        "name": name,
        "folder": str(folder),
        "recipe": _recipe(folder / RECIPE_FILE),
        "steps": steps[-1].step,
        "tokens": steps[-1].tokens,
        "seconds": math.fsum(step.timing.seconds for step in steps),
        "mean_over": size,
        "at": {"steps": [point[-1].step for point in points], "tokens": [point[-1].tokens for point in points]},
        "curves": _means(_columns([_curves(step) for step in steps]), size),
        "domain_loss": _means(_columns([step.domain_loss for step in steps]), size),
        "validation": {
            "steps": [one.step for one in validations],
            "tokens": [one.tokens for one in validations],
            "domains": {domain: {"loss": loss, "error": errors[domain]} for domain, loss in losses.items()},
        },
    }


def _curves(step: Step) -> dict[str, float]:
    values = {name: getattr(step, name) for name in _NUMBERS} | {"tokens_per_second": step.timing.tokens_per_second}
    return {name: float(value) for name, value in values.items() if value is not None}


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _columns(rows: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """Each name's number in every row, in the order of its first; NaN where a row has none."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name, math.nan) for row in rows] for name in names}


def _means(columns: Mapping[str, list[float]], size: int) -> dict[str, list[float]]:
    """Means over `size` neighbours each, the last one over fewer, of the numbers that are there."""
    return {
        name: [_mean(values[start : start + size]) for start in range(0, len(values), size)]
        for name, values in columns.items()
    }


def _mean(values: list[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return math.fsum(known) / len(known) if known else math.nan


def _recipe(file: Path) -> dict[str, str]:
    """The recipe as flat keys and their values in words; empty where there is none."""
    if not file.exists():
        return {}
    return dict(_flat(read_yaml(file), ""))


def _flat(value: Mapping[Any, Any], prefix: str) -> Iterable[tuple[str, str]]:
    for key, item in value.items():
        name = f"{prefix}{key}"
        if isinstance(item, Mapping) and item:
            yield from _flat(item, f"{name}.")
        elif isinstance(item, list) and item and all(isinstance(entry, Mapping) for entry in item):
            yield name, ", ".join(str(entry.get("domain") or entry.get("path") or "?") for entry in item)
        else:
            yield name, "none" if item is None else str(item)


def results_payload(path: Path) -> dict[str, Any]:
    """One results file, without what only a repetition needs.

    Raises:
        MoesaicError: not a results file, or a damaged one.
    """
    document = read_results(path)
    checkpoint = document["checkpoint"]
    return {
        "file": str(path),
        "checkpoint": {key: checkpoint[key] for key in ("name", "revision", "model_type")},
        "model": checkpoint["full_model"],
        "settings": document["settings"],
        "suites": document["suites"],
        "tasks": {name: _task(task, checkpoint) for name, task in document["tasks"].items()},
        "missing": document["missing"],
        "averages": document["averages"],
    }


def _task(task: Mapping[str, Any], checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    return {key: task.get(key) for key in _OF_A_TASK} | {"kept": _kept_share(task.get("selection"), checkpoint)}


def _kept_share(selection: Mapping[str, Any] | None, checkpoint: Mapping[str, Any]) -> float | None:
    """Share of the full model's routed experts that were used; None of a dense model."""
    experts = checkpoint["experts"]
    if experts is None:
        return None
    share = experts["kept"] / experts["of"]
    if selection is None:
        return share
    kept = selection["kept"]
    mean = sum(kept) / len(kept) if isinstance(kept, list) else kept
    return share * mean / selection["of"]
