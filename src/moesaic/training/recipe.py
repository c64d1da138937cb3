"""The recipe of `train`: what decides the weights that come out, one documented field per key, no torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from moesaic.common.errors import MoesaicError
from moesaic.common.layer_ranges import parse_layers
from moesaic.common.recipe import load_recipe
from moesaic.data.recipe import DataRecipe
from moesaic.modeling.names import class_names
from moesaic.recipes import recipe_source
from moesaic.routing.config import BalanceScope, RuleConfig
from moesaic.training.schedule import Transition, check_seed, positions, refuse_long_warmup

Schedule = Literal["cosine", "linear"]
Precision = Literal["fp32", "bf16"]
Tracker = Literal["tensorboard", "wandb", "mlflow"]


def _require(recipe: object, *names: str, least: float | None = None) -> None:
    """Refuse numbers that are not greater than 0 (or, with `least`, less than it); `None` passes."""
    for name in names:
        value = getattr(recipe, name)
        if value is None or (value > 0 if least is None else value >= least):
            continue
        raise MoesaicError(f"{name} must be {'greater than 0' if least is None else f'at least {least}'}, got {value}")


@dataclass(frozen=True, kw_only=True)
class MoEShape:
    """The MoE layers of a model that starts from random weights."""

    experts: int
    """E, routed experts per MoE layer."""
    top_k: int
    """K, routed experts that each token uses; shared experts come on top."""
    intermediate_size: int
    """I, width of one routed expert."""
    shared_experts: int = 0
    """S, experts of the family's own `intermediate_size` that every token uses, with weight 1."""
    weighting: Literal["selected", "all", "sigmoid"] = "selected"
    """Softmax over the selected experts, over all without renormalisation, or sigmoids over the sum of the selected."""
    routing: Literal["topk", "one_per_group"] = "topk"
    """The rule of the model itself, at training and at inference."""
    groups: int | None = None
    """Groups of consecutive experts for `one_per_group`; must divide `experts`."""
    layers: str = "all"
    """Layers that are MoE: `all`, `every:n` (i+1 divisible by n) or zero-based ranges such as `1-10,12`."""

    def __post_init__(self) -> None:
        _require(self, "experts", "top_k", "intermediate_size", "groups")
        _require(self, "shared_experts", least=0)
        most = self.groups or self.experts
        if self.top_k > most:
            raise MoesaicError(f"top_k must not exceed {'groups' if self.groups else 'experts'} ({most})")
        if (self.routing == "one_per_group") != (self.groups is not None):
            raise MoesaicError(f"groups goes with `routing: one_per_group`, give both or neither; got {self.groups}")
        if self.groups is not None and self.experts % self.groups:
            raise MoesaicError(f"groups must divide experts ({self.experts}), got {self.groups}")


@dataclass(frozen=True, kw_only=True)
class ScratchModel:
    """A model that starts from random weights."""

    family: str
    """A transformers `model_type`: a dense base (`llama`) for our architecture, or a native one as it is."""
    config: dict[str, Any]
    """Fields of the family's configuration class."""
    moe: MoEShape | None = None
    """Turns the dense family into our MoE architecture."""


@dataclass(frozen=True, kw_only=True)
class BalanceLoss:
    """`coefficient * E * sum_i f_i P_i`, averaged over the MoE layers; 1 before the coefficient when balanced."""

    coefficient: float
    """DivMoE's 0.01 is 0.01 * K here, because our f is divided by K."""
    scope: BalanceScope = "global"
    """Tokens that f counts: `local` this rank's micro-batch; `global` all ranks' micro-batches; `batch` also those of
    the step so far; `step` the whole batch, for one more forward pass of each micro-batch where there are several."""

    def __post_init__(self) -> None:
        _require(self, "coefficient", least=0)


@dataclass(frozen=True, kw_only=True)
class LossesRecipe:
    """What is added to the cross-entropy."""

    balance: BalanceLoss | None = None
    """Load-balancing loss; needs a MoE model."""
    router_z: float = 0.0
    """Coefficient of the router z-loss; needs a MoE model."""
    lm_z: float = 0.0
    """Coefficient of the mean squared log-partition of the vocabulary."""
    bias_balancing: float | None = None
    """Rate of loss-free balancing (arXiv 2408.15664): a selection bias moved by the sign of the load's deviation."""

    def __post_init__(self) -> None:
        _require(self, "router_z", "lm_z", least=0)
        _require(self, "bias_balancing")


@dataclass(frozen=True, kw_only=True)
class OptimizerRecipe:
    """AdamW."""

    lr: float
    """Highest learning rate."""
    min_lr: float = 0.0
    """Learning rate at the end of the budget."""
    schedule: Schedule = "cosine"
    """How the learning rate falls from `lr` to `min_lr` after the warmup."""
    warmup_steps: int = 0
    """Steps of linear increase to `lr`; the first step already has `lr / warmup_steps`."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the first and second moments."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled: multiplied by the learning rate of the step."""
    no_decay: tuple[str, ...] | None = None
    """Parameters without weight decay, by shell patterns over their names, such as `*embed_tokens*`; all others have
    it. Default: norms and biases, that is tensors of one dimension and biases of any."""
    clip: float | None = 1.0
    """Largest global gradient norm; `null` does not clip."""
    frozen: tuple[str, ...] = ()
    """Parameters that do not train, by shell patterns over their names, such as `*.self_attn.*`."""

    def __post_init__(self) -> None:
        _require(self, "lr", "eps", "clip")
        _require(self, "min_lr", "warmup_steps", "weight_decay", least=0)
        if self.min_lr > self.lr:
            raise MoesaicError(f"min_lr must not exceed lr ({self.lr}), got {self.min_lr}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise MoesaicError(f"betas must both be at least 0 and less than 1, got {list(self.betas)}")


@dataclass(frozen=True, kw_only=True)
class BatchRecipe:
    """How many tokens one optimizer step sees."""

    tokens: int
    """Tokens per step over all ranks, padding included; a multiple of sequence_length * micro_sequences * ranks."""
    micro_sequences: int = 1
    """Sequences that one rank runs forward and backward at a time."""

    def __post_init__(self) -> None:
        _require(self, "tokens", "micro_sequences")


@dataclass(frozen=True, kw_only=True)
class BudgetRecipe:
    """When the run is over: one of the two, or neither where `data.epochs` says it."""

    steps: int | None = None
    """Optimizer steps."""
    tokens: int | None = None
    """Tokens; rounded up to whole steps."""

    def __post_init__(self) -> None:
        _require(self, "steps", "tokens")
        if self.steps is not None and self.tokens is not None:
            raise MoesaicError("steps and tokens are both given, drop one")


@dataclass(frozen=True, kw_only=True)
class ParallelRecipe:
    """How the ranks that torchrun starts share the work: `fsdp * replicate` ranks, each with its own sequences."""

    fsdp: int = 1
    """Ranks that parameters, gradients and optimizer state are sharded over (FSDP2)."""
    expert: int = 1
    """Ranks, among the `fsdp` ones, that the experts of a layer are divided among; tokens travel to them."""
    replicate: int = 1
    """Replicas of the sharded model, for several nodes (HSDP)."""
    cpu_offload: bool = False
    """Keep parameters and optimizer state in host memory between uses."""

    def __post_init__(self) -> None:
        _require(self, "fsdp", "expert", "replicate")
        if self.fsdp % self.expert:
            raise MoesaicError(f"expert must divide fsdp ({self.fsdp}), got {self.expert}")
        if self.cpu_offload and self.fsdp * self.replicate == 1:
            raise MoesaicError("cpu_offload needs sharding: set fsdp to 2 or more")


@dataclass(frozen=True, kw_only=True)
class CheckpointRecipe:
    """Run state for `--resume`, under OUT/state/."""

    every_steps: int | None = None
    """Steps between checkpoints; `null` writes none before the end (or SIGTERM, or Ctrl-C)."""
    keep: int = 2
    """How many of the latest to keep. The one with the lowest validation loss is kept beside them."""

    def __post_init__(self) -> None:
        _require(self, "every_steps", "keep")


@dataclass(frozen=True, kw_only=True)
class ValidationRecipe:
    """When the held-out sets of `data.validation` are run; the first and the last step are always followed by one."""

    every_steps: int | None = None
    """Steps between validations."""
    limit: int | None = None
    """First documents of each domain that are used. Default: all."""

    def __post_init__(self) -> None:
        _require(self, "every_steps", "limit")


@dataclass(frozen=True, kw_only=True)
class TrainRecipe:
    """Everything that decides a run of `train`."""

    model: str | ScratchModel
    """Folder, hub id `org/name[@revision]`, or `{family, config, moe}` to start from random weights."""
    tokenizer: str | None = None
    """Folder or hub id. Default: the model's; a model from scratch must name one."""
    data: DataRecipe
    """Sources, held-out sets and the sequence length."""
    routing: RuleConfig = field(default_factory=RuleConfig)
    """Rule during training, recorded in the result. Default: the model's own."""
    losses: LossesRecipe = field(default_factory=LossesRecipe)
    """What is added to the cross-entropy."""
    optimizer: OptimizerRecipe
    """AdamW and its schedule."""
    batch: BatchRecipe
    """Tokens per step."""
    budget: BudgetRecipe = field(default_factory=BudgetRecipe)
    """Length of the run; with `data.epochs` as well, whichever ends first."""
    expand: Transition | tuple[Transition, ...] = ()
    """Growth of the experts in mid-training: one expansion, or several in order."""
    precision: Precision = "bf16"
    """`bf16` computes in bf16 with fp32 master weights, gradients and moments; the result is saved in this type."""
    parallel: ParallelRecipe = field(default_factory=ParallelRecipe)
    """Ranks; the default is one process."""
    checkpoint: CheckpointRecipe = field(default_factory=CheckpointRecipe)
    """Run state."""
    validation: ValidationRecipe = field(default_factory=ValidationRecipe)
    """When held-out sets are run."""
    trackers: tuple[Tracker, ...] | None = None
    """Experiment trackers that get the numbers of metrics.jsonl: `tensorboard`, `wandb`, `mlflow`. Default: tensorboard
    where it is installed."""
    activation_checkpointing: bool = False
    """Run each layer forward again in backward instead of keeping its activations."""
    compile: bool = False
    """`torch.compile` every decoder layer."""
    seed: int = 0
    """Seed of initial weights, data order and pool sizes; at least 0 and less than 2**63."""

    @property
    def transitions(self) -> tuple[Transition, ...]:
        """The expansions, in order."""
        return (self.expand,) if isinstance(self.expand, Transition) else self.expand

    @property
    def data_ranks(self) -> int:
        """Ranks that see different sequences: all of them."""
        return self.parallel.fsdp * self.parallel.replicate

    @property
    def sequences_per_step(self) -> int:
        """Sequences of one optimizer step over all ranks."""
        return self.batch.tokens // self.data.sequence_length

    @property
    def micro_steps(self) -> int:
        """Forward and backward passes per optimizer step."""
        return self.sequences_per_step // (self.batch.micro_sequences * self.data_ranks)

    @property
    def budget_steps(self) -> int | None:
        """Optimizer steps that the budget allows; `None` where only `data.epochs` ends the run."""
        if self.budget.tokens is not None:
            return math.ceil(self.budget.tokens / self.batch.tokens)
        return self.budget.steps

    def __post_init__(self) -> None:
        check_seed(self.seed)
        if isinstance(self.model, ScratchModel) and self.tokenizer is None:
            raise MoesaicError(
                "tokenizer is missing: a model from scratch has none of its own, name a folder or hub id"
            )
        if self.budget_steps is None and self.data.epochs is None:
            raise MoesaicError("budget is missing: give budget.steps, budget.tokens or data.epochs")
        if self.budget_steps is not None:
            refuse_long_warmup(self.optimizer.warmup_steps, self.budget_steps, "the budget")
            positions(self.transitions, steps=self.budget_steps, tokens_per_step=self.batch.tokens)
        for key in ("every_steps", "limit"):
            if getattr(self.validation, key) is not None and not self.data.validation:
                raise MoesaicError(f"validation.{key} is set, but data.validation names no held-out set")
        unit = self.data.sequence_length * self.batch.micro_sequences * self.data_ranks
        if self.batch.tokens % unit:
            raise MoesaicError(
                f"batch.tokens ({self.batch.tokens}) must be a multiple of {unit} = data.sequence_length "
                f"({self.data.sequence_length}) * batch.micro_sequences ({self.batch.micro_sequences}) * "
                f"parallel.fsdp * parallel.replicate ({self.data_ranks})"
            )
        if isinstance(self.model, ScratchModel) and self.model.moe is not None:
            self._check_moe(self.model.moe)

    def _check_moe(self, moe: MoEShape) -> None:
        if moe.experts % self.parallel.expert:
            raise MoesaicError(
                f"parallel.expert ({self.parallel.expert}) must divide model.moe.experts ({moe.experts})"
            )
        if self.routing.pool_size is not None:
            self.routing.pool_range(top_k=moe.top_k, num_experts=moe.experts)


def load_train_recipe(source: str | Path | Mapping[str, Any], settings: Sequence[str] = ()) -> TrainRecipe:
    """Read a recipe from a YAML file, a name that `moesaic recipes list` shows, or plain values.

    Args:
        source: where it is.
        settings: `a.b.c=value` texts that win over it.

    Raises:
        MoesaicError: the file, a key or a value is wrong.
    """
    named = source if isinstance(source, Mapping) else recipe_source(str(source))
    return load_recipe(TrainRecipe, named, settings)


def scratch_config(model: ScratchModel) -> dict[str, Any]:
    """The content of config.json: the family's fields, and those of our MoE architecture where `moe` is given."""
    if model.moe is None:
        return {**model.config, "model_type": model.family}
    depth = model.config.get("num_hidden_layers")
    if not isinstance(depth, int):
        raise MoesaicError("model.config.num_hidden_layers is missing: MoE layers are chosen by their number")
    return {
        **model.config,
        **class_names(model.family),
        "num_experts": model.moe.experts,
        "num_experts_per_tok": model.moe.top_k,
        "moe_intermediate_size": model.moe.intermediate_size,
        "num_shared_experts": model.moe.shared_experts,
        "moe_layers": list(parse_layers(model.moe.layers, depth)),
        "routing_rule": model.moe.routing,
        "routing_weighting": model.moe.weighting,
        "expert_groups": _groups(model.moe),
        "group_score": "max",
        "expert_mlp_bias": bool(model.config.get("mlp_bias", False)),
    }


def _groups(moe: MoEShape) -> list[int] | None:
    """Group of each expert: consecutive experts, equally many in each."""
    if moe.groups is None:
        return None
    return [expert // (moe.experts // moe.groups) for expert in range(moe.experts)]
