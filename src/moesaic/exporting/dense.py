"""`--to dense --specialist NAME`: one specialist back out of a model that `upcycle` made of several (divmoe, btx).

Its FFNs are the specialist's, put together from its experts: expert e*M + j holds shard j of specialist e, times the
factors of `upcycle` that are in the weights. All else is the mixture's. N specialists, M shards. Torch-free.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import frexp
from pathlib import Path
from typing import Any

from moesaic.checkpoint.headers import TensorInfo
from moesaic.checkpoint.lazy import Lazy, concat, stored
from moesaic.checkpoint.record import read_provenance
from moesaic.checkpoint.source import Checkpoint
from moesaic.common.errors import MoesaicError, suggest
from moesaic.exporting.view import View, view_of
from moesaic.families.dense_table import FAMILIES
from moesaic.families.experts import ExpertWeights, widened
from moesaic.families.family import our_base
from moesaic.families.moe import MoELayerTensors, detect_moe

_METHODS = ("divmoe", "btx")
_MOST_RUNS = 1000
"""Training runs, each from the one before, that are followed back to the upcycling; a circle of them ends."""

_OUR_KEYS = frozenset({
    "num_experts", "num_experts_per_tok", "moe_intermediate_size", "num_shared_experts", "moe_layers", "routing_rule",
    "routing_weighting", "routed_scaling_factor", "expert_groups", "group_score", "expert_mlp_bias", "auto_map",
    "output_router_logits", "router_aux_loss_coef",
})  # fmt: skip
"""Keys of config.json that a dense model does not have."""

_WHOSE = {
    "mean": "the mean over all specialists",
    "base": "the base's",
    "random-specialist": "of one specialist drawn for each layer",
    "reinit": "drawn anew",
}
"""`--shared-weights` -> whose weights attention, norms and embeddings were when the mixture was made."""


@dataclass(frozen=True, kw_only=True)
class Extraction:
    """One specialist, resolved: what `export` writes, and what the user is told."""

    base: str
    """Model type of the result."""
    why: str
    tensors: Mapping[str, Lazy]
    config: Mapping[str, Any]
    notices: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Upcycling:
    """What moesaic.json says of how a mixture was made."""

    recipe: Mapping[str, Any]
    trained: bool
    """Whether the weights were trained afterwards."""

    @property
    def names(self) -> list[str]:
        """The specialists, in the order of their experts."""
        return [one["name"] for one in self.recipe["specialists"]]


def specialist_of(checkpoint: Checkpoint, name: str) -> Extraction:
    """Resolve one specialist of a mixture, from headers alone.

    Raises:
        MoesaicError: a checkpoint that was not made of specialists, another name than its record has, other experts
            than it had then.
    """
    made = _upcycling(checkpoint)
    if name not in made.names:
        raise MoesaicError(f"--specialist {name}: {checkpoint.name} has none of this name; {suggest(name, made.names)}")
    view = view_of(checkpoint)
    gate_up, down = weight_factors(made.recipe, view.config)
    number, shards = made.names.index(name), made.recipe["shards"]
    _refuse_other_experts(view, len(made.names), shards)
    tensors = dict(view.others)
    for layer in detect_moe(checkpoint).layers:
        own = [_expert(checkpoint.tensors, layer, number * shards + shard) for shard in range(shards)]
        tensors |= _dense_ffn(view.base, layer.layer, _divided(ExpertWeights.concatenate(own), gate_up, down))
    return Extraction(
        base=view.base,
        why=f"specialist {name} of {len(made.names)}",
        tensors=tensors,
        config=_dense_config(view, checkpoint.config),
        notices=_notices(checkpoint, made, view, name, (gate_up, down)),
    )


def _upcycling(checkpoint: Checkpoint) -> Upcycling:
    """The record of the upcycling that a checkpoint comes from, through training runs."""
    record, trained = read_provenance(checkpoint.path) or {}, False
    for _ in range(_MOST_RUNS):
        if record.get("verb") == "upcycle" and dict(record.get("recipe") or {}).get("method") in _METHODS:
            _refuse_damaged(record["recipe"], checkpoint.name)
            return Upcycling(recipe=record["recipe"], trained=trained)
        sources = record.get("sources") or []
        if record.get("verb") not in ("train", "export") or len(sources) != 1:
            break
        trained = trained or record["verb"] == "train"
        source = Path(str(sources[0].get("path")))
        record = (read_provenance(source) or {}) if source.is_dir() else {}
    raise MoesaicError(
        f"--specialist: {checkpoint.name} has no record (moesaic.json) of `upcycle --method divmoe` or `btx`, which "
        "names specialists; other methods make their experts of one model"
    )


def _refuse_damaged(recipe: Mapping[str, Any], name: str) -> None:
    """Refuse a record whose settings are not of the types that `upcycle` writes."""
    kinds = {"shards": int, "top_k": int, "scale": str, "weighting": (str, type(None)), "shared_experts": int}
    wrong = [key for key, kind in kinds.items() if not isinstance(recipe.get(key), kind)]
    named = recipe.get("specialists")
    if not isinstance(named, list) or not all(
        isinstance(one, dict) and isinstance(one.get("name"), str) and "path" in one for one in named
    ):
        wrong.append("specialists")
    if wrong or recipe.get("shared_weights") not in _WHOSE or min(recipe["shards"], recipe["top_k"]) < 1:
        raise MoesaicError(
            f"{name}: moesaic.json: recipe.{(wrong or ['shards, top_k or shared_weights'])[0]} is not what `upcycle` "
            "writes; bring the file back"
        )


def _refuse_other_experts(view: View, specialists: int, shards: int) -> None:
    config, name = view.config, view.checkpoint.name
    if our_base(view.checkpoint.config.get("model_type")) is None:
        raise MoesaicError(f"--specialist: {name} is a native family now; give the checkpoint that `upcycle` wrote")
    if config["num_experts"] != specialists * shards:
        raise MoesaicError(
            f"--specialist: {name} has {config['num_experts']} experts, and {specialists} specialists in {shards} "
            f"shards made {specialists * shards}; give the checkpoint before it was cut or grown"
        )
    if config["moe_intermediate_size"] * shards != config["intermediate_size"]:
        raise MoesaicError(
            f"--specialist: {name}: {shards} shards of {config['moe_intermediate_size']} are no whole FFN"
        )


def weight_factors(recipe: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[float, float]:
    """What `upcycle` multiplied gate and up, and down, of every routed expert by, as far as it is in the weights.

    The factor of `--scale exact` (docs/statements.md) is on the routing weights where the config has
    `routed_scaling_factor`, and in down in checkpoints from before that.
    """
    experts, top_k, shards = config["num_experts"], recipe["top_k"], recipe["shards"]
    share = experts * shards / top_k
    if recipe["scale"] == "none":
        return 1.0, 1.0
    if recipe["scale"] == "paper":
        return share ** (1 / 3), share ** (1 / 3)
    weighting = recipe["weighting"] or config["routing_weighting"]
    exact = (share if weighting == "all" else float(shards)) * (0.5 if recipe["shared_experts"] else 1.0)
    return 1.0, exact / float(config.get("routed_scaling_factor") or 1.0)


def _expert(tensors: Mapping[str, TensorInfo], layer: MoELayerTensors, number: int) -> ExpertWeights[Lazy]:
    """One expert of our architecture, whose matrices are stacked, gate rows above up rows."""
    roles = {one.role: stored(tensors[one.name]).index(number) for one in layer.expert_tensors if one.axis == 0}
    width = roles["gate_up"].shape[0] // 2
    biases: dict[str, Lazy] = {}
    if "gate_up_bias" in roles:
        both = roles["gate_up_bias"]
        biases = {"gate_bias_I": both.rows(0, width), "up_bias_I": both.rows(width, 2 * width)}
        biases["down_bias_D"] = roles["down_bias"]
    return ExpertWeights(
        gate_ID=roles["gate_up"].rows(0, width),
        up_ID=roles["gate_up"].rows(width, 2 * width),
        down_DI=roles["down"],
        **biases,
    )


def _divided(ffn: ExpertWeights[Lazy], gate_up: float, down: float) -> ExpertWeights[Lazy]:
    """The FFN without the factors: divided in float32 or wider, rounded once to the stored type."""
    if gate_up == down == 1.0:
        return ffn
    factors = {"down_DI": down, "down_bias_D": down}
    kinds = {part: value.dtype for part, value in ffn.parts().items()}
    return widened(ffn, "F32").map(lambda part, value: (value / factors.get(part, gate_up)).cast(kinds[part]))


def _dense_ffn(base: str, layer: int, ffn: ExpertWeights[Lazy]) -> dict[str, Lazy]:
    """The tensors of a dense layer's FFN under the base's names."""
    family, place = FAMILIES[base], f"model.layers.{layer}."
    made = {f"{place}{family.down}.weight": ffn.down_DI}
    parts = [(family.gate, ffn.gate_ID, ffn.gate_bias_I), (family.up, ffn.up_ID, ffn.up_bias_I)]
    if family.fused_gate_up is not None:
        bias = None
        if ffn.gate_bias_I is not None and ffn.up_bias_I is not None:
            bias = concat([ffn.gate_bias_I, ffn.up_bias_I])
        parts = [(family.fused_gate_up, concat([ffn.gate_ID, ffn.up_ID]), bias)]
    for name, weight, bias in (*parts, (family.down, ffn.down_DI, ffn.down_bias_D)):
        made[f"{place}{name}.weight"] = weight
        if bias is not None:
            made[f"{place}{name}.bias"] = bias
    return made


def _dense_config(view: View, config: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in config.items() if key not in _OUR_KEYS}
    return {**kept, "model_type": view.base, "architectures": [FAMILIES[view.base].causal_class]}


def _notices(
    checkpoint: Checkpoint, made: Upcycling, view: View, name: str, factors: tuple[float, float]
) -> tuple[str, ...]:
    """What the result has of the specialist and what it has not."""
    path = next(one["path"] for one in made.recipe["specialists"] if one["name"] == name)
    whose = "as training left them" if made.trained else _WHOSE[made.recipe["shared_weights"]]
    ffns = "as training left them" if made.trained else "as they were"
    found = [
        f"the FFNs of {len(view.layers)} layers are those of {name}, {ffns}; attention, norms and embeddings are those "
        f"of {checkpoint.name} ({whose}), not {name}'s own (it was read from {path})"
    ]
    if any(frexp(factor)[0] != 0.5 for factor in factors):
        shown = " and ".join(f"{factor:.6g}" for factor in dict.fromkeys(factors) if factor != 1.0)
        found.append(f"the experts' weights have the factor {shown} in them: divided by it, equal to rounding")
    if any(layer.shared for layer in view.layers):
        found.append(f"the shared experts of {checkpoint.name} (the base's FFN) are left out")
    return tuple(found)
