"""One MoE layer made of dense ones, in memory or as expressions; and all tensors of a result as expressions.

The same functions make layers of tensors for tests and for `verify`, and the expressions that a conversion streams.
E experts, M shards, S shared experts, D hidden; expert e*M + j is shard j of domain e.
"""

import copy
import functools
import json
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from moesaic.checkpoint.headers import TensorInfo
from moesaic.checkpoint.lazy import Lazy, blockwise, computed, concat, mean, stack, stored
from moesaic.common import seeds
from moesaic.families.counting import layer_of
from moesaic.families.experts import ExpertWeights, T, widened
from moesaic.upcycling.choices import LayerSpec
from moesaic.upcycling.method import DenseLayer
from moesaic.upcycling.plan import BASE, UpcyclePlan, dense_tensors
from moesaic.upcycling.recipe import RouterInit

# --- first values of a router, (E, D) in float32 ----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RouterSpec:
    """What router rows depend on."""

    experts: int
    """E."""
    hidden: int
    """D."""
    shards: int
    """M."""
    std: float


def random(spec: RouterSpec, generator: torch.Generator) -> Float[Tensor, "E D"]:
    """Independent rows from N(0, std)."""
    return seeds.normal((spec.experts, spec.hidden), spec.std, generator)


def zeros(spec: RouterSpec, generator: torch.Generator) -> Float[Tensor, "E D"]:  # noqa: ARG001
    """All experts tie for every token until the first update."""
    return torch.zeros(spec.experts, spec.hidden)


def tied(spec: RouterSpec, generator: torch.Generator) -> Float[Tensor, "E D"]:
    """E/M random rows, each repeated M times in a row, so that the shards of a group always tie (arXiv 2410.07524)."""
    assert spec.experts % spec.shards == 0
    base_rows = seeds.normal((spec.experts // spec.shards, spec.hidden), spec.std, generator)
    return base_rows.repeat_interleave(spec.shards, dim=0)


def latin_square(spec: RouterSpec, generator: torch.Generator) -> Float[Tensor, "E D"]:
    """The best base row sends the M domains of its virtual group to M *different* shards, with equal logits.

    The N = E/M domains form N/M virtual groups of M; each has M random base rows q. The row of (domain at position t of
    its virtual group, shard j) is `q[(j - t) mod M]`. Works under `one_per_group` and under plain top-k.
    """
    shards = spec.shards
    domains = spec.experts // shards
    assert domains * shards == spec.experts
    assert domains % shards == 0
    base_rows = seeds.normal((domains // shards, shards, spec.hidden), spec.std, generator)
    position, shard = torch.arange(shards)[:, None], torch.arange(shards)[None, :]
    return base_rows[:, (shard - position) % shards].reshape(spec.experts, spec.hidden)


ROUTER_INITS: dict[RouterInit, Callable[[RouterSpec, torch.Generator], Tensor]] = {
    "random": random,
    "zeros": zeros,
    "tied": tied,
    "latin_square": latin_square,
}


# --- one layer --------------------------------------------------------------------------------------------------------


def router_rows(spec: LayerSpec, layer: int) -> Float[Tensor, "E D"]:
    """The router of layer `layer`, (E, D) in float32."""
    rows = RouterSpec(experts=spec.experts, hidden=spec.expert.hidden, shards=spec.shards, std=spec.router_std)
    return ROUTER_INITS[spec.router_init](rows, seeds.generator(spec.seed, spec.method.name, layer, "router"))


def routed_experts(spec: LayerSpec, layer: int, ffns: Sequence[ExpertWeights[T]]) -> list[ExpertWeights[T]]:
    """The E routed experts of layer `layer` with their factors applied; `ffns`: the base's, then the specialists'."""
    dense = DenseLayer(
        base=ffns[BASE],
        specialists=tuple(ffns[BASE + 1 :]),
        experts=spec.experts,
        spec=spec.expert,
        draw=partial(seeds.generator, spec.seed, spec.method.name, layer, "expert"),
    )
    return [one.scale(gate_up=spec.factors.gate_up, down=spec.factors.down) for one in spec.method.experts(dense)]


def shared_experts(spec: LayerSpec, base: ExpertWeights[T]) -> ExpertWeights[T] | None:
    """S copies of the base's FFN side by side, as one FFN of width S*F; None where there are none."""
    if not spec.shared_experts:
        return None
    one = base.shard(0, 1).scale(gate_up=1.0, down=spec.factors.shared_down)
    return ExpertWeights.concatenate([one] * spec.shared_experts)


# --- all tensors of a result ------------------------------------------------------------------------------------------


def new_tensors(plan: UpcyclePlan) -> dict[str, Lazy]:
    """All tensors of the result, in the order of its files."""
    made = carried_tensors(plan)
    for layer in plan.moe_layers:
        made |= _layer_tensors(plan, layer)
    for output in plan.outputs:
        if output.name not in made:  # shared experts of a model that is all random
            made[output.name] = fresh(plan, output.name, output.shape)
    return {output.name: made[output.name].cast(output.dtype) for output in plan.outputs}


def _layer_tensors(plan: UpcyclePlan, layer: int) -> dict[str, Lazy]:
    """Router and experts of one layer under the names of our architecture: stacked, gate rows above up rows."""
    spec, mlp = plan.layer, f"model.layers.{layer}.mlp."
    # As wide as both the stored numbers and the result's: a product is rounded once, to the result's dtype.
    ffns = [widened(model.ffns[layer], plan.dtype) for model in plan.models]
    experts = [one.map(lambda _, value: value.cast(plan.dtype)).parts() for one in routed_experts(spec, layer, ffns)]
    rows = partial(router_rows, spec, layer)
    made = {
        f"{mlp}gate.weight": computed((spec.experts, spec.expert.hidden), "F32", rows),
        f"{mlp}experts.gate_up_proj": stack([concat([one["gate_ID"], one["up_ID"]]) for one in experts]),
        f"{mlp}experts.down_proj": stack([one["down_DI"] for one in experts]),
    }
    if spec.expert.biases:
        biases = [concat([one["gate_bias_I"], one["up_bias_I"]]) for one in experts]
        made[f"{mlp}experts.gate_up_proj_bias"] = stack(biases)
        made[f"{mlp}experts.down_proj_bias"] = stack([one["down_bias_D"] for one in experts])
    shared = None if plan.shared_weights == "reinit" else shared_experts(spec, ffns[BASE])
    for part, value in ({} if shared is None else shared.parts()).items():
        kind = "bias" if "bias" in part else "weight"
        made[f"{mlp}shared_expert.{part.partition('_')[0]}_proj.{kind}"] = value
    return made


def carried_tensors(plan: UpcyclePlan) -> dict[str, Lazy]:
    """The tensors that are no experts; the FFNs of layers that stay dense are among them.

    `random-specialist` draws one specialist per layer, and one for the tensors outside the layers (DivMoE, appendix E).
    """
    models = [dense_tensors(model, plan.moe_layers) for model in plan.models]

    def made(name: str, info: TensorInfo) -> Lazy:
        found = [stored(model[name]) for model in models]
        if plan.shared_weights == "random-specialist":
            layer = layer_of(name)
            place = "outside the layers" if layer is None else layer
            return found[1 + seeds.key(plan.layer.seed, "random-specialist", place) % len(plan.specialists)]
        if plan.shared_weights == "reinit":
            return fresh(plan, name, info.shape)
        return mean(found) if plan.shared_weights == "mean" else found[BASE]

    return {name: made(name, info) for name, info in models[BASE].items()}


def used_tensors(plan: UpcyclePlan, tensors: dict[str, Lazy]) -> list[list[TensorInfo]]:
    """Per source, the stored tensors that go into the result."""
    keys = {(info.file, info.name) for one in tensors.values() for info in one.sources}
    used = []
    for model in plan.models:
        stored_here = list(model.checkpoint.tensors.values())
        found = [info for info in stored_here if (info.file, info.name) in keys]
        # Where all that belongs to the model is used, the leftovers (copies of a tied head, say) complete the hash.
        complete = len(found) == len(stored_here) - len(model.left_out) - len(model.dropped)
        used.append(stored_here if complete else found)
    return used


# --- everything at random, as the base's architecture would (`--shared-weights reinit`) -------------------------------

_ONE_AT_A_TIME = threading.Lock()
"""Classes draw from torch's global generator, and jobs run in threads."""


def fresh(plan: UpcyclePlan, name: str, shape: tuple[int, ...]) -> Lazy:
    """First values of one tensor, in float32.

    Weights of linear maps and embeddings are N(0, initializer_range), all else (norms, biases, the parameters of an
    attention itself) what the base's own class starts it with.
    """
    seed, std = plan.layer.seed, plan.layer.expert.initializer_range

    def blocks() -> Iterator[tuple[int, Tensor]]:
        own = class_value(plan.base.config, name, seeds.key(seed, "reinit", name))
        if own is not None:
            yield 0, own.flatten()
        elif len(shape) > 1:
            yield from seeds.normal_blocks(math.prod(shape), std, seeds.generator(seed, "reinit", name))
        else:
            yield 0, torch.zeros(shape)  # the bias of a shared expert

    return blockwise(shape, "F32", blocks)


def class_value(config: dict[str, Any], name: str, key: int) -> Tensor | None:
    """The value that a base's class starts a parameter with, in float32 and with its shape.

    Args:
        config: the base's config.json, of its text part.
        name: the parameter's name in the base.
        key: 64 bits that seed what is drawn.

    Returns:
        None for the weight of a linear map or an embedding, and for what the class does not have.
    """
    parent, _, attribute = name.rpartition(".")
    with _ONE_AT_A_TIME, torch.random.fork_rng(devices=[]):
        model = _meta_model(json.dumps(config, sort_keys=True))
        try:
            module, stored = model.get_submodule(parent), model.get_parameter(name)
        except AttributeError:
            return None
        if isinstance(module, nn.Linear | nn.Embedding) and attribute == "weight":
            return None
        module = copy.deepcopy(module)
        # Only this parameter has memory. A norm starts at 1 or, where the class adds 1 itself, at 0: the class knows.
        module.register_parameter(attribute, nn.Parameter(torch.full(stored.shape, torch.nan, dtype=torch.float32)))
        torch.manual_seed(key % 2**63)
        model._init_weights(module)
    value = module.get_parameter(attribute).detach()
    assert not value.isnan().any(), f"the class of {name} does not say what it starts with"
    return value


@functools.lru_cache(maxsize=1)
def _meta_model(config: str) -> Any:
    """The base's class without memory for its parameters."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from moesaic.loading import explained_errors

    with torch.device("meta"), explained_errors("config.json of the base: transformers cannot use a value in it"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**json.loads(config)))
