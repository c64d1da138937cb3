"""Which tensors of an MoE checkpoint have a slot per expert, and where. Torch-free.

`detect_moe` reads names and shapes only. Growing, cutting and putting back experts (`expand`, `extract`, `merge-back`)
then mean one thing for every family and on-disk layout: choose slots along `ExpertTensor.axis`, or whole tensors where
every expert has a tensor of its own.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moesaic.checkpoint.source import Checkpoint
from moesaic.common.errors import MoesaicError
from moesaic.families.config_values import MOE_KINDS, check_values, require
from moesaic.families.counting import beyond_depth, place_of, predicts
from moesaic.families.family import MoEFamily, Places
from moesaic.families.moe_table import KNOWN, family_of, way_out
from moesaic.families.shrink import EXPERT_KEYS, TOP_K_KEYS

EXPERT_COUNT_KEYS, TOP_K_ALIASES = EXPERT_KEYS, TOP_K_KEYS

_LAYER = re.compile(r"^(?P<prefix>.*?layers\.)(?P<layer>\d+)\.(?P<rest>.+)$")
_OWN = re.compile(r"^(?P<head>(?:.+\.)?experts\.)(?P<expert>\d+)\.(?P<tail>.+)$")

# Name below `layers.N.` -> (role, axis of the experts). Spellings: ours and transformers' fused layout, GPT-OSS,
# Granite-MoE as published, DeepSeek/GLM and ERNIE selection biases.
_STACKED = {
    f"{block}.{tail}": place
    for block in ("mlp", "block_sparse_moe")
    for tail, place in {
        "experts.gate_up_proj": ("gate_up", 0),
        "experts.down_proj": ("down", 0),
        "experts.gate_up_proj_bias": ("gate_up_bias", 0),
        "experts.down_proj_bias": ("down_bias", 0),
        "input_linear.weight": ("gate_up", 0),
        "output_linear.weight": ("down", 0),
        "gate.weight": ("router", 0),
        "router.weight": ("router", 0),
        "router.layer.weight": ("router", 0),
        "router.bias": ("router_bias", 0),
        "gate.e_score_correction_bias": ("selection_bias", 0),
        "moe_statics.e_score_correction_bias": ("selection_bias", 1),
        "gate.moe_statics.e_score_correction_bias": ("selection_bias", 1),
    }.items()
}

# Name of a tensor that one expert has for itself -> role.
_OWN_ROLES = {
    f"{block}.experts.{{expert}}.{name}.{kind}": role + suffix
    for block in ("mlp", "block_sparse_moe")
    for kind, suffix in (("weight", ""), ("bias", "_bias"))
    for name, role in {
        "gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down",
    }.items()
}  # fmt: skip

_FFN = re.compile(r"(?:mlp|block_sparse_moe|shared_mlp)\.")
_IN_EVERY_LAYER = re.compile(r"self_attn\.|\w*norm\w*\.")
USUAL = Places(
    stacked=_STACKED,
    own=_OWN_ROLES,
    shared=(
        "shared_mlp",
        *(
            f"{block}.{name}{end}"
            for block in ("mlp", "block_sparse_moe")
            for name in ("shared_expert", "shared_experts")
            for end in ("", "_gate")
        ),
    ),
)
"""The names of the families with a row of `moe_table`."""

_Named = tuple[str, str]
"""A tensor's name, and what comes after `layers.N.` in it, or in the name of the tensor whose codes or scales it has.
"""

PREDICTION_KEYS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
"""How many layers predict further tokens: stored behind the model's last one (DeepSeek-V3, GLM-4.5) or as
`mtp.layers.N` (Qwen3-Next), and not run."""

ROUTER_ROLES = frozenset({"router", "router_bias", "selection_bias", "router_scale"})

REORDERED = " (reordered)"
"""End of the role of a tensor whose numbers stand in another order than in the model's own: a slot of it is no slot of
another layout."""


@dataclass(frozen=True, kw_only=True)
class ExpertTensor:
    """A tensor with a slot per expert along `axis`, or (axis None) one tensor per expert, `{expert}` in its name.

    `role` is gate, up, down, gate_up, one of these with `_bias`, router, router_bias or selection_bias; with a space
    and the ending of the name behind it where it is of codes or scales that are moved as they are stored.
    """

    role: str
    name: str
    axis: int | None

    def names(self, num_experts: int) -> list[str]:
        """The tensors in the file, in the order of the experts; one for a stacked tensor."""
        if self.axis is not None:
            return [self.name]
        return [self.name.format(expert=expert) for expert in range(num_experts)]


@dataclass(frozen=True, kw_only=True)
class MoELayerTensors:
    """The tensors of one MoE layer: with a slot per expert (router included), and of the shared experts."""

    layer: int
    num_experts: int
    expert_tensors: tuple[ExpertTensor, ...]
    shared: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class MoEModel:
    """An MoE checkpoint as its names and shapes describe it; `layers` are the MoE layers in order."""

    family: MoEFamily
    num_experts: int
    top_k: int
    layers: tuple[MoELayerTensors, ...]


def detect_moe(checkpoint: Checkpoint) -> MoEModel:
    """Find the experts, routers and shared experts of an MoE checkpoint from names and shapes.

    Raises:
        MoesaicError: not an MoE model, a family without a row, an expert or a router that is missing or has another
            number of slots than the config says (names the tensor).
    """
    config = checkpoint.config
    family = family_of(config)
    if family is None:
        raise MoesaicError(
            f"{checkpoint.name}: model_type {config.get('model_type')!r} is not an MoE family known here ({KNOWN})"
            f"{way_out(config.get('model_type'))}"
        )
    return read_experts(checkpoint, family)


def read_experts(checkpoint: Checkpoint, family: MoEFamily) -> MoEModel:
    """`detect_moe` of a checkpoint that is known to be of this family."""
    config = checkpoint.config
    name = f"{checkpoint.name}: config.json"
    check_values(config, name, kinds=MOE_KINDS)
    require(config, ("num_hidden_layers", "hidden_size", "vocab_size"), name)
    count = expert_count(config, family, checkpoint.name)
    by_layer: dict[int, list[_Named]] = {}
    for tensor in checkpoint.tensors:
        match = _LAYER.match(tensor.removesuffix(checkpoint.packed.get(tensor, "")))
        if match and (place := place_of(config, tensor)) is not None:
            by_layer.setdefault(place, []).append((tensor, match["rest"]))
    _refuse_missing(checkpoint, by_layer, family)
    layers = tuple(
        layer
        for index in sorted(by_layer)
        if (layer := _read_layer(checkpoint, index, by_layer[index], count, family)) is not None
    )
    if not layers:
        raise MoesaicError(f"{checkpoint.name}: no layer has experts; config.json says {family.experts_key} = {count}")
    top_k = _active(config, family, checkpoint)
    if top_k > count:
        raise MoesaicError(
            f"{checkpoint.name}: config.json says {family.top_k_key} = {top_k}, but there are only {count} experts"
        )
    return MoEModel(family=family, num_experts=count, top_k=top_k, layers=layers)


def detect_running(checkpoint: Checkpoint) -> MoEModel:
    """`detect_moe` without the layers for multi-token prediction that checkpoints store behind the model's last one.

    transformers does not load these, so nothing routes in them.
    """
    model = detect_moe(checkpoint)
    return replace(model, layers=tuple(one for one in model.layers if not beyond_depth(checkpoint.config, one.layer)))


def prediction_notices(checkpoint: Checkpoint, what: str) -> tuple[str, ...]:
    """One sentence where a checkpoint stores layers for multi-token prediction: `what` becomes of them in a verb.

    They are grown and laid out with the others where their experts can follow, and left out where they cannot, with
    `PREDICTION_KEYS` at 0 in the config.
    """
    config = checkpoint.config
    layers = {place_of(config, name) for name in checkpoint.tensors if predicts(config, name)} - {None}
    if not layers:
        return ()
    numbers, one = ", ".join(map(str, sorted(filter(None, layers)))), len(layers) == 1
    which = f"layer {numbers} is" if one else f"layers {numbers} are"
    return (f"{checkpoint.name}: {which} for multi-token prediction, which transformers does not run: {what}",)


def expert_count(config: Mapping[str, Any], family: MoEFamily, name: str) -> int:
    """The number of routed experts E that a config states, under whichever of the known keys."""
    for key in (family.experts_key, *EXPERT_COUNT_KEYS):
        if isinstance(config.get(key), int):
            return config[key]
    raise MoesaicError(f"{name}: config.json has no number of experts ({family.experts_key})")


def _active(config: Mapping[str, Any], family: MoEFamily, checkpoint: Checkpoint) -> int:
    keys = (family.top_k_key, *(TOP_K_ALIASES if family.derived else ()))
    value = next((config[key] for key in keys if isinstance(config.get(key), int)), None)
    if value is None:
        raise MoesaicError(f"{checkpoint.name}: config.json has no {family.top_k_key}")
    return value


def _refuse_missing(checkpoint: Checkpoint, by_layer: Mapping[int, Sequence[_Named]], family: MoEFamily) -> None:
    """Refuse a layer without any tensor, without an FFN, or without an attention tensor or norm that another layer has.

    The last two only in families whose layers differ in nothing but their FFN, dense or of experts, by usual names.
    """
    depth = checkpoint.config["num_hidden_layers"]
    found: dict[int, dict[str, str]] = {}
    for index in range(depth):
        rests = {rest: name for name, rest in by_layer.get(index, ())}
        found[index] = {rest: name for rest, name in rests.items() if _IN_EVERY_LAYER.match(rest)}
        if not rests or not (family.derived or any(map(_FFN.match, rests))):
            what = "FFN or experts" if rests else "tensors"
            raise MoesaicError(f"{checkpoint.name}: layer {index} has no {what}: the checkpoint is incomplete")
    if not family.uniform:
        return
    every = {rest: (index, name) for index, rests in found.items() for rest, name in rests.items()}
    for index, rests in found.items():
        for rest, (other, name) in every.items():
            if rest not in rests:
                lost = name.replace(f"layers.{other}.", f"layers.{index}.", 1)
                raise MoesaicError(f"{checkpoint.name}: tensor {lost} is missing: the checkpoint is incomplete")


def _read_layer(
    checkpoint: Checkpoint, index: int, names: list[_Named], count: int, family: MoEFamily
) -> MoELayerTensors | None:
    """The expert tensors of one layer; None for a dense layer (no expert tensors in it)."""
    places = family.places or USUAL
    stacked: list[ExpertTensor] = []
    own: dict[tuple[str, str], set[int]] = {}
    shared: list[str] = []
    for name, rest in names:
        if place := places.stacked.get(rest):
            role, axis = place
            stacked.append(_stacked(checkpoint, name, role + _part(checkpoint, name), axis, count))
        elif part := _OWN.match(rest):
            template = f"{part['head']}{{expert}}.{part['tail']}"
            if (role := places.own.get(template)) is None:
                raise MoesaicError(f"{checkpoint.name}: unknown expert tensor {name}")
            ending = checkpoint.packed.get(name, "")
            stem = name.removesuffix(ending).removesuffix(rest) + template + ending
            own.setdefault((role + _part(checkpoint, name), stem), set()).add(int(part["expert"]))
        elif any(rest.startswith(f"{start}.") for start in places.shared):
            shared.append(name)
    tensors = [*stacked, *(_own(checkpoint, *key, experts, count) for key, experts in own.items())]
    roles = {tensor.role.partition(" ")[0] for tensor in tensors}
    if not roles - ROUTER_ROLES:
        return None
    inputs = {"gate", "up"} if family.gated else {"up"}
    if not {"router", "down"} <= roles or not ("gate_up" in roles or inputs <= roles):
        raise MoesaicError(
            f"{checkpoint.name}: layer {index} has {', '.join(sorted(roles))} but no complete experts and router"
        )
    tensors.sort(key=lambda tensor: (tensor.role, tensor.name))
    return MoELayerTensors(layer=index, num_experts=count, expert_tensors=tuple(tensors), shared=tuple(sorted(shared)))


def _part(checkpoint: Checkpoint, name: str) -> str:
    """What is added to the role of a tensor that is codes or scales."""
    return f" {ending}" if (ending := checkpoint.packed.get(name)) else ""


def _stacked(checkpoint: Checkpoint, name: str, role: str, axis: int, count: int) -> ExpertTensor:
    shape = checkpoint.tensors[name].shape
    if len(shape) <= axis or shape[axis] != count:
        raise MoesaicError(f"{checkpoint.name}: {name} has shape {list(shape)}, but config.json says {count} experts")
    return ExpertTensor(role=role, name=name, axis=axis)


def _own(checkpoint: Checkpoint, role: str, template: str, experts: set[int], count: int) -> ExpertTensor:
    if experts != set(range(count)):
        wrong = min(experts ^ set(range(count)))
        state = "missing" if wrong < count else f"there, but config.json says {count} experts"
        raise MoesaicError(f"{checkpoint.name}: {template.format(expert=wrong)} is {state}")
    infos = [checkpoint.tensors[template.format(expert=expert)] for expert in range(count)]
    for info in infos[1:]:
        if (info.shape, info.dtype) != (infos[0].shape, infos[0].dtype):
            raise MoesaicError(
                f"{checkpoint.name}: {info.name} is {info.dtype} {list(info.shape)}, but {infos[0].name} is "
                f"{infos[0].dtype} {list(infos[0].shape)}"
            )
    return ExpertTensor(role=role, name=template, axis=None)
