"""From a recipe to an `UpcyclePlan`: opens the headers and refuses everything that cannot work. No torch."""

from collections.abc import Callable
from dataclasses import replace

from moesaic.checkpoint.layout import parse_size, plan_files
from moesaic.checkpoint.source import Checkpoint, open_checkpoint
from moesaic.common.errors import MoesaicError
from moesaic.families.dense import DenseModel, detect
from moesaic.upcycling.choices import Choices, choose
from moesaic.upcycling.compatibility import compare
from moesaic.upcycling.layer_ranges import parse_layers
from moesaic.upcycling.layout import (
    DTYPE_NAMES,
    UpcyclePlan,
    carried_tensors,
    dense_tensors,
    output_tensors,
    result_config,
)
from moesaic.upcycling.recipe import Specialist, UpcycleRecipe

_DTYPE_CODES = {name: code for code, name in DTYPE_NAMES.items()}


def resolve(recipe: UpcycleRecipe, opener: Callable[[str], Checkpoint] = open_checkpoint) -> UpcyclePlan:
    """Open the sources' headers, fill in every default and check that everything fits together.

    Args:
        recipe: what the user asks for.
        opener: `open_checkpoint`, or `open_headers` where no weights are needed.

    Raises:
        MoesaicError: anything that the conversion could stumble over, except the values of the weights.
    """
    shard_size = parse_size(recipe.shard_size)
    base = detect(opener(recipe.base))
    chosen = choose(
        recipe,
        hidden=base.hidden,
        intermediate=base.intermediate,
        biases=base.ffn_bias,
        initializer_range=float(base.config.get("initializer_range") or 0.02),
    )
    moe_layers = parse_layers(recipe.layers, base.num_layers)
    notices = [*base.notices, *chosen.notices]
    specialists = []
    for specialist in recipe.specialists:
        model = _open_specialist(specialist, opener)
        notices += [*model.notices, *compare(base, model, specialist.name)]
        specialists.append(model)
    carried = carried_tensors(base, tuple(specialists), chosen.shared_weights, moe_layers, recipe.seed)
    dtype = base.dtype if recipe.dtype == "auto" else _DTYPE_CODES[recipe.dtype]
    if dtype not in DTYPE_NAMES:
        raise MoesaicError(f"{base.checkpoint.name}: its weights are {dtype}; convert them to bf16, fp16 or fp32 first")
    own_dtypes = _own_dtypes(base, moe_layers) if recipe.dtype == "auto" else {}
    config = result_config(base, chosen.layer, moe_layers, dtype)
    return UpcyclePlan(
        recipe=_filled_in(recipe, base, tuple(specialists), chosen),
        base=base,
        specialists=tuple(specialists),
        layer=chosen.layer,
        shared_weights=chosen.shared_weights,
        moe_layers=moe_layers,
        dtype=dtype,
        config=config,
        files=plan_files(output_tensors(config, dtype, own_dtypes), shard_size),
        carried=carried,
        notices=tuple(notices),
    )


def _open_specialist(specialist: Specialist, opener: Callable[[str], Checkpoint]) -> DenseModel:
    try:
        return detect(opener(specialist.path))
    except MoesaicError as error:
        raise MoesaicError(f"--specialist {specialist.name}: {error}") from error


def _own_dtypes(base: DenseModel, moe_layers: tuple[int, ...]) -> dict[str, str]:
    """With `--dtype auto` a tensor that is carried over keeps its own dtype (fp32 norms in a bf16 model, say)."""
    return {name: info.dtype for name, info in dense_tensors(base, moe_layers).items()}


def _filled_in(
    recipe: UpcycleRecipe, base: DenseModel, specialists: tuple[DenseModel, ...], chosen: Choices
) -> UpcycleRecipe:
    """The recipe that gives the same bytes with nothing left to defaults, hub revisions pinned."""
    layer = chosen.layer
    pinned = zip(recipe.specialists, specialists, strict=True)
    return replace(
        recipe,
        base=_pinned(recipe.base, base.checkpoint),
        specialists=tuple(replace(spec, path=_pinned(spec.path, model.checkpoint)) for spec, model in pinned),
        experts=layer.experts,
        shards=layer.shards,
        top_k=layer.top_k,
        routing=layer.routing,
        router_init=layer.router_init,
        scale=chosen.scale,
        shared_weights=chosen.shared_weights,
    )


def _pinned(reference: str, checkpoint: Checkpoint) -> str:
    if checkpoint.revision is None:
        return reference
    return f"{reference.split('@')[0]}@{checkpoint.revision}"
