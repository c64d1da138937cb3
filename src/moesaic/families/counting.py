"""The tensors of a model that exists only as a config, and what names and shapes count: parameters, total and active.

No torch.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from moesaic.common.errors import MoesaicError
from moesaic.families.config_values import check_values, require, text_config
from moesaic.families.dense_table import FAMILIES, ffn_shapes, has_ffn_bias, other_shapes
from moesaic.families.family import native_type, our_base
from moesaic.families.moe_table import MOE_FAMILIES
from moesaic.families.shrink import TOP_K_KEYS

Shapes = Mapping[str, tuple[int, ...]]

# Routed experts are stored fused (E first) or one tensor per expert; shared experts never match.
_PER_EXPERT = re.compile(r"\.experts\.(?P<expert>\d+)\.")
_FUSED = re.compile(
    r"\.experts\.|\.block_sparse_moe\.(input_linear|output_linear)\.|\.mlp\.(input_linear|output_linear)\."
)
_SHARED = re.compile(r"\.(shared_experts?|shared_mlp)\.")
_ROUTER = re.compile(r"\.(gate|router|router\.layer|gate\.wg)\.(weight|bias|e_score_correction_bias)$")
_EMBEDDING = re.compile(r"(^|\.)(embed_tokens|wte|embed_in|tok_embeddings|word_embeddings|embeddings)\.weight$")
_HEAD = re.compile(r"(^|\.)(lm_head|embed_out)\.weight$")
_OTHER_MODALITY = re.compile(r"(^|\.)(vision|visual|audio|multi_modal|mm_|image|embed_vision|embed_audio)")
_RECOMPUTED = re.compile(r"rotary_emb\.|\.masked_bias$")
_EXTRA_PREDICTION = re.compile(r"(^|\.)mtp(_layers)?\.")
_LAYER = re.compile(r"(^|\.)(layers|h|blocks)\.(?P<layer>\d+)\.")


@dataclass(frozen=True, kw_only=True)
class ParameterCount:
    """Parameters of a language model; a tied output head is counted once, as embedding.

    Attributes:
        total: all parameters of the language model.
        active: those that one token uses: everything except the routed experts that are not selected.
        embeddings: token embedding plus the output head where it is a matrix of its own.
        routed, shared, router: routed experts, shared experts and routers, of all layers.
        active_routed: the selected share of `routed`.
        num_experts: routed experts per MoE layer (the largest, where layers differ); 0 for a dense model.
        top_k: routed experts that a token uses per layer; 0 for a dense model.
        moe_layers: number of layers with routed experts.
        not_run: parameters of layers beyond the model's depth (multi-token prediction); in no other figure.
        other_modalities: vision, audio and their projectors; in no other figure.
    """

    total: int
    active: int
    embeddings: int
    routed: int
    active_routed: int
    shared: int
    router: int
    num_experts: int
    top_k: int
    moe_layers: int
    not_run: int = 0
    other_modalities: int = 0

    @property
    def total_without_embeddings(self) -> int:
        """`total` minus `embeddings`."""
        return self.total - self.embeddings

    @property
    def active_without_embeddings(self) -> int:
        """`active` minus `embeddings`."""
        return self.active - self.embeddings

    def to_dict(self) -> dict[str, int]:
        """Return all figures as plain numbers."""
        return asdict(self) | {
            "total_without_embeddings": self.total_without_embeddings,
            "active_without_embeddings": self.active_without_embeddings,
        }


_MOE_KEYS = ("moe_layers", "num_experts", "num_experts_per_tok", "moe_intermediate_size")


def config_shapes(config: Mapping[str, Any], name: str = "config.json") -> dict[str, tuple[int, ...]]:
    """Return name -> shape of every tensor of a dense family, or of `moesaic_<family>`; `name` is for messages.

    Raises:
        MoesaicError: the family is not in the table of dense families, or a value is missing or of the wrong kind.
    """
    base, moe_layers, dense = our_base(config.get("model_type")), set[int](), config
    if base is not None:
        require(config, _MOE_KEYS, name)
        check_values(config, name)
        moe_layers = set(config["moe_layers"])
        # The base alone is a dense model; a refusal of it must not call it a mixture of experts.
        dense = {**config, "model_type": base, "num_experts": None}
    family, text = text_config(dense, name)
    shapes = other_shapes(family, text)
    ffn, moe = ffn_shapes(family, text), {}
    if moe_layers:
        moe = moe_shapes({**text, **config}, hidden=int(text["hidden_size"]), ffn_bias=has_ffn_bias(family, text))
    for index in range(int(text["num_hidden_layers"])):
        block = moe if index in moe_layers else ffn
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in block.items()}
    return shapes


def moe_shapes(config: Mapping[str, Any], *, hidden: int, ffn_bias: bool) -> dict[str, tuple[int, ...]]:
    """Return the tensors of one MoE layer of our architecture: name below `model.layers.N.` -> shape."""
    experts, width = int(config["num_experts"]), int(config["moe_intermediate_size"])
    shapes: dict[str, tuple[int, ...]] = {
        "mlp.gate.weight": (experts, hidden),
        "mlp.experts.gate_up_proj": (experts, 2 * width, hidden),
        "mlp.experts.down_proj": (experts, hidden, width),
    }
    if config.get("expert_mlp_bias", ffn_bias):
        shapes["mlp.experts.gate_up_proj_bias"] = (experts, 2 * width)
        shapes["mlp.experts.down_proj_bias"] = (experts, hidden)
    shared = int(config.get("num_shared_experts") or 0) * int(config["intermediate_size"])
    if shared:
        sizes = {"gate_proj": (shared, hidden), "up_proj": (shared, hidden), "down_proj": (hidden, shared)}
        shapes |= {f"mlp.shared_expert.{name}.weight": shape for name, shape in sizes.items()}
        if config.get("expert_mlp_bias", ffn_bias):
            shapes |= {f"mlp.shared_expert.{name}.bias": shape[:1] for name, shape in sizes.items()}
    return shapes


def count_parameters(config: Mapping[str, Any]) -> ParameterCount:
    """Count a model from its config alone: a dense family of the table, or `moesaic_<family>`.

    Raises:
        MoesaicError: the family is in no table, so only its files can be counted.
    """
    return count_shapes(config_shapes(config), config)


def count_shapes(shapes: Shapes, config: Mapping[str, Any]) -> ParameterCount:
    """Count a model from its tensors' names and shapes.

    Args:
        shapes: stored name -> shape, in any family's naming, expert tensors fused or one by one.
        config: the (text) config: `tie_word_embeddings`, the number of layers and the number of active experts.
    """
    sums: Counter[str] = Counter()
    routed_by_layer: dict[int | None, int] = {}
    experts_by_layer: dict[int | None, int] = {}
    for name, shape in shapes.items():
        kind = _kind(name, config)
        if kind is None:
            continue
        size = math.prod(shape)
        sums[kind] += size
        if kind == "routed":
            layer = layer_of(name)
            routed_by_layer[layer] = routed_by_layer.get(layer, 0) + size
            experts_by_layer[layer] = max(experts_by_layer.get(layer, 0), _experts_in(name, shape, config))
    if config.get("tie_word_embeddings") and sums["embedding"]:
        sums["head"] = 0
    top_k = _top_k(config) if routed_by_layer else 0
    active_routed = sum(
        routed // experts_by_layer[layer] * min(top_k, experts_by_layer[layer])
        for layer, routed in routed_by_layer.items()
    )
    embeddings = sums["embedding"] + sums["head"]
    total = embeddings + sums["plain"] + sums["routed"] + sums["shared"] + sums["router"]
    return ParameterCount(
        total=total,
        active=total - sums["routed"] + active_routed,
        embeddings=embeddings,
        routed=sums["routed"],
        active_routed=active_routed,
        shared=sums["shared"],
        router=sums["router"],
        num_experts=max(experts_by_layer.values(), default=0),
        top_k=top_k,
        moe_layers=len(routed_by_layer),
        not_run=sums["not_run"],
        other_modalities=sums["other"],
    )


def is_routed(name: str) -> bool:
    """Return whether a stored tensor belongs to routed experts."""
    return bool(_FUSED.search(name)) and not _SHARED.search(name)


def layer_of(name: str) -> int | None:
    """Return the layer that a stored tensor belongs to, or None."""
    match = _LAYER.search(name)
    return int(match["layer"]) if match else None


def beyond_depth(config: Mapping[str, Any], layer: int | None) -> bool:
    """Whether a layer (None: no layer) is behind the model's last one, stored for multi-token prediction."""
    depth = config.get("num_hidden_layers")
    return layer is not None and isinstance(depth, int) and layer >= depth


def predicts(config: Mapping[str, Any], name: str) -> bool:
    """Whether a stored tensor is for multi-token prediction: of a layer behind the last, or named so (`mtp.`)."""
    return beyond_depth(config, layer_of(name)) or bool(_EXTRA_PREDICTION.search(name))


def place_of(config: Mapping[str, Any], name: str) -> int | None:
    """The layer of a stored tensor, those named `mtp.layers.N` counted behind the model's last one."""
    layer, depth = layer_of(name), config.get("num_hidden_layers")
    if layer is None or not isinstance(depth, int) or layer >= depth or not _EXTRA_PREDICTION.search(name):
        return layer
    return depth + layer


def is_embedding(name: str) -> bool:
    """Return whether a stored tensor is the token embedding."""
    return bool(_EMBEDDING.search(name)) and layer_of(name) is None


def is_head(name: str) -> bool:
    """Return whether a stored tensor is the output head."""
    return bool(_HEAD.search(name))


def _kind(name: str, config: Mapping[str, Any]) -> str | None:
    """Return the sum that a tensor goes into; None for tensors that are recomputed."""
    rules = (
        (bool(_RECOMPUTED.search(name)), None),
        (bool(_OTHER_MODALITY.search(name)), "other"),
        (predicts(config, name), "not_run"),
        (is_embedding(name), "embedding"),
        (is_head(name), "head"),
        (bool(_SHARED.search(name)), "shared"),
        (is_routed(name), "routed"),
        (bool(_ROUTER.search(name)), "router"),
    )
    return next((kind for applies, kind in rules if applies), "plain")


def _experts_in(name: str, shape: tuple[int, ...], config: Mapping[str, Any]) -> int:
    match = _PER_EXPERT.search(name)
    if match:
        return int(match["expert"]) + 1
    # Fused: experts come first. DBRX flattens (E * I, D), where only the config knows E.
    nested = (config.get("ffn_config") or {}).get("moe_num_experts")
    return nested if isinstance(nested, int) and nested > 0 else shape[0]


def _top_k(config: Mapping[str, Any]) -> int:
    nested = config.get("ffn_config") or {}
    for source in (config, nested):
        for key in TOP_K_KEYS:
            value = source.get(key)
            if isinstance(value, int) and value > 0:
                return value
    raise MoesaicError(
        f"config.json of {config.get('model_type')} does not say how many experts a token uses "
        f"(looked for {', '.join(TOP_K_KEYS)}): add num_experts_per_tok"
    )


def trained_context(config: Any) -> int | None:
    """Most positions that a model (a config of transformers) was trained for; None where its config does not say."""
    reach = getattr(config.get_text_config(), "max_position_embeddings", None)
    return reach if reach and reach > 0 else None


def layer_windows(config: Mapping[str, Any]) -> list[int | None]:
    """Per layer the number of positions that its attention sees, None for all of them."""
    depth, window, types = (
        int(config.get("num_hidden_layers") or 0),
        config.get("sliding_window"),
        config.get("layer_types"),
    )
    model_type = str(config.get("model_type", ""))
    row = MOE_FAMILIES.get(native_type(model_type)) or FAMILIES.get(our_base(model_type) or model_type)
    switched_off = row is not None and row.window_is_switched and not config.get("use_sliding_window")
    if not isinstance(window, int) or window <= 0 or switched_off:
        return [None] * depth
    if types:
        return [window if kind == "sliding_attention" else None for kind in types[:depth]]
    pattern = config.get("sliding_window_pattern") or (row and row.window_every)
    if not pattern:
        return [window] * depth
    period = len(pattern) if isinstance(pattern, str) else int(pattern)  # "LLLG": every fourth layer sees everything
    return [window if (layer + 1) % period else None for layer in range(depth)]
