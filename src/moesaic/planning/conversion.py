"""The plan of an upcycle recipe: what the result is, and what making it takes, from the sources' headers."""

from moesaic.checkpoint.headers import tensor_bytes
from moesaic.checkpoint.source import Checkpoint, open_headers
from moesaic.families.counting import count_shapes
from moesaic.planning.costs import flops_per_token, kv_cache_bytes, memory_to_convert
from moesaic.planning.report import PlanReport, number
from moesaic.upcycling.plan import UpcyclePlan, resolve
from moesaic.upcycling.recipe import UpcycleRecipe

CONVERSION_BYTES_PER_SECOND = 0.8e9
"""Bytes read plus written per second by one conversion; docs/plan.md has the measurement."""

START_SECONDS = 2.0
"""Importing torch, reading headers, syncing."""


def plan_upcycle(recipe: UpcycleRecipe, *, subject: str, context: int) -> PlanReport:
    """Return the sizes of the result of an upcycle recipe and the disk, memory, download and time of making it.

    Raises:
        MoesaicError: a source cannot be reached or is no possible base; sources or flags do not fit each other.
    """
    resolved = resolve(recipe, open_headers)
    base = resolved.base
    sources = [model.checkpoint for model in (base, *resolved.specialists)]
    shapes = {tensor.name: tensor.shape for tensor in resolved.files.tensors}
    weights = sum(tensor.nbytes for tensor in resolved.files.tensors)
    cache = kv_cache_bytes(shapes, resolved.config, context, tensor_bytes(resolved.dtype, (1,)))
    dense = count_shapes({name: info.shape for name, info in base.checkpoint.tensors.items()}, base.config)
    return PlanReport(
        subject=subject,
        kind=f"upcycle recipe, method {recipe.method}",
        model_type=resolved.config["model_type"],
        parameters=count_shapes(shapes, resolved.config),
        weight_bytes=weights,
        flops_per_token=flops_per_token(shapes, resolved.config, context),
        context=context,
        kv_cache_bytes=cache,
        memory_to_run_bytes=weights + cache,
        memory_to_convert_bytes=memory_to_convert(_made_expert_bytes(resolved)),
        download_bytes=sum(source.download_bytes for source in sources),
        disk_bytes=resolved.files.nbytes,
        minutes=conversion_minutes(sources, resolved.files.nbytes),
        details={
            "base": f"{base.checkpoint.name}: {base.family.model_type}, {number(dense.total)} parameters",
            "MoE_layers": _layers(resolved),
            "weights_dtype": resolved.config["dtype"],
        },
        notes=resolved.notices,
    )


def conversion_minutes(sources: list[Checkpoint], written: int) -> float:
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
