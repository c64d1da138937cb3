"""A checkpoint seen as our architecture: whatever it was, one config and one set of parts to export from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from moesaic.checkpoint.source import Checkpoint
from moesaic.common.errors import MoesaicError
from moesaic.expansion.targets import CONVERSIONS, REASONS
from moesaic.exporting.emo import emo_config, emo_layers
from moesaic.exporting.layouts import Expert
from moesaic.exporting.parts import LayerParts, layer_parts
from moesaic.exporting.rows import Rows, stored
from moesaic.families.counting import config_shapes
from moesaic.families.moe import detect_moe
from moesaic.families.moe_table import CONVERTED_FIRST
from moesaic.modeling.names import converted_config

OURS = "moesaic_"
HEAD = "lm_head.weight"

_RECOMPUTED = "rotary_emb.inv_freq"
"""Stored by old versions of transformers, and computed anew by all others."""


@dataclass(frozen=True, kw_only=True)
class View:
    """A mixture of experts as `moesaic_<base>`: the whole config, its MoE layers, and all other tensors by name."""

    checkpoint: Checkpoint
    base: str
    config: Mapping[str, Any]
    layers: tuple[LayerParts, ...]
    others: Mapping[str, Rows]

    @property
    def loads(self) -> bool:
        """Whether transformers (with this package) can run the checkpoint as it is."""
        return str(self.checkpoint.config.get("model_type")) not in CONVERTED_FIRST


def view_of(checkpoint: Checkpoint) -> View:
    """See a checkpoint as our architecture.

    Raises:
        MoesaicError: a family that is no dense model of transformers with an MoE block in place of its FFN; says why.
    """
    model_type = str(checkpoint.config.get("model_type"))
    if model_type in CONVERTED_FIRST:
        return _checked(_emo(checkpoint))
    if model_type.startswith(OURS):
        return _checked(_ours(checkpoint, model_type))
    if model_type in CONVERSIONS:
        return _checked(_native(checkpoint, model_type))
    detect_moe(checkpoint)  # says what is wrong with a model that is no mixture of experts
    raise MoesaicError(
        f"{checkpoint.name}: {model_type} cannot become another family, because {REASONS[model_type]}; "
        f"--to {model_type} changes its layout or dtype"
    )


def _checked(view: View) -> View:
    """Refuse tensors that are missing, unknown or of another shape than the config says, before anything is written."""
    name, blocks = view.checkpoint.name, tuple(f"model.layers.{layer.layer}.mlp." for layer in view.layers)
    expected = {
        tensor: shape for tensor, shape in config_shapes(view.config, name).items() if not tensor.startswith(blocks)
    }
    for tensor, shape in expected.items():
        if tensor not in view.others:
            raise MoesaicError(f"{name}: tensor {tensor} is missing: the checkpoint is incomplete")
        if view.others[tensor].shape != shape:
            found = list(view.others[tensor].shape)
            raise MoesaicError(f"{name}: {tensor} has shape {found}, but config.json asks for {list(shape)}")
    # A stored head beside a tied embedding stays: transformers then decides as it did before.
    unknown = [tensor for tensor in view.others if tensor not in expected and tensor != HEAD]
    if unknown:
        raise MoesaicError(f"{name}: unknown tensor {unknown[0]}: it would be lost or unused in another family")
    return view


def converts(model_type: str) -> bool:
    """Whether a checkpoint of this family can be seen as our architecture."""
    return model_type in CONVERSIONS or model_type in CONVERTED_FIRST or model_type.startswith(OURS)


def _emo(checkpoint: Checkpoint) -> View:
    config = emo_config(checkpoint)
    layers, others = emo_layers(checkpoint, config)
    return View(checkpoint=checkpoint, base="llama", config=config, layers=tuple(layers), others=others)


def _ours(checkpoint: Checkpoint, model_type: str) -> View:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[model_type].from_dict(dict(checkpoint.config)).to_dict()
    return _detected(checkpoint, model_type.removeprefix(OURS), lambda _: config)


def _native(checkpoint: Checkpoint, model_type: str) -> View:
    conversion = CONVERSIONS[model_type]

    def config(layers: list[int]) -> dict[str, Any]:
        model = detect_moe(checkpoint)
        return converted_config(conversion, checkpoint.config, moe_layers=layers, num_experts=model.num_experts)

    return _detected(checkpoint, conversion.base, config)


def _detected(checkpoint: Checkpoint, base: str, config: Callable[[list[int]], Mapping[str, Any]]) -> View:
    model = detect_moe(checkpoint)
    layers, taken = [], set()
    for layer in model.layers:
        parts = layer_parts(checkpoint.tensors, layer)
        taken |= {name for one in layer.expert_tensors for name in one.names(layer.num_experts)}
        weights = {
            role: f"model.layers.{layer.layer}.mlp.shared_expert.{role}_proj.weight" for role in ("gate", "up", "down")
        }
        if layer.shared:
            taken |= set(layer.shared)
            shared = Expert(**{role: stored(checkpoint.tensors[name]) for role, name in weights.items()})
            parts = replace(parts, shared=shared)
        layers.append(parts)
    others = {
        name: stored(info)
        for name, info in checkpoint.tensors.items()
        if name not in taken and not name.endswith(_RECOMPUTED)
    }
    return View(
        checkpoint=checkpoint,
        base=base,
        config=config([layer.layer for layer in layers]),
        layers=tuple(layers),
        others=others,
    )
