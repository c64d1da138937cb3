"""One optimizer step: micro-steps, losses as means over all tokens of the batch, clipping, update. Held-out losses."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from moesaic.common.progress import Tick
from moesaic.common.seeds import fold_key
from moesaic.data.dataset import ValidationSet
from moesaic.data.packing import PackedBatch, keeps_documents_apart, one_per_row
from moesaic.modeling.cross_entropy import IGNORED, DomainLoss, ratio_with_error, token_losses
from moesaic.modeling.finite import first_not_finite
from moesaic.routing.install import routing_context
from moesaic.routing.losses import Load, balance_loss, balanced_bias, measure_load, reduce_load, router_z_loss
from moesaic.routing.pools import RoutingContext
from moesaic.routing.rules import RoutingDecision
from moesaic.training.optimizer import gradient_norm, scale_gradients
from moesaic.training.parallel import reshard
from moesaic.training.start import Trainable


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Means over all tokens of a step, over all ranks; losses are in nats and before their coefficients."""

    loss: float | None
    """`None` where nothing is predicted: every label is masked. Such a step moves nothing."""
    domain_losses: tuple[float, ...]
    """Per domain of the data; NaN where the step had none of it."""
    tokens: int
    """Tokens that are not padding."""
    gradient_norm: float
    """Before clipping."""
    balance_loss: float | None
    router_z_loss: float | None
    lm_z_loss: float | None
    load: Load | None
    """Selections of every expert in this step."""

    @property
    def is_finite(self) -> bool:
        """Whether a run may go on after it."""
        return math.isfinite(self.loss or 0.0) and math.isfinite(self.gradient_norm)


@dataclass(kw_only=True)
class _Step:
    """A step under way: the counts that means are taken over, and this rank's sums, in float64 on the device."""

    step: int
    micro_steps: int
    """Those that are not all padding on every rank."""
    targets: int
    """Predicted tokens of all ranks and micro-steps; 0 where every label is masked."""
    tokens: int
    """Tokens of all ranks and micro-steps that are not padding."""
    losses_D: Tensor
    targets_D: Tensor
    terms: Tensor
    """Balance, router z and LM z loss."""
    load: Load | None = None
    carried: Load | None = None
    """What the balancing loss of the next micro-step goes on with: the load so far, or that of the whole step."""


def run_step(
    trainable: Trainable, batches: list[PackedBatch], *, step: int, rate: float, num_domains: int
) -> StepResult:
    """Forward, backward and update for one step of this rank's micro-batches; it moves nothing where it isn't finite.

    Neither does a step in which every label is masked: its gradients would be those of the other losses alone, and
    weight decay needs none.

    Cross-entropy and z-losses are sums over this rank divided by the counts of the whole step, so they don't depend on
    how a batch is cut into ranks and micro-steps. Ranks average their gradients (FSDP), so each scales its part by
    their number.
    """
    state = _begin(trainable, batches, step, num_domains)
    balance = trainable.recipe.losses.balance
    if balance is not None and balance.scope == "step" and len(batches) > 1:
        state.carried = _step_load(trainable, batches, step)
    seed_dropout(trainable, step)
    for batch in batches:
        _micro_step(trainable, trainable.placed(batch), state)
    result = _finish(trainable, state)
    if result.is_finite and result.loss is not None:
        _update(trainable, result, rate)
    trainable.optimizer.zero_grad(set_to_none=True)
    return result


def _begin(trainable: Trainable, batches: list[PackedBatch], step: int, num_domains: int) -> _Step:
    device = trainable.world.device
    counts = [sum(batch.num_targets for batch in batches), *(batch.num_tokens for batch in batches)]
    targets, *tokens = trainable.world.sum(torch.tensor(counts, device=device)).tolist()
    zeros = torch.zeros(2 * num_domains + 3, dtype=torch.float64, device=device)
    losses_D, targets_D, terms = zeros.split([num_domains, num_domains, 3])
    return _Step(
        step=step,
        micro_steps=max(1, sum(count > 0 for count in tokens)),
        targets=targets,
        tokens=max(1, sum(tokens)),
        losses_D=losses_D,
        targets_D=targets_D,
        terms=terms,
    )


@torch.no_grad()
def _step_load(trainable: Trainable, batches: list[PackedBatch], step: int) -> Load:
    """What every expert gets in this step on all ranks, from a forward pass of its own, which draws the same."""
    assert trainable.installation is not None, "refused where the model has no routers"
    seed_dropout(trainable, step)
    loads = []
    for batch in batches:
        batch = trainable.placed(batch)
        context = context_of(trainable, batch, step)
        with routing_context(trainable.installation, context) as record:
            trainable.model(
                input_ids=batch.input_ids_BS, position_ids=batch.position_ids_BS, use_cache=False, logits_to_keep=1
            )
            loads.append(measure_load(record.decisions, context.token_mask_T))
    reshard(trainable.model)
    return reduce_load(sum(loads[1:], loads[0]))


def seed_dropout(trainable: Trainable, step: int) -> None:
    """Let a step draw the same, in models that have dropout, whatever came before it."""
    torch.manual_seed(fold_key(trainable.recipe.seed, step, trainable.world.rank) >> 1)


def batch_losses(model: PreTrainedModel, batch: PackedBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Run the model on a batch; return -log p, log-partition (see `token_losses`) and label of each token."""
    # What a config asks for on top, the recipe's losses have no use for.
    flags = {"output_router_logits": False} if getattr(model.config, "output_router_logits", False) else {}
    output = model(input_ids=batch.input_ids_BS, position_ids=batch.position_ids_BS, use_cache=False, **flags)
    # The labels move and not the logits: a slice of those would be a copy of the largest tensor of a step.
    labels_BS = torch.full_like(batch.labels_BS, IGNORED)
    labels_BS[:, :-1] = batch.labels_BS[:, 1:]
    labels_T = labels_BS.flatten()
    return *token_losses(output.logits.flatten(0, 1), labels_T), labels_T


def context_of(trainable: Trainable, batch: PackedBatch, step: int) -> RoutingContext:
    """What the routers of a step know about a batch: its documents, and where the random draws start."""
    return RoutingContext.from_packed(
        batch.document_ids_BS,
        first_document=batch.first_document,
        num_documents=batch.num_documents,
        seed=trainable.recipe.seed,
        step=step,
    )


def _micro_step(trainable: Trainable, batch: PackedBatch, state: _Step) -> None:
    """Add one micro-batch to the gradients and to the sums."""
    installation, ranks = trainable.installation, trainable.world.size
    if installation is None:
        (_language_loss(trainable, batch, state) * ranks).backward()
        return
    context = context_of(trainable, batch, state.step)
    with routing_context(installation, context) as record:
        loss = _language_loss(trainable, batch, state)
        load = measure_load(record.decisions, context.token_mask_T)
        state.load = load if state.load is None else state.load + load
        loss = loss + _routing_loss(trainable, record.decisions, context.token_mask_T, load, state)
        (loss * ranks).backward()


def _language_loss(trainable: Trainable, batch: PackedBatch, state: _Step) -> Tensor:
    """This micro-batch's part of the mean cross-entropy and of the LM z-loss."""
    losses_T, partition_T, labels_T = batch_losses(trainable.model, batch)
    domains_T = batch.domain_ids_BS.flatten().clamp_min(0)
    state.losses_D.index_add_(0, domains_T, losses_T.detach().double())
    state.targets_D.index_add_(0, domains_T, (labels_T != IGNORED).double())
    loss = losses_T.sum() / max(1, state.targets)
    coefficient = trainable.recipe.losses.lm_z
    if coefficient > 0:
        lm_z = partition_T.square().sum() / max(1, state.targets)
        state.terms[2] += lm_z.detach()
        loss = loss + coefficient * lm_z
    return loss


def _routing_loss(
    trainable: Trainable, decisions: list[RoutingDecision], mask_T: Tensor, load: Load, state: _Step
) -> Tensor | float:
    """This micro-batch's part of the balancing loss (a mean over micro-steps or tokens) and of the router z-loss."""
    losses = trainable.recipe.losses
    total: Tensor | float = 0.0
    if losses.balance is not None:
        scope = losses.balance.scope
        part, state.carried = balance_loss(decisions, mask_T, load, scope=scope, carried=state.carried)
        parts = 1 if scope == "step" else state.micro_steps  # sums over tokens, or means over micro-steps
        state.terms[0] += part.detach() / parts
        total = total + losses.balance.coefficient / parts * part
    if losses.router_z > 0:
        part = router_z_loss(decisions, mask_T, batch_tokens=state.tokens)
        state.terms[1] += part.detach()
        total = total + losses.router_z * part
    return total


def _finish(trainable: Trainable, state: _Step) -> StepResult:
    """Add up the ranks' sums and read them: beside the gradient norm, the one wait for the device in a step."""
    world, losses = trainable.world, trainable.recipe.losses
    num_domains = len(state.losses_D)
    message = world.sum(torch.cat([state.losses_D, state.targets_D, state.terms])).tolist()
    per_domain, counts, terms = message[:num_domains], message[num_domains : 2 * num_domains], message[-3:]
    return StepResult(
        loss=sum(per_domain) / state.targets if state.targets else None,
        domain_losses=tuple(
            loss / count if count else math.nan for loss, count in zip(per_domain, counts, strict=True)
        ),
        tokens=state.tokens,
        gradient_norm=gradient_norm(_gradients(trainable), world),
        balance_loss=terms[0] if losses.balance is not None else None,
        router_z_loss=terms[1] if losses.router_z > 0 else None,
        lm_z_loss=terms[2] if losses.lm_z > 0 else None,
        load=None if state.load is None else reduce_load(state.load),
    )


def _gradients(trainable: Trainable) -> list[Tensor]:
    return [master.grad for master in trainable.masters.trainable.values() if master.grad is not None]


def _update(trainable: Trainable, result: StepResult, rate: float) -> None:
    """Clip, move the selection bias by the load of this step, then the weights."""
    recipe, installation = trainable.recipe, trainable.installation
    clip, balancing = recipe.optimizer.clip, recipe.losses.bias_balancing
    if clip is not None and result.gradient_norm > clip:
        scale_gradients(_gradients(trainable), clip / result.gradient_norm)
    if balancing is not None:
        assert installation is not None
        assert installation.selection_bias is not None
        assert result.load is not None
        installation.selection_bias = balanced_bias(installation.selection_bias, result.load, rate=balancing)
    for group in trainable.optimizer.param_groups:
        group["lr"] = rate
    trainable.optimizer.step()
    trainable.masters.publish()


def where_not_finite(trainable: Trainable, batches: Sequence[PackedBatch]) -> str | None:
    """The layer and module that first give NaN or infinity on a step's batches; None where the forward pass is finite.

    Not asked of several ranks: a pass of one alone would wait for the others.
    """
    model, world = trainable.model, trainable.world
    if world.size > 1:
        return None
    model.eval()  # routing as at inference
    try:
        for batch in batches:
            one = trainable.placed(batch)
            found = first_not_finite(
                model,
                lambda one=one: model(input_ids=one.input_ids_BS, position_ids=one.position_ids_BS, use_cache=False),
            )
            if found is not None:
                return f"{found.place} gives {found.what} in {found.dtype}"
    finally:
        model.train()
    return None


# --- held-out sets ----------------------------------------------------------------------------------------------------


def validation_batches(trainable: Trainable, sets: Sequence[ValidationSet]) -> int:
    """How often `validate` will call `tick`."""
    size = trainable.recipe.batch.micro_sequences * trainable.world.size
    return sum(math.ceil(held_out.num_sequences / size) for held_out in sets)


def validate(
    trainable: Trainable, sets: Sequence[ValidationSet], tick: Tick = lambda _batches: None
) -> dict[str, DomainLoss]:
    """Run every held-out set through the model in evaluation mode: routing as at inference, without pools.

    `tick(1)` is called after every batch.
    """
    found = document_losses(trainable, sets, tick)
    return {domain: ratio_with_error(losses_N, tokens_N) for domain, (losses_N, tokens_N) in found.items()}


def document_losses(
    trainable: Trainable, sets: Sequence[ValidationSet], tick: Tick = lambda _batches: None
) -> dict[str, tuple[Tensor, Tensor]]:
    """The same, as total loss and number of predicted tokens of each document (float64, on the CPU), by domain."""
    model = trainable.model
    model.eval()
    try:
        return {held_out.domain: _run(trainable, held_out, tick) for held_out in sets}
    finally:
        model.train()
        reshard(model)


@torch.no_grad()
def _run(trainable: Trainable, held_out: ValidationSet, tick: Tick) -> tuple[Tensor, Tensor]:
    world = trainable.world
    sums_2N = torch.zeros(2, held_out.num_documents, dtype=torch.float64, device=world.device)
    batches = held_out.batches(trainable.recipe.batch.micro_sequences, rank=world.rank, world_size=world.size)
    for batch in batches:
        add_losses(trainable.model, trainable.placed(batch), sums_2N)
        tick(1)
    losses_N, tokens_N = world.sum(sums_2N).cpu()
    return losses_N, tokens_N


def add_losses(model: PreTrainedModel, batch: PackedBatch, sums_2N: Tensor) -> None:
    """Add the total loss and the number of predicted tokens of each of the N documents of a held-out batch."""
    losses_T, _, labels_T = batch_losses(model, batch)
    documents_T = batch.document_ids_BS.flatten().clamp_min(0)  # padding adds 0 to the first
    sums_2N[0].index_add_(0, documents_T, losses_T.double())
    sums_2N[1].index_add_(0, documents_T, (labels_T != IGNORED).double())


@torch.no_grad()
def held_out_loss(model: PreTrainedModel, held_out: ValidationSet, *, sequences: int = 8) -> DomainLoss:
    """Loss of a loaded model on held-out documents, as `train` measures it, `sequences` of them at once."""
    packs = keeps_documents_apart(model)
    sums_2N = torch.zeros(2, held_out.num_documents, dtype=torch.float64, device=model.device)
    for batch in held_out.batches(sequences):
        add_losses(model, (batch if packs else one_per_row(batch)).to(model.device), sums_2N)
    return ratio_with_error(*sums_2N.cpu())
