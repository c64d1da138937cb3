"""Losses of an MoE with all and with some of its experts, chosen by each method on a few documents of a domain."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

import moesaic
from moesaic.data.dataset import ValidationSet
from moesaic.loading import load_tokenizer
from moesaic.routing.subset import Selection, save_selection
from moesaic.selection.recipe import Method
from moesaic.selection.statistics import load_statistics
from moesaic_lab.rows import Row
from moesaic_lab.tasks.losses import held_out_loss, held_out_sets
from moesaic_lab.writing import train_file


@dataclass(frozen=True, kw_only=True)
class Subsets:
    """Settings of the task."""

    checkpoint: str
    rows: str
    """File to write."""
    selections: str
    """Folder for selections and statistics."""
    domains: tuple[str, ...]
    sequence_length: int
    shares: tuple[float, ...]
    documents: tuple[int, ...]
    methods: tuple[Method, ...]
    calibration_tokens: int
    seed: int
    labels: dict[str, Any]
    check_extracted: bool = False
    """Also extract one subset and compare its logits with the masked model's, bit for bit."""


def run(settings: Subsets) -> Iterator[Row]:
    """One row per share, method, number of documents and domain; and how alike the domains route."""
    model = moesaic.load(settings.checkpoint, device="cpu")
    held_out = held_out_sets(
        settings.domains, load_tokenizer(settings.checkpoint), sequence_length=settings.sequence_length
    )
    common = {**settings.labels, "seed": settings.seed}
    for domain, one in held_out.items():
        yield {**common, "measure": "subset_loss", "share": 1.0, **_measured(model, one, domain)}
    last = None
    for domain, one in held_out.items():
        for selection, labels in _selections(settings, domain):
            with moesaic.restrict(model, selection):
                yield {**common, **labels, "measure": "subset_loss", **_measured(model, one, domain)}
            mass = selection.routing_mass_kept
            if mass is not None:
                yield {**common, **labels, "measure": "mass_kept", "domain": domain, "value": float(np.mean(mass))}
            last = selection
    yield from ({**common, **row} for row in _similarities(settings))
    if settings.check_extracted and last is not None:
        value = _extracted_difference(settings, model, last, next(iter(held_out.values())))
        yield common | {"measure": "restrict_minus_extracted", "value": value}


def _measured(model: PreTrainedModel, held_out: ValidationSet, domain: str) -> Row:
    loss = held_out_loss(model, held_out)
    return {"domain": domain, "value": loss.loss, "standard_error": loss.standard_error}


def _selections(settings: Subsets, domain: str) -> Iterator[tuple[Selection, Mapping[str, Any]]]:
    """Every selection for one domain; one pass over the calibration documents serves all methods and shares."""
    for number in settings.documents:
        statistics = Path(settings.selections) / f"{domain}-{number}.stats.json"
        for method in settings.methods:
            if method == "random" and number != settings.documents[0]:
                continue  # it does not look at documents
            for share in settings.shares:
                data = None if statistics.exists() else train_file(domain)
                selection = moesaic.select(
                    settings.checkpoint,
                    keep=f"{100 * share:g}%",
                    method=method,
                    data=data,
                    stats=() if data else (statistics,),
                    stats_out=statistics if data else None,
                    examples=number if data else None,
                    max_tokens=settings.calibration_tokens,
                    seed=settings.seed,
                )
                if method == "router":
                    save_selection(selection, selection_file(settings.selections, domain, number, share))
                labels = {"method": method, "share": share, "documents": None if method == "random" else number}
                yield selection, labels


def selection_file(folder: str, domain: str, documents: int, share: float) -> Path:
    """Where the selection by `router` is kept, for `extract`."""
    return Path(folder) / f"{domain}-{documents}-{100 * share:g}.json"


def _similarities(settings: Subsets) -> Iterator[Row]:
    """Cosine of the domains' mean router probabilities, per layer: the mean over pairs, from the most documents."""
    number = max(settings.documents)
    folder = Path(settings.selections)
    means_DLE = np.array(
        [load_statistics(folder / f"{domain}-{number}.stats.json").probability_LE for domain in settings.domains]
    )
    unit_DLE = means_DLE / np.linalg.norm(means_DLE, axis=-1, keepdims=True)
    for layer in range(unit_DLE.shape[1]):
        cosine_DD = unit_DLE[:, layer] @ unit_DLE[:, layer].T
        value = float(cosine_DD[np.triu_indices(len(cosine_DD), k=1)].mean())
        yield {"measure": "domain_similarity", "layer": layer, "value": value}


@torch.no_grad()
def _extracted_difference(
    settings: Subsets, model: PreTrainedModel, selection: Selection, held_out: ValidationSet
) -> float:
    """Largest difference of logits between the masked model and the extracted checkpoint; 0 is bit for bit."""
    folder = Path(settings.selections)
    save_selection(selection, folder / "check.json")
    moesaic.extract(settings.checkpoint, folder / "check.json", folder / "check", overwrite=True)
    extracted = moesaic.load(folder / "check", device="cpu")
    batch = next(held_out.batches(8))
    inputs: dict[str, Any] = {
        "input_ids": batch.input_ids_BS,
        "position_ids": batch.position_ids_BS,
        "use_cache": False,
    }
    with moesaic.restrict(model, selection):
        masked = model(**inputs).logits
    return float((masked - extracted(**inputs).logits).abs().max())
