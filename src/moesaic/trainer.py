"""Routing rules and balancing in transformers' Trainer, TRL's SFTTrainer and what derives from them: one callback.

The trainer computes its loss as ever. The callback tells the routers which documents a batch holds, adds the gradient
of the losses of `moesaic train` to that of the routers (see `routing.added`), moves the selection bias before each
optimizer step, and sees to it that whatever is saved can be loaded with its rule.
"""

# ruff: noqa: ARG002 (a trainer passes its callbacks more than they need)

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from moesaic.checkpoint.record import read_provenance, source_record, write_provenance
from moesaic.checkpoint.source import open_checkpoint
from moesaic.common.errors import MoesaicError
from moesaic.common.progress import warn
from moesaic.common.recipe import load_recipe
from moesaic.data.collated import documents_of
from moesaic.families.family import our_base
from moesaic.routing.added import AddedGradients
from moesaic.routing.config import BalanceScope, GroupScore, PoolDraw, RuleConfig, RuleName
from moesaic.routing.install import (
    Installation,
    find_installation,
    install,
    reinstall,
    routing_context,
)
from moesaic.routing.losses import Load, balance_loss, balanced_bias, measure_load, reduce_load, router_z_loss
from moesaic.routing.own_bias import bias_tensors, give_own_biases
from moesaic.routing.pools import RoutingContext
from moesaic.routing.rules import RoutingDecision
from moesaic.routing.stats import dead_experts, load_entropy
from moesaic.training.recipe import LossesRecipe
from moesaic.training.result import inference_rule
from moesaic.training.watch import RoutingWatch


class RoutingCallback(TrainerCallback, ExportableState):
    """A routing rule, the balancing loss and loss-free balancing for a Trainer: `trainer.add_callback(...)`.

    Works on the models that `moesaic train` works on, and computes what it computes. A batch is packed where its
    `position_ids` start again within a row (then without `attention_mask`, which would let documents see each other);
    else a row is a document, without what `attention_mask` hides. Random numbers are those of `TrainingArguments.seed`
    and of the step. Losses are means over the micro-batches of a step. The trainer's loss and `eval_loss` stay what
    they are; `balance_loss`, `router_z_loss`, `load_entropy` and `dead_experts` are in `trainer.state.log_history`.

    Args:
        rule: `topk`, `one_per_group` or `document_pool`. Default: the model's own.
        pool_size: of `document_pool`, a size or an inclusive range. Default: all from K to E.
        pool_draw: of `document_pool`, a size for each document in each layer, or for each document.
        expert_groups: of `one_per_group`, the group of each expert. Default: the model's own.
        group_score: of `one_per_group`. Default: the model's own, or `max`.
        balance: coefficient of the balancing loss, which is 1 before it where the load is even.
        balance_scope: tokens that it counts: `local`, `global` (all ranks), or `batch` (the step so far as well).
        router_z: coefficient of the router z-loss.
        bias_balancing: rate of loss-free balancing, which moves a selection bias.

    Raises:
        MoesaicError: a value that is wrong; when training begins, one that does not fit the model or the trainer.
    """

    def __init__(
        self,
        *,
        rule: RuleName | None = None,
        pool_size: int | Sequence[int] | None = None,
        pool_draw: PoolDraw = "document_and_layer",
        expert_groups: Sequence[int] | None = None,
        group_score: GroupScore | None = None,
        balance: float = 0.0,
        balance_scope: BalanceScope = "global",
        router_z: float = 0.0,
        bias_balancing: float | None = None,
    ) -> None:
        if balance_scope == "step":
            raise MoesaicError("balance_scope: step is for `moesaic train`: a trainer runs no batch twice; take batch")
        routing = {"rule": rule, "pool_size": pool_size, "pool_draw": pool_draw}
        routing |= {"expert_groups": expert_groups, "group_score": group_score}
        balancing = {"coefficient": balance, "scope": balance_scope} if balance else None
        losses = {"balance": balancing, "router_z": router_z, "bias_balancing": bias_balancing}
        self._config = load_recipe(RuleConfig, routing)
        self._losses = load_recipe(LossesRecipe, losses)
        self._arguments = routing | {"balance": balance, "balance_scope": balance_scope}
        self._arguments |= {"router_z": router_z, "bias_balancing": bias_balancing}
        self._run: _Run | None = None

    def state(self) -> dict[str, Any]:
        """What trainer_state.json keeps: the arguments, and the selection bias as it is now."""
        bias = None if self._run is None else self._run.installation.selection_bias
        return {"args": self._arguments, "attributes": {"_saved_bias": None if bias is None else bias.tolist()}}

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        """Put the rule on the model; after a checkpoint, the selection bias as it was there."""
        saved = state.stateful_callbacks.get(type(self).__name__) or {}
        bias = saved["attributes"]["_saved_bias"] if isinstance(saved, dict) and saved else None
        _refuse_trainer(args, model, self._losses)
        if self._run is not None:
            self._run.end()
        self._run = _Run(model, self._config, self._losses, args, others, bias)
        _save_with_record(model, lambda folder: self._write(folder, state.global_step, args))

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """A step's own sums start."""
        if self._run is not None:
            self._run.begin_step(state.global_step)

    def on_substep_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Backward is over, and with it what the routers were told of the micro-batch."""
        if self._run is not None:
            self._run.close()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """The same, and the selection bias moves by the load of the step."""
        if self._run is not None:
            self._run.end_step()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
        """Put the means over the steps since the last log into it."""
        if self._run is not None and logs is not None and "loss" in logs:
            figures = self._run.figures()
            logs.update(figures)
            state.log_history[-1].update(figures)

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Leave moesaic.json in a checkpoint, however it was written."""
        folder = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        if args.should_save and folder.is_dir():
            self._write(folder, state.global_step, args)

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Leave the model with its rule for evaluation, and nothing that a trainer without this callback meets."""
        if self._run is not None:
            self._run.end(state.best_model_checkpoint if args.load_best_model_at_end else None)

    def _write(self, folder: Path, steps: int, args: Any) -> None:
        assert self._run is not None
        origin = _folder(self._run.model)
        source = None if origin is None else open_checkpoint(origin)
        before = {} if source is None else read_provenance(source.path) or {}
        write_provenance(
            folder,
            verb="train",
            recipe={"trainer": self._arguments},
            seed=args.seed,
            sources=[] if source is None else [source_record(source, before.get("weights_hash"))],
            weights_hash=None,
            extra={
                "steps": steps,
                "routing": self._run.record(),
                **{key: before[key] for key in ("experts", "lineage") if key in before},
            },
        )


class _Run:
    """One call of `trainer.train()`."""

    def __init__(
        self,
        model: Any,
        config: RuleConfig,
        losses: LossesRecipe,
        args: Any,
        others: Mapping[str, Any],
        bias: list[list[float]] | None,
    ) -> None:
        self.model = model
        self.losses = losses
        self.args = args
        self.loader = others.get("train_dataloader")
        self.optimizer = others.get("optimizer")
        self.installation = self._install(config, bias)
        self.padding = getattr(model.config.get_text_config(), "pad_token_id", None)
        self.ranks, self.rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        self.watch = RoutingWatch()
        self.open = ExitStack()
        self.sums: dict[str, float] = {}
        self.logged = 0  # steps in the sums
        self.begin_step(0)
        self.hooks = [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after, with_kwargs=True),
        ]

    def _install(self, config: RuleConfig, saved: list[list[float]] | None) -> Installation:
        model = self.model
        record = _routing_of(_folder(model))
        if find_installation(model) is None and record is not None:
            reinstall(model, record)  # AutoModel has loaded it: its rule and its bias are in moesaic.json
        earlier = find_installation(model)
        if config.rule is None and earlier is not None and earlier.config.rule not in (None, "document_pool"):
            config = earlier.config
        bias = None if earlier is None else earlier.selection_bias
        if saved is not None:
            bias = torch.tensor(saved, dtype=torch.float32, device=next(model.parameters()).device)
        balancing = self.losses.bias_balancing is not None
        installation = install(model, config, selection_bias=balancing if bias is None else bias)
        if our_base(model.config.model_type) is None:
            return installation
        for key, value in inference_rule(config).items():
            setattr(model.config, key, value)
        if installation.selection_bias is not None and not bias_tensors(model):
            give_own_biases(model, installation.selection_bias)
        return installation

    def put_bias(self) -> bool:
        """Give the model's own tensors the bias, where it has such; then it needs no record."""
        tensors, bias_LE = bias_tensors(self.model).values(), self.installation.selection_bias
        if bias_LE is None or not tensors:
            return False
        rows = dict(zip(map(id, self.installation.routers), bias_LE, strict=True))
        for router, tensor in tensors:
            tensor.data.copy_(rows[id(router)].reshape(tensor.shape))
        return True

    def record(self) -> dict[str, Any] | None:
        """The `routing` entry of moesaic.json."""
        record = self.installation.to_record()
        if self.put_bias():
            record["selection_bias"] = None
        return None if record["rule"]["rule"] is None and record["selection_bias"] is None else record

    def begin_step(self, step: int) -> None:
        """Forget the step before."""
        self.step = step
        self.micro_steps = _micro_steps(self.args, self.loader, step)
        self.documents = 0
        self.load: Load | None = None
        self.carried: Load | None = None

    def close(self) -> None:
        """End what the routers know of the micro-batch."""
        self.open.close()

    def end_step(self) -> None:
        """Move the selection bias by the load of all ranks."""
        self.close()
        if self.load is None:
            return
        load = reduce_load(self.load)
        if self.losses.bias_balancing is not None:
            bias_LE = self.installation.selection_bias
            assert bias_LE is not None
            self.installation.selection_bias = balanced_bias(bias_LE, load, rate=self.losses.bias_balancing)
            self.put_bias()
        self._add("load_entropy", float(load_entropy(load.counts_LE).mean()))
        self._add("dead_experts", float(dead_experts(load.counts_LE).sum()))
        self.logged += 1
        for finding in self.watch.look(load) if self.rank == 0 else ():
            warn(f"step {self.step + 1:,}: {finding}".replace("losses.balance", "balance").replace("losses.", ""))

    def figures(self) -> dict[str, float]:
        """Means over the steps since this was last asked for."""
        found = {name: value / max(1, self.logged) for name, value in self.sums.items()}
        self.sums, self.logged = {}, 0
        return found

    def end(self, best: str | None = None) -> None:
        """Take the hooks off; where the trainer went back to its `best` checkpoint, go back to that one's bias."""
        self.close()
        if bias_tensors(self.model):
            self.installation.selection_bias = None  # the model has it, and saves it
        elif (record := _routing_of(None if best is None else Path(best))) is not None:
            self.installation = reinstall(self.model, record)
        while self.hooks:
            self.hooks.pop().remove()

    def _before(self, module: nn.Module, _args: Any, inputs: dict[str, Any]) -> None:
        """Tell the routers what documents are coming."""
        if not module.training:
            return
        self.close()
        context = RoutingContext.from_sequences(documents_of(inputs, self.padding), seed=self.args.seed, step=self.step)
        if self.installation.config.rule == "document_pool":
            context = self._numbered(context)
        self.added = AddedGradients()
        self.routed = self.open.enter_context(routing_context(self.installation, context, added=self.added))

    def _numbered(self, context: RoutingContext) -> RoutingContext:
        """The documents numbered through all ranks and micro-batches of the step, which keys their pool sizes."""
        counts_R = torch.zeros(self.ranks, dtype=torch.int64, device=context.document_ids_T.device)
        counts_R[self.rank] = context.num_documents
        if self.ranks > 1:
            dist.all_reduce(counts_R)
        first = self.documents + int(counts_R[: self.rank].sum())
        self.documents += int(counts_R.sum())
        return replace(context, document_keys_N=context.document_keys_N + first)

    def _after(self, module: nn.Module, _args: Any, _inputs: Any, _output: Any) -> None:
        """Measure the load, and have the gradients of the losses added in backward."""
        if not module.training:
            return
        decisions, mask_T = self.routed.decisions, self.routed.context.token_mask_T
        load = measure_load(decisions, mask_T)
        self.load = load if self.load is None else self.load + load
        if torch.is_grad_enabled() and (self.losses.balance is not None or self.losses.router_z > 0):
            scaler = getattr(self.optimizer, "scaler", None)  # of float16; what else scales a loss, scales no gradient
            factor = self.ranks * (1.0 if scaler is None else scaler.get_scale())
            self.added.take(decisions, lambda copies: self._loss(copies, mask_T, load), factor)

    def _loss(self, decisions: Sequence[RoutingDecision], mask_T: Tensor, load: Load) -> Tensor:
        """This micro-batch's part of the mean over those of the step, on this rank."""
        losses, total = self.losses, decisions[0].logits_TE.new_zeros(())
        if losses.balance is not None:
            scope = losses.balance.scope
            part, self.carried = balance_loss(decisions, mask_T, load, scope=scope, carried=self.carried)
            total = total + losses.balance.coefficient / self.micro_steps * part
            self._add("balance_loss", self._over_ranks(part) / self.micro_steps)
        if losses.router_z > 0:
            tokens = reduce_load(load).tokens * self.micro_steps
            part = router_z_loss(decisions, mask_T, batch_tokens=tokens)
            total = total + losses.router_z * part
            self._add("router_z_loss", self._over_ranks(part))
        return total

    def _over_ranks(self, part: Tensor) -> float:
        value = part.detach().clone()
        if self.ranks > 1:
            dist.all_reduce(value)
        return float(value)

    def _add(self, name: str, value: float) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + value


def _folder(model: Any) -> Path | None:
    """Where a model was loaded from, if that is a folder here."""
    folder = Path(str(getattr(model.config, "_name_or_path", "") or ""))
    return folder if (folder / "config.json").is_file() else None


def _routing_of(folder: Path | None) -> dict[str, Any] | None:
    return None if folder is None else (read_provenance(folder) or {}).get("routing")


def _micro_steps(args: Any, loader: Any, step: int) -> int:
    """Micro-batches of an optimizer step: those of the last one of an epoch may be fewer."""
    each = args.gradient_accumulation_steps
    try:
        batches = len(loader)
    except TypeError:  # data without a length
        return each
    updates = max(1, math.ceil(batches / each))
    return (batches % each or each) if step % updates == updates - 1 else each


def _refuse_trainer(args: Any, model: Any, losses: LossesRecipe) -> None:
    """Refuse (MoesaicError) what would train something else than it seems."""
    if args.n_gpu > 1:
        raise MoesaicError(f"one process drives {args.n_gpu} GPUs (DataParallel); start with torchrun, one for each")
    config = model.config.get_text_config()
    own = getattr(config, "output_router_logits", False) and getattr(config, "router_aux_loss_coef", 0.0)
    if own and (losses.balance is not None or losses.bias_balancing is not None):
        raise MoesaicError(
            f"router_aux_loss_coef is {own}, so the model's own aux_loss balances as well; set it to 0.0 in SFTConfig, "
            "or output_router_logits to False in the model's config"
        )
    if losses.bias_balancing is not None and hasattr(model, "peft_config"):
        raise MoesaicError("bias_balancing: moves a tensor of the model, which an adapter does not save; take balance")


def _save_with_record(model: Any, write: Callable[[Path], None]) -> None:
    """Let `model.save_pretrained`, by which every trainer saves, leave moesaic.json as well; a copy has its own.

    Checkpoints of a trainer get the names of transformers' modules. With a family's own, one per expert, it does not
    find the experts again when it resumes, and goes on with those that the model began with (transformers 5.24). The
    config says `use_cache` as the source's does, and not as the trainer does for itself.
    """
    folder = _folder(model)
    use_cache = True if folder is None else open_checkpoint(folder).config.get("use_cache", True)

    def save_pretrained(self: Any, save_directory: Any, *args: Any, **options: Any) -> Any:
        adapter = hasattr(self, "peft_config")
        if Path(save_directory).name.startswith(PREFIX_CHECKPOINT_DIR) and not adapter:
            options.setdefault("save_original_format", False)
        trains_with, self.config.use_cache = self.config.use_cache, use_cache
        try:
            result = type(self).save_pretrained(self, save_directory, *args, **options)
        finally:
            self.config.use_cache = trains_with
        if options.get("is_main_process", True):
            write(Path(save_directory))
        return result

    for one in (model, model.get_base_model()) if hasattr(model, "peft_config") else (model,):
        one.save_pretrained = MethodType(save_pretrained, one)
