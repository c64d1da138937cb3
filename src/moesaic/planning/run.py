"""`plan`: sizes and costs of a checkpoint, or of what a recipe makes, from headers and configs alone. No torch."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from moesaic.checkpoint.headers import tensor_bytes
from moesaic.checkpoint.source import Checkpoint, open_headers
from moesaic.common.errors import MoesaicError
from moesaic.common.recipe import load_recipe
from moesaic.common.verbs import verb
from moesaic.common.yaml_text import parse_yaml, read_yaml
from moesaic.families.config_values import refuse_config
from moesaic.families.costs import (
    attention_layers,
    bytes_per_value,
    flops_per_token,
    kv_cache_bytes,
    language_config,
    memory_to_convert,
    number,
)
from moesaic.families.counting import Shapes, config_shapes, count_shapes
from moesaic.families.dense import detect
from moesaic.families.dense_table import FAMILIES
from moesaic.families.family import our_base
from moesaic.families.moe import PREDICTION_KEYS
from moesaic.planning.config_only import open_config
from moesaic.planning.recipe import PlanRecipe, PlanReport
from moesaic.planning.serving import Device
from moesaic.recipes import read_recipe, shipped_recipes
from moesaic.training.planning import TrainPlan, plan_train
from moesaic.training.recipe import TrainRecipe
from moesaic.upcycling.plan import UpcyclePlan, resolve
from moesaic.upcycling.recipe import UpcycleRecipe

DEFAULT_CONTEXT = 4096
"""Tokens of the sequence that FLOPs and cache are stated for."""

CONVERSION_BYTES_PER_SECOND = 0.8e9
"""Bytes read plus written per second by one conversion; docs/plan.md has the measurement."""

_FAR = 1 << 40
"""Tokens beyond any sliding window."""

START_SECONDS = 2.0
"""Importing torch, reading headers, syncing."""

_RecipePlan = Callable[[Path | Mapping[str, Any], str, int], PlanReport | TrainPlan]


@verb(PlanRecipe, positional=("source",))
def plan(recipe: PlanRecipe) -> PlanReport | TrainPlan:
    """Return what a checkpoint or a recipe amounts to, from headers and configs alone.

    Python takes an opened `Checkpoint`, a mapping or an `UpcycleRecipe` as well.

    Returns:
        Parameters, bytes, FLOPs, memory; for a recipe also disk, download and expected minutes.

    Raises:
        MoesaicError: nothing is there, it cannot be read, or it is neither a checkpoint nor a recipe.
    """
    source, device = recipe.source, Device(name=recipe.gpu, mfu=recipe.mfu, price=recipe.price)
    context = DEFAULT_CONTEXT if recipe.context is None else recipe.context
    if context < 1:
        raise MoesaicError(f"context {context}: must be at least 1 token")
    report = _plan_of(source, context)
    return report.served_by(device) if isinstance(report, PlanReport) else report


def _plan_of(source: Any, context: int) -> PlanReport | TrainPlan:
    if isinstance(source, Checkpoint):
        return plan_checkpoint(source, context=context)
    if isinstance(source, UpcycleRecipe):
        return plan_upcycle(source, subject=f"{source.method} of {source.base}", context=context)
    if isinstance(source, Mapping):
        return _plan_recipe(source, source, "recipe", context)
    path = Path(source)
    if path.suffix in {".yaml", ".yml"}:
        return _plan_recipe(path, read_yaml(path), str(source), context)
    if path.suffix == ".json":
        return plan_checkpoint(open_config(path), context=context)
    if str(source) in {shipped.name for shipped in shipped_recipes()} and not path.exists():
        content = parse_yaml(read_recipe(str(source)), str(source))
        return _plan_recipe(content, content, str(source), context)
    return plan_checkpoint(open_headers(source), context=context)


def _plan_recipe(
    source: Path | Mapping[str, Any], content: Mapping[str, Any], subject: str, context: int
) -> PlanReport | TrainPlan:
    for key, plan_of in RECIPES.items():
        if key in content:
            return plan_of(source, subject, context)
    raise MoesaicError(
        f"{subject}: no recipe that can be planned: it has none of the keys {', '.join(RECIPES)} that tell its kind"
    )


def _plan_upcycle_recipe(source: Path | Mapping[str, Any], subject: str, context: int) -> PlanReport:
    return plan_upcycle(load_recipe(UpcycleRecipe, source), subject=subject, context=context)


def _plan_train_recipe(source: Path | Mapping[str, Any], subject: str, _context: int) -> TrainPlan:
    # No context: a training recipe says itself how long its sequences are.
    return plan_train(load_recipe(TrainRecipe, source), subject=subject)


RECIPES: Mapping[str, _RecipePlan] = {"method": _plan_upcycle_recipe, "optimizer": _plan_train_recipe}
"""A key that only one kind of recipe has -> the plan of that kind."""


# --- a checkpoint: dense, ours, or any family with experts ------------------------------------------------------------


def plan_checkpoint(checkpoint: Checkpoint, *, context: int) -> PlanReport:
    """Return sizes and costs of an opened checkpoint (headers are enough).

    Raises:
        MoesaicError: a dense or moesaic checkpoint lacks tensors or has unknown ones.
    """
    config = language_config(checkpoint)
    shapes: Shapes = {name: info.shape for name, info in checkpoint.tensors.items()}
    notes: list[str] = []
    convert = None
    model_type = str(config.get("model_type"))
    if model_type in FAMILIES:
        model = detect(checkpoint)
        config = model.config
        shapes = {name: info.shape for name, info in checkpoint.tensors.items() if name not in model.dropped}
        notes += model.notices
        convert = memory_to_convert()
    elif our_base(model_type):
        _check_ours(checkpoint, config)
    figures = _figures(
        shapes,
        config,
        context,
        weights=sum(info.nbytes for info in (checkpoint.stored or checkpoint.tensors).values()),
        value_bytes=bytes_per_value(checkpoint),
    )
    experts = figures["parameters"].moe_layers
    if checkpoint.stored is not None:
        notes.append("is quantised: bytes are those of its codes and scales, cache and FLOPs those of bf16")
    known, depth = len(attention_layers(shapes, config)), int(config.get("num_hidden_layers") or 0)
    if known < depth:
        notes.append(f"{depth - known} of {depth} layers have no key/value cache or one of a kind that is not counted")
    if not figures["parameters"].not_run:
        told = [f"{key} {config[key]}" for key in PREDICTION_KEYS if config.get(key)]
        notes += [f"{one}: such layers come on top on disk, and do not run" for one in told]
    if not experts and model_type not in FAMILIES:
        notes.append(f"{model_type} is not in the table of dense families: counted by tensor names, not checked")
        notes.append(str(refuse_config(checkpoint.config, config, checkpoint.name, sorted(FAMILIES))))
    return PlanReport(
        subject=checkpoint.name,
        kind="MoE checkpoint" if experts else "dense checkpoint",
        model_type=model_type,
        **figures,
        memory_to_convert_bytes=convert,
        download_bytes=checkpoint.download_bytes,
        notes=notes,
    )


def _figures(
    shapes: Shapes, config: Mapping[str, Any], context: int, *, weights: int, value_bytes: int
) -> dict[str, Any]:
    """What running a model takes, by the fields of the report."""
    cache = kv_cache_bytes(shapes, config, context, value_bytes)
    first, reach = (kv_cache_bytes(shapes, config, tokens, value_bytes) for tokens in (1, _FAR))
    return {
        "kv_cache_bytes_per_token": first,
        "kv_cache_bytes_per_further_token": kv_cache_bytes(shapes, config, _FAR + 1, value_bytes) - reach,
        "parameters": count_shapes(shapes, config),
        "weight_bytes": weights,
        "flops_per_token": flops_per_token(shapes, config, context),
        "context": context,
        "kv_cache_bytes": cache,
        "memory_to_run_bytes": weights + cache,
    }


def _check_ours(checkpoint: Checkpoint, config: Mapping[str, Any]) -> None:
    """Refuse a moesaic checkpoint whose tensors are not those of its config."""
    expected = config_shapes(config, f"{checkpoint.name}: config.json")
    for name, shape in expected.items():
        info = checkpoint.tensors.get(name)
        if info is None:
            raise MoesaicError(f"{checkpoint.name}: tensor {name} is missing: the checkpoint is incomplete")
        if info.shape != shape:
            raise MoesaicError(
                f"{checkpoint.name}: {name} has shape {list(info.shape)}, but config.json asks for {list(shape)}"
            )
    unknown = sorted(set(checkpoint.tensors) - set(expected))
    if unknown:
        raise MoesaicError(f"{checkpoint.name}: unexpected tensor {unknown[0]}: config.json does not describe it")


# --- an upcycle recipe ------------------------------------------------------------------------------------------------


def plan_upcycle(recipe: UpcycleRecipe, *, subject: str, context: int) -> PlanReport:
    """Return the sizes of the result of an upcycle recipe and the disk, memory, download and time of making it.

    Raises:
        MoesaicError: a source cannot be reached or is no possible base; sources or flags do not fit each other.
    """
    resolved = resolve(recipe, open_headers)
    base = resolved.base
    sources = [model.checkpoint for model in (base, *resolved.specialists)]
    dense = count_shapes({name: info.shape for name, info in base.checkpoint.tensors.items()}, base.config)
    return PlanReport(
        subject=subject,
        kind=f"upcycle recipe, method {recipe.method}",
        model_type=resolved.config["model_type"],
        **_figures(
            {tensor.name: tensor.shape for tensor in resolved.files.tensors},
            resolved.config,
            context,
            weights=sum(tensor.nbytes for tensor in resolved.files.tensors),
            value_bytes=tensor_bytes(resolved.dtype, (1,)),
        ),
        memory_to_convert_bytes=memory_to_convert(_made_expert_bytes(resolved)),
        download_bytes=sum(source.download_bytes for source in sources),
        disk_bytes=resolved.files.nbytes,
        minutes=_conversion_minutes(sources, resolved.files.nbytes),
        details={
            "base": f"{base.checkpoint.name}: {base.family.model_type}, {number(dense.total)} parameters",
            "MoE_layers": _layers(resolved),
            "weights_dtype": resolved.config["dtype"],
        },
        notes=resolved.notices,
    )


def _conversion_minutes(sources: list[Checkpoint], written: int) -> float:
    """Return the expected minutes of a conversion at `CONVERSION_BYTES_PER_SECOND`, without the download."""
    read = sum(info.nbytes for source in sources for info in source.tensors.values())
    return (START_SECONDS + (read + written) / CONVERSION_BYTES_PER_SECOND) / 60


def _made_expert_bytes(resolved: UpcyclePlan) -> int:
    """Return the bytes of one expert where the method computes experts instead of copying them."""
    if resolved.layer.method.preserves:
        return 0
    expert = resolved.layer.expert
    return tensor_bytes(resolved.dtype, (3 * expert.intermediate, expert.hidden))


def _layers(resolved: UpcyclePlan) -> str:
    layer = resolved.layer
    origin = f" = {layer.specialists} specialists x {layer.shards} shards" if layer.specialists else ""
    return (
        f"{len(resolved.moe_layers)} of {resolved.base.num_layers}: {layer.experts} experts{origin} of width "
        f"{layer.expert.intermediate}, top-{layer.top_k}, {layer.routing}, {layer.router_init} router"
    )
