"""The plan of an upcycle recipe: what the result is, and what making it takes, from the sources' headers."""

from typing import Any

from moesaic.checkpoint.headers import tensor_bytes
from moesaic.checkpoint.layout import OutputTensor, parse_size, plan_files
from moesaic.checkpoint.source import Checkpoint, open_headers
from moesaic.families.dense import DenseModel, detect
from moesaic.planning.costs import flops_per_token, kv_cache_bytes
from moesaic.planning.counting import count_shapes
from moesaic.planning.report import PlanReport, number
from moesaic.planning.shapes import MOE_PREFIX, config_shapes
from moesaic.upcycling.choices import Choices, choose
from moesaic.upcycling.layer_ranges import parse_layers
from moesaic.upcycling.recipe import UpcycleRecipe

CONVERSION_BYTES_PER_SECOND = 0.8e9
"""Bytes read plus written per second by one conversion with the page cache warm; docs/plan.md has the measurement."""

INTERPRETER_BYTES = 420_000_000
"""Resident memory of Python with torch imported, before any tensor is read."""

_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def plan_upcycle(recipe: UpcycleRecipe, *, subject: str, context: int) -> PlanReport:
    """Return the sizes of the result of an upcycle recipe and the disk, memory, download and time of making it.

    Raises:
        MoesaicError: a source cannot be reached or is no possible base; a flag does not fit it.
    """
    base = detect(open_headers(recipe.base))
    sources = [base.checkpoint, *(open_headers(specialist.path) for specialist in recipe.specialists)]
    chosen = choose(
        recipe,
        hidden=base.hidden,
        intermediate=base.intermediate,
        biases=base.ffn_bias,
        initializer_range=float(base.config.get("initializer_range") or 0.02),
    )
    config = result_config(base, chosen, parse_layers(recipe.layers, base.num_layers))
    shapes = config_shapes(config)
    dtype = _DTYPES.get(recipe.dtype, base.dtype)
    tensors = [OutputTensor(name=name, dtype=dtype, shape=shape) for name, shape in shapes.items()]
    written = plan_files(tensors, parse_size(recipe.shard_size)).nbytes
    weights = sum(tensor.nbytes for tensor in tensors)
    cache = kv_cache_bytes(shapes, config, context, tensor_bytes(dtype, (1,)))
    dense = count_shapes({name: info.shape for name, info in base.checkpoint.tensors.items()}, base.config)
    return PlanReport(
        subject=subject,
        kind=f"upcycle recipe, method {recipe.method}",
        model_type=config["model_type"],
        parameters=count_shapes(shapes, config),
        weight_bytes=weights,
        flops_per_token=flops_per_token(shapes, config, context),
        context=context,
        kv_cache_bytes=cache,
        memory_to_run_bytes=weights + cache,
        memory_to_convert_bytes=memory_to_convert(hidden=base.hidden, intermediate=base.intermediate, dtype=dtype),
        download_bytes=sum(source.download_bytes for source in sources),
        disk_bytes=written,
        minutes=conversion_minutes(sources, written),
        details={"base": f"{base.checkpoint.name}: {number(dense.total)} parameters", "dtype": dtype},
        notes=(*base.notices, *chosen.notices),
    )


def result_config(base: DenseModel, chosen: Choices, moe_layers: tuple[int, ...]) -> dict[str, Any]:
    """Return the keys of the result's config that decide its tensors."""
    layer = chosen.layer
    return {
        **base.config,
        "model_type": MOE_PREFIX + base.family.model_type,
        "num_experts": layer.experts,
        "num_experts_per_tok": layer.top_k,
        "moe_intermediate_size": layer.expert.intermediate,
        "num_shared_experts": layer.shared_experts,
        "moe_layers": list(moe_layers),
        "expert_mlp_bias": base.ffn_bias,
    }


def memory_to_convert(*, hidden: int, intermediate: int, dtype: str) -> int:
    """Return the estimated peak resident bytes of a conversion: the interpreter and one FFN in float32 and `dtype`.

    It does not depend on the number of layers, experts or files, because tensors are streamed.
    """
    ffn = (3 * intermediate, hidden)
    return INTERPRETER_BYTES + tensor_bytes("F32", ffn) + tensor_bytes(dtype, ffn)


def conversion_minutes(sources: list[Checkpoint], written: int) -> float:
    """Return the expected minutes of a conversion at `CONVERSION_BYTES_PER_SECOND`, without the download."""
    read = sum(info.nbytes for source in sources for info in source.tensors.values())
    return (read + written) / CONVERSION_BYTES_PER_SECOND / 60
