"""A checkpoint seen as our architecture: whatever it was, one config, and lazy tensors to export from. Torch-free."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from moesaic.checkpoint.headers import TensorInfo
from moesaic.checkpoint.lazy import Lazy, stored
from moesaic.checkpoint.source import Checkpoint
from moesaic.common.errors import MoesaicError
from moesaic.families.counting import config_shapes
from moesaic.families.dense_table import HEAD
from moesaic.families.experts import ExpertWeights
from moesaic.families.family import our_base
from moesaic.families.moe import MoELayerTensors, MoEModel, detect_moe
from moesaic.families.moe_table import EMO, MOE_FAMILIES
from moesaic.modeling.names import converted_config

_RECOMPUTED = "rotary_emb.inv_freq"
"""Stored by old versions of transformers, and computed anew by all others."""


Expert = ExpertWeights[Lazy]


@dataclass(frozen=True, kw_only=True)
class LayerParts:
    """One MoE layer: router (E, D), its E experts, and the shared experts as one FFN (None: there are none)."""

    layer: int
    router: Lazy
    experts: tuple[Expert, ...]
    shared: Expert | None = None


@dataclass(frozen=True, kw_only=True)
class View:
    """A mixture of experts as `moesaic_<base>`: the whole config, its MoE layers, and all other tensors by name."""

    checkpoint: Checkpoint
    base: str
    config: Mapping[str, Any]
    layers: tuple[LayerParts, ...]
    others: Mapping[str, Lazy]

    @property
    def loads(self) -> bool:
        """Whether transformers (with this package) can run the checkpoint as it is."""
        return self.checkpoint.config.get("model_type") not in EMO.export_first


def view_of(checkpoint: Checkpoint) -> View:
    """See a checkpoint as our architecture.

    Raises:
        MoesaicError: a family that is no dense model of transformers with an MoE block in place of its FFN; says why.
    """
    model_type = str(checkpoint.config.get("model_type"))
    if model_type in EMO.export_first:
        from moesaic.exporting.emo import emo_view

        return _checked(emo_view(checkpoint))
    if not becomes_ours(model_type):
        family = detect_moe(checkpoint).family  # says what is wrong with a model that is no mixture of experts
        way_out = "" if family.derived else f"; --to {model_type} changes its layout or dtype"
        raise MoesaicError(
            f"{checkpoint.name}: {model_type} cannot become another family, because {family.no_twin}{way_out}"
        )
    model = detect_moe(checkpoint)
    if (base := our_base(model_type)) is not None:
        return _checked(seen(checkpoint, model, base, _full_config(checkpoint.config)))
    twin = model.family.twin
    assert twin is not None
    layers = [layer.layer for layer in model.layers]
    config = converted_config(twin, checkpoint.config, moe_layers=layers, num_experts=model.num_experts)
    return _checked(seen(checkpoint, model, twin.base, config))


def becomes_ours(model_type: str) -> bool:
    """Whether a checkpoint of this family can be seen as our architecture, its layout of shared experts included."""
    family = MOE_FAMILIES.get(model_type)
    if family is None:
        return our_base(model_type) is not None or model_type in EMO.export_first
    return family.twin is not None and family.twin.shared_width is None


def layer_parts(tensors: Mapping[str, TensorInfo], layer: MoELayerTensors) -> LayerParts:
    """Router and experts of a detected layer; stacked matrices have gate rows first. Shared experts are left out."""
    roles = {one.role: one for one in layer.expert_tensors}
    count = layer.num_experts

    def matrices(role: str) -> list[Lazy]:
        found = [stored(tensors[name]) for name in roles[role].names(count)]
        return found if roles[role].axis is None else [found[0].index(expert) for expert in range(count)]

    if "gate_up" in roles:
        both = matrices("gate_up")
        half = both[0].shape[0] // 2
        gates, ups = [one.rows(0, half) for one in both], [one.rows(half, 2 * half) for one in both]
    else:
        gates, ups = matrices("gate"), matrices("up")
    matched = zip(gates, ups, matrices("down"), strict=True)
    experts = tuple(Expert(gate_ID=gate, up_ID=up, down_DI=down) for gate, up, down in matched)
    return LayerParts(layer=layer.layer, router=stored(tensors[roles["router"].name]), experts=experts)


def _checked(view: View) -> View:
    """Refuse tensors that are missing, unknown or of another shape than the config says, before anything is written."""
    name, blocks = view.checkpoint.name, tuple(f"model.layers.{layer.layer}.mlp." for layer in view.layers)
    expected = {
        tensor: shape for tensor, shape in config_shapes(view.config, name).items() if not tensor.startswith(blocks)
    }
    for tensor, shape in expected.items():
        if tensor not in view.others:
            raise MoesaicError(f"{name}: tensor {tensor} is missing: the checkpoint is incomplete")
        _check_shape(name, tensor, view.others[tensor], shape)
    # A stored head beside a tied embedding stays: transformers then decides as it did before.
    unknown = [tensor for tensor in view.others if tensor not in expected and tensor != HEAD]
    if unknown:
        raise MoesaicError(f"{name}: unknown tensor {unknown[0]}: it would be lost or unused in another family")
    hidden, width = view.config["hidden_size"], view.config["moe_intermediate_size"]
    for layer in view.layers:
        _check_shape(name, layer.router.sources[0].name, layer.router, (len(layer.experts), hidden))
        for expert in layer.experts:
            for part, one in expert.parts().items():
                shape = (hidden, width) if part == "down_DI" else (width, hidden)
                _check_shape(name, one.sources[0].name, one, shape)
    return view


def _check_shape(name: str, tensor: str, found: Lazy, shape: tuple[int, ...]) -> None:
    if found.shape != shape:
        raise MoesaicError(f"{name}: {tensor} has shape {list(found.shape)}, but config.json asks for {list(shape)}")


def _full_config(config: Mapping[str, Any]) -> dict[str, Any]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from moesaic.loading import explained_errors

    with explained_errors("config.json: transformers cannot use a value in it"):
        return CONFIG_MAPPING[config["model_type"]].from_dict(dict(config)).to_dict()


def seen(checkpoint: Checkpoint, model: MoEModel, base: str, config: Mapping[str, Any]) -> View:
    """The view of a checkpoint whose experts were found and whose config in our architecture is known."""
    layers, taken = [], set()
    for layer in model.layers:
        parts = layer_parts(checkpoint.tensors, layer)
        taken |= {name for one in layer.expert_tensors for name in one.names(layer.num_experts)} | set(layer.shared)
        if layer.shared:
            place = f"model.layers.{layer.layer}.mlp.shared_expert."
            names = {"gate_ID": "gate_proj", "up_ID": "up_proj", "down_DI": "down_proj"}
            shared = {part: stored(checkpoint.tensors[f"{place}{name}.weight"]) for part, name in names.items()}
            parts = replace(parts, shared=Expert(**shared))
        layers.append(parts)
    others = {
        name: stored(info)
        for name, info in checkpoint.tensors.items()
        if name not in taken and not name.endswith(_RECOMPUTED)
    }
    return View(checkpoint=checkpoint, base=base, config=config, layers=tuple(layers), others=others)
