"""The plan of a checkpoint: dense, ours, or any MoE family, counted from its headers."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from moesaic.checkpoint.source import Checkpoint
from moesaic.common.errors import MoesaicError
from moesaic.families.config_values import DEPTH_KINDS, check_depth, check_values, refuse_config
from moesaic.families.counting import Shapes, config_shapes, count_shapes, is_embedding, is_head, layer_of
from moesaic.families.dense import detect
from moesaic.families.dense_table import FAMILIES, WRAPPER_TEXT_TYPES
from moesaic.families.family import MOE_PREFIX
from moesaic.planning.costs import flops_per_token, kv_cache_bytes, memory_to_convert
from moesaic.planning.report import PlanReport

_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


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
    elif model_type.startswith(MOE_PREFIX):
        _check_ours(checkpoint, config)
    weight_bytes = sum(info.nbytes for info in checkpoint.tensors.values())
    count = count_shapes(shapes, config)
    kind = "MoE checkpoint" if count.moe_layers else "dense checkpoint"
    if not count.moe_layers and model_type not in FAMILIES:
        notes.append(f"{model_type} is not in the table of dense families: counted by tensor names, not checked")
        notes.append(str(refuse_config(checkpoint.config, config, checkpoint.name, sorted(FAMILIES))))
    cache = kv_cache_bytes(shapes, config, context, bytes_per_value(checkpoint))
    return PlanReport(
        subject=checkpoint.name,
        kind=kind,
        model_type=model_type,
        parameters=count,
        weight_bytes=weight_bytes,
        flops_per_token=flops_per_token(shapes, config, context),
        context=context,
        kv_cache_bytes=cache,
        memory_to_run_bytes=weight_bytes + cache,
        memory_to_convert_bytes=convert,
        download_bytes=checkpoint.download_bytes,
        notes=notes,
    )


def language_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the text config of a checkpoint, with the tie flag that its tensors show where the config has none."""
    config: Mapping[str, Any] = checkpoint.config
    inner = config.get("text_config")
    text = dict(inner) if isinstance(inner, Mapping) else dict(config)
    if isinstance(inner, Mapping):
        text.setdefault("model_type", WRAPPER_TEXT_TYPES.get(str(config.get("model_type"))))
        text.setdefault("tie_word_embeddings", config.get("tie_word_embeddings"))
    has_head = any(is_head(name) for name in checkpoint.tensors)
    has_embedding = any(is_embedding(name) for name in checkpoint.tensors)
    if text.get("tie_word_embeddings") is None or not has_head:
        text["tie_word_embeddings"] = has_embedding and not has_head
    layers = {layer for name in checkpoint.tensors if (layer := layer_of(name)) is not None}
    text.setdefault("num_hidden_layers", max(layers, default=0) + 1)
    name = f"{checkpoint.name}: config.json"
    check_values(text, name, kinds=DEPTH_KINDS)
    check_depth(text, checkpoint.tensors, name)
    return text


def bytes_per_value(checkpoint: Checkpoint) -> int:
    """Return the bytes per number of the data type that most tensors of a checkpoint have."""
    common = Counter(info.dtype for info in checkpoint.tensors.values()).most_common(1)
    return _BYTES.get(common[0][0], 2) if common else 2


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
