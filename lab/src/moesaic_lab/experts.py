"""Tasks about the experts of an MoE: parts of them, whether pools hold, what clusters of tokens say.

Each gives rows without seed and labels, which `moesaic lab task` adds.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

import moesaic
from moesaic.analysis.format import read_inspection
from moesaic.common.recipe import load_recipe
from moesaic.data.dataset import PackedDataset
from moesaic.data.prepare import prepare
from moesaic.data.validation import ValidationSet
from moesaic.loading import load_tokenizer
from moesaic.routing.install import routing_context
from moesaic.routing.types import RoutingContext, RoutingDecision
from moesaic.selection.request import Method
from moesaic.selection.selection import Selection, save_selection
from moesaic.selection.statistics import load_statistics
from moesaic.training.recipe import TrainRecipe
from moesaic_lab.measure import held_out_loss, held_out_sets
from moesaic_lab.plan import selection_file, train_file
from moesaic_lab.results import Row

_CLUSTERS = ("purity", "nmi", "silhouette", "concentration", "concentration_by_chance")


def subsets(
    *,
    checkpoint: str,
    selections: str,
    domains: Sequence[str],
    sequence_length: int,
    shares: Sequence[float],
    documents: Sequence[int],
    methods: Sequence[Method],
    seed: int,
    check_extracted: bool,
) -> Iterator[Row]:
    """Losses with all and with some of the experts, chosen on a few documents of a domain.

    A row per share, method, number of documents and domain, and how alike the domains route.

    Args:
        checkpoint: the MoE.
        selections: folder for selections and statistics.
        domains: that experts are chosen for.
        sequence_length: of held-out sequences, and tokens of a calibration document.
        shares: of the experts that are kept.
        documents: numbers of calibration documents.
        methods: of choosing.
        seed: of the choice.
        check_extracted: also extract one part and compare its logits with the masked model's, bit for bit.
    """
    folder = Path(selections)
    model = moesaic.load(checkpoint, device="cpu")
    held_out = held_out_sets(domains, load_tokenizer(checkpoint), sequence_length=sequence_length)
    for one in held_out.values():
        yield {"measure": "subset_loss", "share": 1.0, **held_out_loss(model, one)}
    selection = None
    for domain, one in held_out.items():
        for number, method, share in _choices(documents, methods, shares):
            statistics = folder / f"{domain}-{number}.stats.json"
            known = statistics.exists()  # one pass over the documents serves all methods and shares
            selection = moesaic.select(
                checkpoint,
                keep=f"{100 * share:g}%",
                method=method,
                data=None if known else train_file(domain),
                stats=(statistics,) if known else (),
                stats_out=None if known else statistics,
                examples=None if known else number,
                max_tokens=sequence_length,
                seed=seed,
            )
            if method == "router":
                save_selection(selection, selection_file(selections, domain, number, share))
            labels = {"method": method, "share": share, "documents": None if method == "random" else number}
            with moesaic.restrict(model, selection):
                yield {**labels, "measure": "subset_loss", **held_out_loss(model, one)}
            if (mass := selection.routing_mass_kept) is not None:
                yield {**labels, "measure": "mass_kept", "domain": domain, "value": float(np.mean(mass))}
    yield from _similarities([folder / f"{domain}-{max(documents)}.stats.json" for domain in domains])
    if check_extracted and selection is not None:
        value = _extracted_difference(checkpoint, folder, model, selection, next(iter(held_out.values())))
        yield {"measure": "restrict_minus_extracted", "value": value}


def _choices(
    documents: Sequence[int], methods: Sequence[Method], shares: Sequence[float]
) -> Iterator[tuple[int, Method, float]]:
    """Every combination; random experts once, because they do not depend on documents."""
    for number in documents:
        for method in methods:
            if method != "random" or number == documents[0]:
                yield from ((number, method, share) for share in shares)


def _similarities(files: Sequence[Path]) -> Iterator[Row]:
    """Cosine of the domains' mean router probabilities, per layer: the mean over pairs."""
    means_DLE = np.array([load_statistics(file).probability_LE for file in files])
    unit_DLE = means_DLE / np.linalg.norm(means_DLE, axis=-1, keepdims=True)
    for layer in range(unit_DLE.shape[1]):
        cosine_DD = unit_DLE[:, layer] @ unit_DLE[:, layer].T
        value = float(cosine_DD[np.triu_indices(len(cosine_DD), k=1)].mean())
        yield {"measure": "domain_similarity", "layer": layer, "value": value}


@torch.no_grad()
def _extracted_difference(
    checkpoint: str, folder: Path, model: PreTrainedModel, selection: Selection, held_out: ValidationSet
) -> float:
    """Largest difference of logits between the masked model and the extracted checkpoint; 0 is bit for bit."""
    save_selection(selection, folder / "check.json")
    moesaic.extract(checkpoint, folder / "check.json", folder / "check", overwrite=True)
    extracted = moesaic.load(folder / "check", device="cpu")
    batch = next(held_out.batches(8))
    inputs: Mapping[str, Any] = {"input_ids": batch.input_ids_BS, "position_ids": batch.position_ids_BS}
    with moesaic.restrict(model, selection):
        masked = model(**inputs, use_cache=False).logits
    return float((masked - extracted(**inputs, use_cache=False).logits).abs().max())


@torch.no_grad()
def pools(*, run: str, steps: int) -> Iterator[Row]:
    """Does the pool constraint hold: the batches of the first steps of a finished run with `document_pool` once more.

    Gives the tokens checked; and selections outside the pool, with the experts that documents use beyond their pools.
    """
    recipe = load_recipe(TrainRecipe, Path(run) / "recipe.yaml")
    prepared = prepare(recipe.data, load_tokenizer(run), quiet=True)
    data = PackedDataset(prepared, seed=recipe.seed, sequences_per_step=recipe.sequences_per_step)
    model = moesaic.load(run, device="cpu")
    checked = outside = 0
    for step, micro_step in ((step, micro) for step in range(steps) for micro in range(recipe.micro_steps)):
        batch = data.batch(step, micro_step=micro_step, num_micro_steps=recipe.micro_steps)
        context = RoutingContext.from_packed(
            batch.document_ids_BS,
            first_document=batch.first_document,
            num_documents=batch.num_documents,
            seed=recipe.seed,
            step=step,
        )
        with routing_context(model, context, pools=True) as record:
            model(input_ids=batch.input_ids_BS, position_ids=batch.position_ids_BS, use_cache=False)
        for decision in record.decisions:
            checked += int(context.token_mask_T.sum())
            outside += violations(decision, context)
    yield {"measure": "pool_checked", "value": checked}
    yield {"measure": "pool_violations", "value": outside}


def violations(decision: RoutingDecision, context: RoutingContext) -> int:
    """Selections outside the token's pool, and experts that a document uses beyond the number its pool holds."""
    mask_T = context.token_mask_T
    assert decision.allowed_TE is not None, "the rule draws pools"
    outside = int((~decision.allowed_TE.gather(1, decision.expert_ids_TK))[mask_T].sum())
    used_NE = torch.zeros(context.num_documents, decision.allowed_TE.shape[1], dtype=torch.bool)
    used_NE[context.document_ids_T[mask_T, None], decision.expert_ids_TK[mask_T]] = True
    pool_N = torch.zeros(context.num_documents, dtype=torch.int64)
    pool_N[context.document_ids_T[mask_T]] = decision.allowed_TE[mask_T].sum(dim=1)
    return outside + int((used_NE.sum(dim=1) - pool_N).clamp_min(0).sum())


def inspected(*, inspection: str) -> Iterator[Row]:
    """How far token clusters follow domains and documents, of what `moesaic inspect` wrote."""
    clustering = read_inspection(inspection).clustering
    for name in _CLUSTERS if clustering is not None else ():
        if (value := getattr(clustering, name)) is not None:
            yield {"measure": f"cluster_{name}", "value": value}
