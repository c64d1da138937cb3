"""What a model costs to run: FLOPs per token and bytes of memory, from shapes and config; in words too. No torch."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moesaic.checkpoint.source import Checkpoint
from moesaic.common.workers import default_workers
from moesaic.families.config_values import DEPTH_KINDS, check_depth, check_values
from moesaic.families.counting import Shapes, count_shapes, is_embedding, is_head, layer_of, layer_windows
from moesaic.families.dense_table import WRAPPER_TEXT_TYPES

_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}

FLOPS_FORMULA = (
    "2 per weight of every active matrix (output head included, embedding lookup not) + per attention layer "
    "2 x (query width + value width) x positions attended, averaged over a causal sequence of the stated length"
)

STREAMING_BYTES = 250_000_000
"""Resident memory of Python with torch (225 MB) and the headers."""

WORKER_BYTES = 20_000_000
"""Blocks that one worker holds."""

MADE_EXPERT_COPIES = 3.2
"""Peak size of an expert that is computed, in multiples of its own."""


@dataclass(frozen=True, kw_only=True)
class AttentionWidths:
    """Numbers per token of one attention layer: queries, values summed by the heads, and cached keys and values."""

    query: int
    value: int
    cached: int


def attention_layers(shapes: Shapes, config: Mapping[str, Any]) -> dict[int, AttentionWidths]:
    """Return layer -> widths for every layer whose attention is recognised by its projections' names.

    Recognised: separate q/k/v, fused qkv, and DeepSeek's latent attention (whose cache holds the latents).
    """
    names: dict[int, dict[str, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        layer = layer_of(name)
        if layer is None or not name.endswith(".weight") or len(shape) != 2 or "attn" not in name:
            continue
        names.setdefault(layer, {})[name.split(".")[-2]] = shape
    depth = int(config.get("num_hidden_layers") or len(names))
    kinds: Sequence[str] = config.get("layer_types") or ()
    linear = {layer for layer, kind in enumerate(kinds) if kind == "linear_attention"}  # a state, and no cache
    read = ((layer, projections) for layer, projections in sorted(names.items()) if layer < depth)
    found = ((layer, _widths(projections)) for layer, projections in read if layer not in linear)
    return {layer: widths for layer, widths in found if widths is not None}


def _widths(shapes: Mapping[str, tuple[int, ...]]) -> AttentionWidths | None:
    out = shapes.get("o_proj")
    if out is None:
        return None
    value = out[1]
    if "k_proj" in shapes and "v_proj" in shapes and "q_proj" in shapes:
        return AttentionWidths(query=shapes["q_proj"][0], value=value, cached=shapes["k_proj"][0] + shapes["v_proj"][0])
    if "qkv_proj" in shapes:
        return AttentionWidths(query=value, value=value, cached=shapes["qkv_proj"][0] - value)
    if "kv_b_proj" in shapes and "kv_a_proj_with_mqa" in shapes:
        queries = shapes.get("q_b_proj") or shapes.get("q_proj")
        if queries is None:
            return None
        return AttentionWidths(query=queries[0], value=value, cached=shapes["kv_a_proj_with_mqa"][0])
    return None


def flops_per_token(shapes: Shapes, config: Mapping[str, Any], context: int) -> int:
    """Return the forward FLOPs of one token, averaged over a causal sequence of `context` tokens (`FLOPS_FORMULA`)."""
    matrices = {name: shape for name, shape in shapes.items() if len(shape) >= 2}
    count = count_shapes(matrices, config)
    lookup = sum(shape[0] * shape[1] for name, shape in matrices.items() if is_embedding(name))
    tied = bool(config.get("tie_word_embeddings"))
    flops = 2 * (count.active - (0 if tied else lookup))
    windows = layer_windows(config)
    for layer, widths in attention_layers(shapes, config).items():
        attended = _mean_attended(context, windows[layer] if layer < len(windows) else None)
        flops += round(2 * (widths.query + widths.value) * attended)
    return flops


def kv_cache_bytes(shapes: Shapes, config: Mapping[str, Any], context: int, bytes_per_value: int) -> int:
    """Return the bytes of one sequence's key/value cache at `context` tokens; layers with a window hold that window."""
    windows = layer_windows(config)
    total = 0
    for layer, widths in attention_layers(shapes, config).items():
        window = windows[layer] if layer < len(windows) else None
        total += widths.cached * min(context, window or context) * bytes_per_value
    return total


def memory_to_convert(made_expert_bytes: int = 0, workers: int | None = None) -> int:
    """Return the estimated peak resident bytes of a conversion (docs/plan.md has the measurements).

    It does not depend on the number of layers, experts or files, because tensors are streamed.

    Args:
        made_expert_bytes: bytes of one expert where experts are computed (`drop`, `scratch`); 0 where they are copied,
            which needs blocks of a few MB only.
        workers: threads; default: what `upcycle` takes, one per core, at most 8.
    """
    workers = workers or default_workers()
    return STREAMING_BYTES + workers * (WORKER_BYTES + round(MADE_EXPERT_COPIES * made_expert_bytes))


def _mean_attended(context: int, window: int | None) -> float:
    """Return the mean number of positions that a token of a causal sequence attends to, itself included."""
    if window is None or window >= context:
        return (context + 1) / 2
    ramp = window * (window + 1) / 2
    return (ramp + (context - window) * window) / context


# --- what to count ----------------------------------------------------------------------------------------------------


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


# --- in words ---------------------------------------------------------------------------------------------------------


def number(count: float) -> str:
    """Return a parameter count with three significant digits: `12.1B`, `135M`."""
    for unit, factor in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if count >= factor:
            return f"{count / factor:.{2 if count < 10 * factor else 1 if count < 100 * factor else 0}f}{unit}"
    return str(int(count))


def size(count: float) -> str:
    """Return bytes in decimal units: `3.42 GB`."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.{2 if count < 10 * factor else 1 if count < 100 * factor else 0}f} {unit}"
    return f"{int(count)} B"
