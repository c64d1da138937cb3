"""A family's row read off transformers' own class: a tiny model of it is built, and looked at.

What changes its shape with the number of experts has a slot per expert; where each number goes when transformers writes
a checkpoint says how that is stored; and the router is asked how it decides (`decide`). Needs torch and transformers:
only `moe_table.family_of` imports this, for a family without a written row.

Letters: E experts, K active.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from moesaic.common.errors import MoesaicError
from moesaic.families.decide import Asked, ask, decision_of
from moesaic.families.family import Decision, Layouts, MoEFamily, Places, Spelling
from moesaic.families.places import LAYER, read_places
from moesaic.families.shrink import EXPERT_KEYS, EXPERTS, GROUP_KEYS, HIDDEN, TOP_K, TOP_K_KEYS, tiny_config

_MORE = 4
"""Experts that are added to see what grows."""

_ROUTER_NAMES = ("gate", "router")

_SCALING_KEYS = ("routed_scaling_factor", "route_scale", "router_scaling_factor", "moe_routed_scaling_factor")
_FACTOR = 1.75

_VECTOR_ROLES = {
    "none": "router_bias",
    "scores": "selection_bias",
    "logits": "selection_bias",
    "weights": "router_scale",
}


@dataclass(frozen=True, kw_only=True, eq=False)
class _Found:
    """One MoE layer of a tiny model."""

    model: Any
    experts_name: str
    router_name: str

    @property
    def experts(self) -> Any:
        return self.model.get_submodule(self.experts_name)

    @property
    def block(self) -> nn.Module:
        return self.model.get_submodule(self.experts_name.rpartition(".")[0])

    @property
    def router(self) -> nn.Module:
        return self.model.get_submodule(self.router_name)


@cache
def derive(model_type: str, flags: tuple[tuple[str, Any], ...] = ()) -> MoEFamily:
    """The row of a family; `flags` are switches of a checkpoint's config.json that may decide what its router does.

    Raises:
        LookupError: the class has no experts.
        MoesaicError: why the family cannot be used, in one line.
    """
    about = f"model_type {model_type!r}"
    found = _find(_tiny(model_type, {**dict(flags), **_scalings(model_type)}, about), about)
    config = found.model.config.to_dict()
    experts_key = _key(config, found.model.config, EXPERT_KEYS, EXPERTS)
    grown = _tiny(model_type, {**dict(flags), experts_key: EXPERTS + _MORE}, about, device="meta")
    axes = _axes(found.model, grown, about)
    asked, decision = _asked(found, config, about)
    top_k_key = _key(config, found.model.config, TOP_K_KEYS, getattr(found.router, "top_k", TOP_K))
    roles = _roles(found, axes, decision)
    places, same = read_places(found.model, axes, roles, about)
    groups = tuple(next((key for key in keys if key in config), "") for keys in GROUP_KEYS)
    grouped = decision is not None and decision.group_rank != "none"
    experts, plain = found.experts, _is_plain(found, decision)
    known = decision is not None and decision.weighting != "one after the other"
    return MoEFamily(
        model_type=model_type,
        about=type(found.model).__name__.removesuffix("ForCausalLM"),
        notes=_notes(decision),
        derived=True,
        experts_key=experts_key,
        top_k_key=top_k_key,
        scoring=decision.scoring if decision is not None else "unknown",
        weighting="selected" if decision is not None and decision.weighting == "selected" else "all",
        adds_up=_adds_up(config, decision),
        scaling_key=_scaling_key(config),
        group_keys=(groups[0], groups[1]) if grouped else None,
        selection_bias="selection_bias" in roles.values(),
        layouts=_layouts(places),
        transposed=experts.is_transposed,
        interleaved=not experts.is_concatenated,
        gated=experts.has_gate,
        places=places,
        uniform=same,
        returns=decision.returns if decision is not None else "logits",
        routers=(type(found.router).__name__,) if known else (),
        decision=None if plain else decision,
        router_weights_in_fp32=plain and _weights_in_fp32(asked),
        no_twin="its class was only looked at: which dense model it is made of is not known",
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class TinyRouter:
    """The router of a tiny model of a family, with random weights."""

    asked: Asked
    experts: int
    hidden: int


def tiny_router(model_type: str, flags: tuple[tuple[str, Any], ...]) -> TinyRouter:
    """A family's router, to be asked; raises as `derive` does."""
    about = f"model_type {model_type!r}"
    found = _find(_tiny(model_type, dict(flags), about), about)
    asked, _ = _asked(found, found.model.config.to_dict(), about)
    return TinyRouter(asked=asked, experts=EXPERTS, hidden=HIDDEN)


def causal_types() -> frozenset[str]:
    """The model types that transformers has a causal language model for."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return frozenset(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def flags_of(config: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """What may decide how a router chooses: switches, words and fractions of a config.json that are about routing."""
    named = re.compile(r"topk|score|scoring|expert|rout|renorm")
    return tuple(
        sorted(
            (key, value)
            for key, value in config.items()
            if isinstance(value, (bool, str, float)) and named.search(key) and not key.startswith("output")
        )
    )


# --- a tiny model and its parts ---------------------------------------------------------------------------------------


def _tiny(model_type: str, values: dict[str, Any], about: str, device: str = "cpu") -> Any:
    """A tiny model with random weights; a MoesaicError for a family that transformers cannot build so."""
    from transformers import AutoModelForCausalLM

    try:
        with torch.device(device), torch.random.fork_rng():
            return AutoModelForCausalLM.from_config(tiny_config(model_type, **values), dtype=torch.float32).eval()
    except Exception as error:  # whatever a family's own code raises says the same: it cannot be looked at
        reason = " ".join(str(error).split())[:160]
        raise MoesaicError(f"{about}: no tiny model of it can be built to look at ({reason})") from error


def _find(model: Any, about: str) -> _Found:
    """The last MoE layer; refuses a family without one, and one whose experts are not in decoder layers."""
    names = [name for name, module in model.named_modules() if hasattr(module, "is_concatenated")]
    if not names:
        raise LookupError(f"{about}: its tiny model has no experts of transformers' experts interface")
    block = names[-1].rpartition(".")[0]
    children = dict(model.get_submodule(block).named_children())
    router = next((name for name in _ROUTER_NAMES if name in children), None)
    if router is None or not LAYER.match(names[-1]):
        raise MoesaicError(f"{about}: no router stands beside its experts {names[-1]}")
    return _Found(model=model, experts_name=names[-1], router_name=f"{block}.{router}")


def _key(config: Mapping[str, Any], settings: Any, keys: tuple[str, ...], value: int) -> str:
    """The key of a family's config under which the tiny one has a number, the first of `keys` that is written out."""
    written = [key for key in keys if config.get(key) == value]
    return written[0] if written else next(key for key in keys if getattr(settings, key, None) == value)


def _axes(model: Any, grown: Any, about: str) -> dict[str, int]:
    """Parameter or buffer -> the axis along which more experts make it longer, by exactly as many.

    Raises:
        MoesaicError: one grows by something else, or has rows for more than the routed experts.
    """
    axes, larger = {}, grown.state_dict()
    for name, tensor in model.state_dict().items():
        grows = [
            axis for axis, (one, other) in enumerate(zip(tensor.shape, larger[name].shape, strict=True)) if one != other
        ]
        if not grows:
            continue
        axis = grows[0]
        if len(grows) > 1 or (tensor.shape[axis], larger[name].shape[axis]) != (EXPERTS, EXPERTS + _MORE):
            raise MoesaicError(
                f"{about}: {name} has {tensor.shape[axis]} rows for {EXPERTS} routed experts; "
                "what has no slot per expert cannot be cut"
            )
        axes[name] = axis
    return axes


def _asked(found: _Found, config: Mapping[str, Any], about: str) -> tuple[Asked, Decision | None]:
    """The router's rule, or None where no reference decides as it does.

    Raises:
        MoesaicError: the router needs more than hidden states: ids of tokens, or what another layer's router gave.
    """
    for module in found.model.modules():
        buffers = dict(module.named_buffers(recurse=False))
        if any(not tensor.is_floating_point() and "tid2eid" in name for name, tensor in buffers.items()):
            raise MoesaicError(f"{about}: routers of its first layers choose experts by a table of token ids")
    groups = next((int(config[key]) for key in GROUP_KEYS[0] if config.get(key)), 1)
    chosen = next((int(config[key]) for key in GROUP_KEYS[1] if config.get(key)), 1)
    try:
        asked = ask(found.block, found.router.double(), EXPERTS)
        try:
            decision = decision_of(asked, hidden=HIDDEN, groups=groups, chosen=chosen)
        except RuntimeError:  # a router that casts its input to fp32, whatever its own dtype
            asked = ask(found.block, found.router.float(), EXPERTS)
            decision = decision_of(asked, hidden=HIDDEN, groups=groups, chosen=chosen)
    except LookupError as error:
        raise MoesaicError(f"{about}: {error}, which a model with fewer experts cannot give it") from error
    found.router.float()
    return asked, decision


def _roles(found: _Found, axes: Mapping[str, int], decision: Decision | None) -> dict[str, str]:
    """Name of a parameter with a slot per expert, below its layer -> role."""
    roles: dict[str, str] = {}
    vector = _VECTOR_ROLES[decision.bias_on] if decision is not None else "router_scale"
    for name in axes:
        match = LAYER.match(name)
        if match is None:
            continue
        rest = match["rest"]
        if rest.startswith(f"{_below(found.experts_name)}."):
            roles[rest] = rest.rpartition(".")[2].replace("_proj", "")
        else:
            is_vector = found.model.state_dict()[name].numel() == EXPERTS
            roles[rest] = vector if is_vector else "router"
    return roles


def _below(name: str) -> str:
    match = LAYER.match(name)
    assert match is not None
    return match["rest"]


def _adds_up(config: Mapping[str, Any], decision: Decision | None) -> bool:
    if decision is None or decision.weighting == "one after the other":
        return False
    shared = decision.weighting == "selected" or decision.scoring == "softmax"
    return shared or _scaling_key(config) is not None


@torch.no_grad()
def _weights_in_fp32(asked: Asked) -> bool:
    """Whether the weights stay in fp32 in a bf16 model."""
    weights = [values.dtype for values in asked.in_dtype(torch.bfloat16, HIDDEN)]
    return weights[1] == torch.float32


def _is_plain(found: _Found, decision: Decision | None) -> bool:
    """Whether our training rules, which know softmax weights of plain logits, can stand in for the router."""
    if decision is None or decision.weighting == "one after the other" or _scaling_key(found.model.config.to_dict()):
        return False
    if (decision.scoring, decision.bias_on, decision.group_rank) != ("softmax", "none", "none"):
        return False
    router = found.router
    names = [name for name, _ in [*router.named_parameters(), *router.named_buffers()]]
    return names == ["weight"] and decision.returns == "logits" and hasattr(router, "top_k")


def _scaling_key(config: Mapping[str, Any]) -> str | None:
    return next((key for key in _SCALING_KEYS if key in config), None)


def _scalings(model_type: str) -> dict[str, float]:
    """A value of the factor on the weights that cannot be taken for none."""
    from transformers import AutoConfig

    return {key: _FACTOR for key in _SCALING_KEYS if key in AutoConfig.for_model(model_type).to_dict()}


def _notes(decision: Decision | None) -> str:
    if decision is None:
        return "read off transformers' class; its router decides as no reference does"
    weights = {"selected": "weights of the selected", "all": "weights as scored"}
    words = [decision.scoring, weights.get(decision.weighting, f"weights {decision.weighting}")]
    words += ["a bias for the choice"] if decision.bias_on in ("scores", "logits") else []
    words += ["groups"] if decision.group_rank != "none" else []
    return f"read off transformers' class: {', '.join(words)}"


def _layouts(places: Places) -> Layouts:
    """The one spelling that derived families are read and written in: their own."""
    router = next(name for name, (role, _) in places.stacked.items() if role == "router")
    spelling = Spelling(router=router)
    return Layouts(family=spelling, per_expert=None, fused=spelling, reason="it has no written row")
