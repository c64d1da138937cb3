"""One of the ranks of `test_distributed.py`: python distributed_worker.py RANK WORLD FOLDER.

Every rank computes its part, the parts are summed over the ranks, and rank 0 compares the sums with what one process
gets from the whole global micro-batch. Writes the largest errors as JSON.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from moesaic.modeling.cross_entropy import token_losses
from moesaic.routing.config import BalanceScope, RuleConfig
from moesaic.routing.install import install, routing_context
from moesaic.routing.losses import balance_loss, measure_load, router_z_loss
from moesaic.routing.pools import RoutingContext
from moesaic.routing.rules import RouterSettings, build_rule, decide
from tests.reference.naive_routing import random_documents
from tests.unit.routing.routed_models import moesaic_model, packed

LAYERS, EXPERTS, HIDDEN, MICRO_STEPS, SEQUENCES = 3, 6, 5, 2, 4
RULES = {
    "topk": RuleConfig(rule="topk"),
    "one_per_group": RuleConfig(rule="one_per_group", expert_groups=(0, 1, 0, 2, 2, 1)),
    "document_pool": RuleConfig(rule="document_pool", pool_size=(2, 5)),
}


def documents_before(documents_BS: Tensor, row: int) -> int:
    """Documents in the rows before `row` of a global batch."""
    return 0 if row == 0 else RoutingContext.from_sequences(documents_BS[:row]).num_documents


def step_losses(
    rule: str, scope: BalanceScope, ranks: int, rank: int, dtype: torch.dtype, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's part of a step of two micro-steps: the loss, its gradient, and the balancing loss in it."""
    generator = torch.Generator().manual_seed(0)
    documents = random_documents(7, sequences=MICRO_STEPS * SEQUENCES, length=16)
    hidden = torch.randn(*documents.shape, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(0, EXPERTS, documents.shape, generator=generator).where(documents >= 0, -100)
    router = torch.randn(LAYERS, EXPERTS, HIDDEN, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    settings = RouterSettings(num_experts=EXPERTS, top_k=2, weighting="selected", cast_weights=False)
    built = build_rule(RULES[rule], settings)
    tokens, targets = int((documents >= 0).sum()), int((labels != -100).sum())

    total, balances, carried = torch.zeros((), dtype=dtype), torch.zeros((), dtype=dtype), None
    share = SEQUENCES // ranks
    for micro_step in range(MICRO_STEPS):
        first = micro_step * SEQUENCES + rank * share
        rows = slice(first, first + share)
        context = RoutingContext.from_sequences(
            documents[rows], first_document=documents_before(documents, first), seed=3, step=11
        )
        logits_LTE = torch.einsum("td,led->lte", hidden[rows].flatten(0, 1), router)
        decisions = [decide(built, logits, context=context, layer=i) for i, logits in enumerate(logits_LTE)]
        local = measure_load(decisions, context.token_mask_T)
        balance, carried = balance_loss(
            decisions, context.token_mask_T, local, scope=scope, carried=carried, group=group
        )
        z = router_z_loss(decisions, context.token_mask_T, batch_tokens=tokens)
        nll_T, _ = token_losses(logits_LTE[0], labels[rows].flatten())
        balances = balances + balance / MICRO_STEPS
        total = total + 0.1 * z + nll_T.sum() / targets
    total = total + balances
    (gradient,) = torch.autograd.grad(total, router)
    return total.detach(), gradient, balances.detach()


def compare_losses(rule: str, scope: BalanceScope, dtype: torch.dtype, alone: dist.ProcessGroup) -> float:
    """Largest difference between the ranks' sum and one process: the loss, and the gradient over its largest entry."""
    loss, gradient, _ = step_losses(rule, scope, dist.get_world_size(), dist.get_rank(), dtype, None)
    dist.all_reduce(loss)
    dist.all_reduce(gradient)
    expected, expected_gradient, _ = step_losses(rule, scope, 1, 0, dtype, alone)  # a group of this rank only
    difference = (gradient - expected_gradient).abs().max() / expected_gradient.abs().max()
    return max(float((loss - expected).abs()), float(difference))


def local_scope_error(alone: dist.ProcessGroup) -> float:
    """The sum of the ranks' parts under `local` is the mean of what each rank gets in a group of its own."""
    world, rank = dist.get_world_size(), dist.get_rank()
    part = step_losses("topk", "local", world, rank, torch.float64, None)[2]
    by_itself = step_losses("topk", "global", world, rank, torch.float64, alone)[2]
    sums = torch.stack([part, by_itself / world])
    dist.all_reduce(sums)
    return float((sums[0] - sums[1]).abs())


def sharded_model_error(alone: dist.ProcessGroup) -> float:
    """FSDP2 with activation checkpointing and document pools against one process: loss and router gradients."""
    documents = random_documents(2, sequences=4, length=16)
    results = []
    for ranks, rank in ((1, 0), (dist.get_world_size(), dist.get_rank())):
        model = moesaic_model(routing_weighting="all").train()
        model.activation_checkpointing_enable({"use_reentrant": False})
        share = len(documents) // ranks
        rows = slice(rank * share, (rank + 1) * share)
        inputs, _ = packed(documents)
        inputs = {name: value[rows] if isinstance(value, Tensor) else value for name, value in inputs.items()}
        context = RoutingContext.from_sequences(
            documents[rows], first_document=documents_before(documents, rank * share), seed=1
        )
        if ranks > 1:
            mesh = init_device_mesh("cpu", (ranks,))
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        installation = install(model, RuleConfig(rule="document_pool", pool_size=(2, 5)))
        with routing_context(installation, context) as record:
            output = model(**inputs).logits
            mask_T = context.token_mask_T
            local = measure_load(record.decisions, mask_T)
            loss, _ = balance_loss(record.decisions, mask_T, local, scope="global", group=None if ranks > 1 else alone)
            loss = loss + router_z_loss(record.decisions, mask_T, batch_tokens=int((documents >= 0).sum()))
            loss = loss + (output.flatten(0, 1).logsumexp(-1) * mask_T).sum() / int((documents >= 0).sum())
            (loss * ranks).backward()  # FSDP averages gradients over its ranks
        gradients = []
        for parameter in model.parameters():
            gradient = parameter.grad
            assert gradient is not None
            gradients.append(gradient.full_tensor() if ranks > 1 else gradient)  # pyright: ignore
        value = loss.detach().clone()
        if ranks > 1:
            dist.all_reduce(value)
        results.append([value, *gradients])
    return max(float((a - b).abs().max()) for a, b in zip(*results, strict=True))


def main() -> None:
    rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=world)
    alone = dist.new_group([rank], use_local_synchronization=True)
    assert isinstance(alone, dist.ProcessGroup)
    errors = {}
    for scope in ("global", "batch"):
        for rule in RULES:
            for dtype in (torch.float32, torch.float64):
                errors[f"{scope}-{rule}-{dtype}".replace("torch.", "")] = compare_losses(rule, scope, dtype, alone)
    errors["local-differs"] = compare_losses("topk", "local", torch.float64, alone)
    errors["local"] = local_scope_error(alone)
    errors["sharded"] = sharded_model_error(alone)
    (folder / f"errors-{rank}.json").write_text(json.dumps(errors))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
