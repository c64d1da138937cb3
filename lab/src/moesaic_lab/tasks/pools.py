"""Does the pool constraint hold: the training batches of a run once more, and which experts their tokens use."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import moesaic
from moesaic.common.recipe import load_recipe
from moesaic.data.dataset import PackedDataset
from moesaic.data.tokenise import prepare
from moesaic.loading import load_tokenizer
from moesaic.routing.install import routing_context
from moesaic.routing.pools import RoutingContext
from moesaic.routing.rules import RoutingDecision
from moesaic.training.recipe import TrainRecipe
from moesaic_lab.rows import Row


@dataclass(frozen=True, kw_only=True)
class Pools:
    """Settings of the task."""

    run: str
    """Folder of a finished run with `document_pool`."""
    rows: str
    """File to write."""
    steps: int
    """Training steps whose batches are looked at."""
    seed: int
    labels: dict[str, Any]


@torch.no_grad()
def run(settings: Pools) -> Iterator[Row]:
    """Tokens checked, selections outside the pool, and documents that use more experts than their pool has."""
    recipe = load_recipe(TrainRecipe, Path(settings.run) / "recipe.yaml")
    data = PackedDataset(
        prepare(recipe.data, load_tokenizer(settings.run), quiet=True),
        seed=recipe.seed,
        sequences_per_step=recipe.sequences_per_step,
    )
    model = moesaic.load(settings.run, device="cpu")
    checked = outside = 0
    for step in range(settings.steps):
        for micro_step in range(recipe.micro_steps):
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
    common = {**settings.labels, "seed": settings.seed}
    yield common | {"measure": "pool_checked", "value": checked}
    yield common | {"measure": "pool_violations", "value": outside}


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
