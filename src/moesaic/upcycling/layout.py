"""What the result is made of: its tensors, its config and where each tensor comes from. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moesaic.checkpoint.layout import Layout, OutputTensor
from moesaic.families.counting import config_shapes, layer_of
from moesaic.modeling.names import class_names
from moesaic.upcycling.choices import LayerSpec
from moesaic.upcycling.method import BASE
from moesaic.upcycling.recipe import SharedWeights, UpcycleRecipe
from moesaic.upcycling.streams import stream_key

if TYPE_CHECKING:
    from moesaic.checkpoint.headers import TensorInfo
    from moesaic.families.dense import DenseFFN, DenseModel

DTYPE_NAMES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""safetensors code -> the name that config.json uses."""

_STALE = ("torch_dtype", "_name_or_path", "auto_map")
"""Keys of the base's config that would say something wrong about the result."""


@dataclass(frozen=True, kw_only=True)
class UpcyclePlan:
    """A recipe and its checkpoints, resolved and checked: nothing can be refused any more but the weights' values."""

    recipe: UpcycleRecipe
    """With every default filled in: running it again gives the same bytes."""
    base: DenseModel
    specialists: tuple[DenseModel, ...]
    layer: LayerSpec
    shared_weights: SharedWeights
    moe_layers: tuple[int, ...]
    dtype: str
    """safetensors code of the result's weights."""
    config: dict[str, Any]
    """config.json of the result."""
    files: Layout
    carried: dict[str, tuple[TensorInfo, ...]]
    """Tensors that are not experts -> the tensors they are the mean of (one: a copy; none: drawn at random)."""
    notices: tuple[str, ...]

    def ffns(self, layer: int) -> tuple[DenseFFN, ...]:
        """The dense FFNs of one layer: the base's, then the specialists'."""
        return tuple(model.ffns[layer] for model in self.models)

    @property
    def models(self) -> tuple[DenseModel, ...]:
        """All sources: the base, then the specialists."""
        return (self.base, *self.specialists)

    def expert_sources(self) -> tuple[int, ...]:
        """Numbers of the sources that experts come from; the base where experts are computed."""
        copies, spec = self.layer.method.copies, self.layer
        if copies is None:
            return (BASE,)
        return tuple(sorted({copies(number, spec.shards).source for number in range(spec.experts)}))

    def ffn_sources(self) -> tuple[int, ...]:
        """Numbers of the sources whose FFNs are used: for experts, and the base's for shared experts."""
        return tuple(sorted({*self.expert_sources(), *([BASE] if self.layer.shared_experts else [])}))

    def used_tensors(self) -> list[list[TensorInfo]]:
        """Per source, the stored tensors that go into the result."""
        carried = {(info.file, info.name) for infos in self.carried.values() for info in infos}
        for source in self.ffn_sources():
            for layer in self.moe_layers:
                rows = [value for value in vars(self.models[source].ffns[layer]).values() if value is not None]
                carried |= {(row.info.file, row.info.name) for row in rows}
        used = [
            [info for info in model.checkpoint.tensors.values() if (info.file, info.name) in carried]
            for model in self.models
        ]
        # Where all that belongs to the model is used, the leftovers (copies of a tied head, say) complete the hash.
        return [
            list(model.checkpoint.tensors.values()) if len(found) == _stored_count(model) else found
            for model, found in zip(self.models, used, strict=True)
        ]


def _stored_count(model: DenseModel) -> int:
    return len(model.checkpoint.tensors) - len(model.left_out) - len(model.dropped)


def result_config(base: DenseModel, layer: LayerSpec, moe_layers: tuple[int, ...], dtype: str) -> dict[str, Any]:
    """config.json of the result: the base's text config under the MoE architecture's names, and the MoE keys."""
    kept = {key: value for key, value in base.config.items() if key not in _STALE}
    return {
        **kept,
        **class_names(base.family.model_type),
        "dtype": DTYPE_NAMES[dtype],
        "num_experts": layer.experts,
        "num_experts_per_tok": layer.top_k,
        "moe_intermediate_size": layer.expert.intermediate,
        "num_shared_experts": layer.shared_experts,
        "moe_layers": list(moe_layers),
        "routing_rule": layer.routing,
        "routing_weighting": layer.weighting,
        "expert_groups": None if layer.groups is None else list(layer.groups),
        "group_score": "max",
        "expert_mlp_bias": base.ffn_bias,
    }


def output_tensors(config: dict[str, Any], dtype: str, own_dtypes: dict[str, str]) -> list[OutputTensor]:
    """The tensors of the result, layer by layer; `own_dtypes` names those that keep another dtype."""
    shapes = config_shapes(config)
    layers = int(config["num_hidden_layers"])
    names = sorted(shapes, key=lambda name: _place(name, layers))
    return [OutputTensor(name=name, dtype=own_dtypes.get(name, dtype), shape=shapes[name]) for name in names]


def _place(name: str, layers: int) -> int:
    """Embedding first, then the layers, then what follows them; the sort is stable within a layer."""
    layer = layer_of(name)
    if layer is not None:
        return layer
    return -1 if "embed" in name else layers


def carried_tensors(
    base: DenseModel,
    specialists: tuple[DenseModel, ...],
    shared_weights: SharedWeights,
    moe_layers: tuple[int, ...],
    seed: int,
) -> dict[str, tuple[TensorInfo, ...]]:
    """Where every tensor that is no expert comes from; the FFNs of layers that stay dense are among them.

    `random-specialist` draws one specialist per layer, and one for the tensors outside the layers (DivMoE, appendix E).
    """
    tensors = [dense_tensors(model, moe_layers) for model in (base, *specialists)]

    def sources(name: str) -> tuple[TensorInfo, ...]:
        found = tuple(model[name] for model in tensors)
        if shared_weights == "random-specialist":
            layer = layer_of(name)
            place = "outside the layers" if layer is None else layer
            return (found[1 + stream_key(seed, "random-specialist", place) % len(specialists)],)
        return {"mean": found, "base": found[:1], "reinit": ()}[shared_weights]

    return {name: sources(name) for name in tensors[0]}


def dense_tensors(model: DenseModel, moe_layers: tuple[int, ...]) -> dict[str, TensorInfo]:
    """The tensors of a dense model outside the FFNs of `moe_layers`, by canonical name."""
    family = model.family
    found = dict(model.others)
    for index in sorted(set(range(model.num_layers)) - set(moe_layers)):
        ffn = model.ffns[index]
        stored = {
            f"{family.fused_gate_up or family.gate}.weight": ffn.gate,
            f"{family.fused_gate_up or family.up}.weight": ffn.up,
            f"{family.down}.weight": ffn.down,
            f"{family.fused_gate_up or family.gate}.bias": ffn.gate_bias,
            f"{family.fused_gate_up or family.up}.bias": ffn.up_bias,
            f"{family.down}.bias": ffn.down_bias,
        }
        rows = {name: value for name, value in stored.items() if value is not None}
        found |= {f"model.layers.{index}.{name}": value.info for name, value in rows.items()}
    return found
