"""What a run of `train` will need: parameters, memory and traffic per device, FLOPs and hours.

Without torch, but for models from scratch of a family that is in none of our tables.

The formulas are those of our loop: AdamW in fp32, FSDP2 over `parallel.fsdp` ranks, experts divided over
`parallel.expert` of them. `tests/distributed/test_train_costs.py` holds them against what two ranks allocate and send.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from moesaic.checkpoint.source import open_headers
from moesaic.common.shown import Shown
from moesaic.families.config_values import require
from moesaic.families.costs import attention_layers, flops_per_token, language_config, number, size
from moesaic.families.counting import (
    ParameterCount,
    Shapes,
    config_shapes,
    count_shapes,
    is_embedding,
    is_routed,
    layer_of,
)
from moesaic.families.dense_table import FAMILIES
from moesaic.families.family import our_base
from moesaic.training.fit import refuse_misfit
from moesaic.training.growth_plan import GrowthPlan, plan_growth
from moesaic.training.recipe import ScratchModel, TrainRecipe, scratch_config

PEAK_FLOPS: Mapping[str, float] = {
    "A100": 312e12,
    "B200": 2250e12,
    "H100": 989e12,
    "H20": 148e12,
    "H200": 989e12,
    "L40S": 362e12,
}
"""Dense bf16 FLOP/s of a device by a word of its name, from the makers' data sheets (without sparsity)."""
_DEVICE = "H100"
UTILISATION = 0.4
"""Share of the peak that hours are stated for: what DivMoE's 26,500 H20-hours for 500B tokens come to."""
_FP32 = 4
_ADAMW_BYTES = 4 * _FP32  # weight, gradient, two moments


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes that one device sends in one optimizer step, by what they are."""

    gather: int
    """Shards of the weights, for forward and backward of every micro-step."""
    reduce: int
    """Gradients to the ranks that own them, every micro-step."""
    replicas: int
    """Gradient shards between the replicas."""
    experts: int
    """Tokens to their experts and back, forward and backward."""

    @property
    def total(self) -> int:
        """All of them."""
        return self.gather + self.reduce + self.replicas + self.experts


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one device."""

    state: int
    """fp32 weights, gradients and moments (this rank's shards), and bf16 copies where one process trains in bf16."""
    gathered: int
    """Whole weights and gradients of the layers at work, under FSDP."""
    activations: int
    """Estimate: what backward needs of one micro-batch, logits included."""

    @property
    def total(self) -> int:
        """All of them; kernels' workspaces and fragmentation come on top."""
        return self.state + self.gathered + self.activations


@dataclass(frozen=True, kw_only=True, repr=False)
class TrainPlan(Shown):
    """What a run amounts to."""

    subject: str
    model_type: str
    parameters: ParameterCount
    steps: int | None
    """`None` where only `data.epochs` ends the run; figures of the whole run are then those of one step."""
    tokens: int
    """Positions of the whole run, padding included."""
    devices: int
    micro_steps: int
    flops_per_token: int
    """Forward and backward, recomputation not counted."""
    flops: float
    """Of the whole run."""
    device_hours: float
    """At `utilisation` of `peak_flops`."""
    memory: Memory
    traffic: Traffic
    peak_flops: float = PEAK_FLOPS[_DEVICE]
    utilisation: float = UTILISATION
    growth: GrowthPlan | None = None
    """The expansions; sizes, memory and traffic are then those of the last size, FLOPs those of all steps."""
    notes: tuple[str, ...] = field(default=())

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        own = {name: value for name, value in vars(self).items() if name != "growth"}
        return {
            **own,
            "kind": "train recipe",
            "parameters": self.parameters.to_dict(),
            "memory": {**asdict(self.memory), "total": self.memory.total},
            "traffic": {**asdict(self.traffic), "total": self.traffic.total},
            "growth": None if self.growth is None else self.growth.to_dict(),
            "notes": list(self.notes),
        }

    def lines(self) -> list[str]:
        """Text for people."""
        count, memory, traffic = self.parameters, self.memory, self.traffic
        steps = "one step (the length of the data decides how many)" if self.steps is None else f"{self.steps:,} steps"
        rows = [
            ("total parameters", f"{number(count.total)} ({count.total:,})"),
            ("active parameters", f"{number(count.active)} ({count.active:,})"),
            ("run", f"{steps}, {number(self.tokens)} tokens, {self.micro_steps:,} micro-steps a step"),
            ("devices", f"{self.devices:,}"),
            (
                "memory per device",
                f"{size(memory.total)}: {size(memory.state)} weights, gradients and moments, {size(memory.gathered)} "
                f"gathered layers, about {size(memory.activations)} activations",
            ),
            (
                "sent per device and step",
                f"{size(traffic.total)}: {size(traffic.gather)} weights, {size(traffic.reduce)} gradients, "
                f"{size(traffic.replicas)} between replicas, {size(traffic.experts)} tokens to experts",
            ),
            ("training FLOPs per token", f"{self.flops_per_token / 1e9:.2f} GFLOP"),
            ("training FLOPs", f"{self.flops:.2e}"),
            (
                "device hours",
                f"{self.device_hours:,.1f} at {self.utilisation:.0%} of {self.peak_flops / 1e12:.0f} TFLOP/s "
                f"({_DEVICE}, bf16)",
            ),
        ]
        if self.devices > 1:
            rows.append(("wall time", f"{self.device_hours / self.devices:,.1f} hours"))
        width = max(len(name) for name, _ in rows)
        head = f"{self.subject}: train recipe, {self.model_type}"
        growth = [] if self.growth is None else self.growth.lines()
        return [
            head,
            *(f"  {name:<{width}}  {value}" for name, value in rows),
            *growth,
            *(f"  note: {n}" for n in self.notes),
        ]


def plan_train(recipe: TrainRecipe, *, subject: str = "recipe") -> TrainPlan:
    """Say what `recipe` will need, from headers and configs alone.

    Raises: `MoesaicError` where the model can't be found, its config makes none, or the recipe doesn't fit it.
    """
    shapes, config = _model(recipe)
    config = _with_sizes(shapes, config, subject)
    refuse_misfit(recipe, config)
    growth = plan_growth(recipe, shapes, config)
    if growth is not None:
        shapes, config = growth.shapes, growth.config
    steps = recipe.budget_steps
    tokens = (steps or 1) * recipe.batch.tokens
    flops = 3 * flops_per_token(shapes, config, recipe.data.sequence_length)
    all_flops = _all_flops(recipe, growth, flops)
    return TrainPlan(
        subject=subject,
        model_type=str(config.get("model_type")),
        parameters=count_shapes(shapes, config),
        steps=steps,
        tokens=tokens,
        devices=recipe.data_ranks,
        micro_steps=recipe.micro_steps,
        flops_per_token=flops,
        flops=all_flops,
        device_hours=all_flops / (PEAK_FLOPS[_DEVICE] * UTILISATION) / 3600,
        memory=memory_per_device(recipe, shapes, config),
        traffic=traffic_per_step(recipe, shapes, config),
        growth=growth,
        notes=_notes(recipe),
    )


def _all_flops(recipe: TrainRecipe, growth: GrowthPlan | None, flops: int) -> float:
    """FLOPs of all steps, each with the size that it has."""
    if growth is None or recipe.budget_steps is None:
        return float(flops) * (recipe.budget_steps or 1) * recipe.batch.tokens
    return float(sum((phase.steps or 0) * phase.flops_per_token for phase in growth.phases)) * recipe.batch.tokens


def _model(recipe: TrainRecipe) -> tuple[Shapes, Mapping[str, Any]]:
    if isinstance(recipe.model, ScratchModel):
        return _scratch_shapes(recipe.model)
    checkpoint = open_headers(recipe.model)
    return {name: info.shape for name, info in checkpoint.tensors.items()}, language_config(checkpoint)


def _with_sizes(shapes: Shapes, config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The config with the sizes that are left to the class's defaults in it, as the tensors have them."""
    for tensor, shape in shapes.items():
        if is_embedding(tensor) and len(shape) == 2:
            depth = 1 + max((layer for one in shapes if (layer := layer_of(one)) is not None), default=0)
            config = {"vocab_size": shape[0], "hidden_size": shape[1], "num_hidden_layers": depth, **config}
            break
    require(config, ("vocab_size", "hidden_size", "num_hidden_layers"), name)
    return config


def _scratch_shapes(scratch: ScratchModel) -> tuple[Shapes, Mapping[str, Any]]:
    """Tensor name -> shape, and the config with what counting reads.

    From our tables without torch where they have the family; else from the family's class on the meta device, which has
    shapes and no numbers.
    """
    config = scratch_config(scratch)
    model_type = str(config["model_type"])
    if model_type in FAMILIES or our_base(model_type):
        return config_shapes(config), config
    from moesaic.training.start import make_config, makes_a_model

    made = make_config(scratch)
    with makes_a_model(scratch.family):
        return class_shapes(made)


def class_shapes(config: Any) -> tuple[dict[str, tuple[int, ...]], dict[str, Any]]:
    """Tensor name -> shape of the class of a transformers config, and its text config with what counting reads."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    tensors = dict(model.named_parameters())
    tensors |= {name: tensor for name, tensor in model.state_dict().items() if name not in parameters}
    text = model.config.get_text_config()
    sizes = {name: getattr(text, name) for name in ("hidden_size", "num_hidden_layers", "vocab_size")}
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}, {**text.to_dict(), **sizes}


def _notes(recipe: TrainRecipe) -> tuple[str, ...]:
    notes = ["backward counts as twice the forward; recomputation is in neither FLOPs nor utilisation"]
    if recipe.transitions:
        notes.append(
            "parameters, memory and traffic are those after the last expansion; training FLOPs are of all steps"
        )
    balance = recipe.losses.balance
    if balance is not None and balance.scope == "step" and recipe.micro_steps > 1:
        notes.append(
            "losses.balance.scope step: one more forward pass of every micro-batch, which is not in FLOPs or time"
        )
    if recipe.optimizer.frozen:
        notes.append("frozen parameters are counted as if they trained")
    return tuple(notes)


def memory_per_device(recipe: TrainRecipe, shapes: Shapes, config: Mapping[str, Any]) -> Memory:
    """Bytes that training holds on one device.

    State: 16 bytes per parameter over `fsdp` ranks (experts: divided first, then sharded among the ranks that share
    them, the same product). Gathered: the layer at work and the next one, and the weights outside the layers, in the
    compute type, and the gradients of one layer in it; experts that are divided are gathered from `fsdp / expert` ranks
    only.
    """
    bf16 = recipe.precision == "bf16"
    width = 2 if bf16 else _FP32
    parallel = recipe.parallel
    total = sum(math.prod(shape) for shape in shapes.values())
    state = _ADAMW_BYTES * total // parallel.fsdp
    gathered = 0
    if recipe.data_ranks == 1:
        state += width * total if bf16 else 0
    else:
        layers: dict[int | None, int] = {}
        for name, shape in shapes.items():
            elements = math.prod(shape) // (parallel.expert if is_routed(name) else 1)
            layers[layer_of(name)] = layers.get(layer_of(name), 0) + elements
        outside = layers.pop(None, 0)
        largest = max(layers.values(), default=0)
        gathered = width * (outside + 2 * largest) + width * max(outside, largest)
    return Memory(state=state, gathered=gathered, activations=_activations(recipe, shapes, config))


def _activations(recipe: TrainRecipe, shapes: Shapes, config: Mapping[str, Any]) -> int:
    """Estimate of what is kept for backward: inputs of every matrix product, in the compute type, and the logits.

    With activation checkpointing, one residual stream per layer and everything of the layer at work.
    """
    width = 2 if recipe.precision == "bf16" else _FP32
    tokens = recipe.batch.micro_sequences * recipe.data.sequence_length
    hidden = int(config["hidden_size"])
    layers = int(config["num_hidden_layers"])
    count = count_shapes(shapes, config)
    ffn = int(config.get("intermediate_size") or 0)
    per_expert = 3 * int(config.get("moe_intermediate_size") or ffn) + 2 * hidden
    moe_layers = count.moe_layers
    shared = count.shared / (hidden * moe_layers) if moe_layers else 0
    moe = count.top_k * per_expert + shared
    mlp = (moe_layers * moe + (layers - moe_layers) * 3 * ffn) / layers
    attention = sum(w.query + w.value + w.cached for w in attention_layers(shapes, config).values()) / layers
    layer = 4 * hidden + attention + mlp
    kept = layers * hidden + layer if recipe.activation_checkpointing else layers * (layer + hidden)
    logits = 2 * int(config["vocab_size"])  # and their gradient
    return round(tokens * width * (kept + logits))


def traffic_per_step(recipe: TrainRecipe, shapes: Shapes, config: Mapping[str, Any]) -> Traffic:
    """Bytes that one device sends per optimizer step, all micro-steps together, with ring-like collectives.

    A gather among n ranks brings (n-1)/n of the tensor to each, and so much is sent by each; a reduction the same. The
    weights outside the layers stay gathered from forward to backward, those of the layers are gathered twice.
    """
    width = 2 if recipe.precision == "bf16" else _FP32
    parallel, micro_steps = recipe.parallel, recipe.micro_steps
    gather = reduce = replicas = 0.0
    for name, shape in shapes.items():
        ranks, elements = parallel.fsdp, float(math.prod(shape))
        if is_routed(name) and parallel.expert > 1:
            ranks, elements = parallel.fsdp // parallel.expert, elements / parallel.expert
        share = elements * (ranks - 1) / ranks
        gather += share * width * micro_steps * (2 if layer_of(name) is not None else 1)
        reduce += share * _FP32 * micro_steps
        replicas += 2 * elements / ranks * _FP32 * micro_steps * (parallel.replicate - 1) / parallel.replicate
    return Traffic(
        gather=round(gather),
        reduce=round(reduce),
        replicas=round(replicas),
        experts=_expert_traffic(recipe, shapes, config, width),
    )


def _expert_traffic(recipe: TrainRecipe, shapes: Shapes, config: Mapping[str, Any], width: int) -> int:
    """Dispatch and combine, forward and backward (forward twice with activation checkpointing), balanced experts."""
    ranks = recipe.parallel.expert
    if ranks == 1:
        return 0
    count = count_shapes(shapes, config)
    tokens = recipe.batch.tokens // recipe.data_ranks
    passes = 6 if recipe.activation_checkpointing else 4
    elements = tokens * count.top_k * int(config["hidden_size"]) * count.moe_layers * passes
    return round(elements * width * (ranks - 1) / ranks)
