"""How a target was made, and the statement that follows: from its moesaic.json and config, before a model is loaded.

Here `upcycle`'s own functions are asked which statement a recipe gives, so `verify` needs no second table. No torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import factorial, frexp
from typing import Any

from moesaic.checkpoint.record import PROVENANCE_FILE, fingerprint, read_provenance, weights_hash
from moesaic.checkpoint.source import Checkpoint, open_checkpoint
from moesaic.checkpoint.streaming import scan
from moesaic.common.errors import MoesaicError
from moesaic.common.progress import notice
from moesaic.common.recipe import load_recipe
from moesaic.common.statement import Code
from moesaic.families.dense import DenseModel, detect
from moesaic.families.family import MOE_PREFIX
from moesaic.upcycling.choices import LayerSpec, choose
from moesaic.upcycling.recipe import UpcycleRecipe
from moesaic.upcycling.result import statement


@dataclass(frozen=True, kw_only=True)
class Origin:
    """How a target was made, and the statement that follows.

    Attributes:
        code, text: the statement (`none`: nothing is promised, and why).
        made: how the target was made, one phrase.
        shards: M, the number of pieces that every dense FFN was cut into.
        moe_layers: the MoE layers' indices.
        spec: the resolved MoE layers; None where moesaic.json does not say.
        identical: whether every source has the base's weights, so that all other weights are the base's too.
        base_hash: hash of the base's weights that moesaic.json recorded.
        specialists: place of each specialist, and what moesaic.json recorded of it.
    """

    code: Code
    text: str
    made: str
    shards: int
    moe_layers: tuple[int, ...]
    spec: LayerSpec | None = None
    identical: bool = False
    base_hash: str | None = None
    specialists: tuple[tuple[str, Mapping[str, Any]], ...] = ()

    @property
    def routed_share(self) -> float:
        """The share of the output that exactly scaled routed experts have: half of it beside shared experts."""
        exact = self.spec is not None and self.spec.factors == self.spec.exact_factors
        return 0.5 if self.spec is not None and self.spec.shared_experts and exact else 1.0

    @property
    def factors_are_powers_of_two(self) -> bool:
        """Whether scaling rounds no stored number, whatever the data type."""
        if self.spec is None:
            return False
        factors = self.spec.factors
        return all(frexp(value)[0] == 0.5 for value in (factors.gate_up, factors.down, factors.shared_down))


def read_origin(source: DenseModel, target: Checkpoint) -> Origin:
    """Return what the target says it is, checked against the source.

    Raises:
        MoesaicError: the target is no checkpoint that `upcycle` writes, or not one of this source.
    """
    _refuse_wrong_pair(source, target)
    config = target.config
    shards = int(config["intermediate_size"]) // int(config["moe_intermediate_size"])
    moe_layers = tuple(int(layer) for layer in config["moe_layers"])
    record = read_provenance(target.path)
    if record is None or record.get("verb") != "upcycle":
        text = (
            f"{target.name} has no {PROVENANCE_FILE}, so how it was made is not known; the figures are measured"
            if record is None
            else f"`{record.get('verb')}` has changed the weights since they were upcycled; the figures are measured"
        )
        return Origin(code="none", text=text, made=_from_config(config), shards=shards, moe_layers=moe_layers)
    where = f"{target.path / PROVENANCE_FILE}"
    recipe = load_recipe(UpcycleRecipe, record.get("recipe", {}), name=f"{where}: recipe")
    sources = record.get("sources", [])
    if len(sources) != 1 + len(recipe.specialists):
        raise MoesaicError(
            f"{where}: sources has {len(sources)} entries, for a base and {len(recipe.specialists)} more"
        )
    spec = choose(recipe, hidden=source.hidden, intermediate=source.intermediate, biases=source.ffn_bias).layer
    if config.get("routed_scaling_factor", 1.0) != spec.factors.weights:  # written before the config had that key
        spec = replace(spec, factors=spec.factors.folded, exact_factors=spec.exact_factors.folded)
    hashes = [entry.get("weights_hash") for entry in sources]
    identical = None not in hashes and len(set(hashes)) == 1
    promise = statement(spec, identical=identical)
    return Origin(
        code=promise.code,
        text="; ".join([promise.text, *_why(spec)]),
        made=_from_recipe(recipe, spec),
        shards=spec.shards,
        moe_layers=moe_layers,
        spec=spec,
        identical=identical,
        base_hash=hashes[0],
        specialists=tuple(zip((one.path for one in recipe.specialists), sources[1:], strict=True)),
    )


def _refuse_wrong_pair(source: DenseModel, target: Checkpoint) -> None:
    config, name = target.config, source.checkpoint.name
    model_type = str(config.get("model_type"))
    if not model_type.startswith(MOE_PREFIX):
        raise MoesaicError(
            f"{target.name}: is a {model_type} model; verify compares a dense source with a target that "
            "`moesaic upcycle` wrote"
        )
    pairs = {
        "model_type": (model_type.removeprefix(MOE_PREFIX), source.family.model_type),
        "hidden_size": (config.get("hidden_size"), source.hidden),
        "intermediate_size": (config.get("intermediate_size"), source.intermediate),
        "num_hidden_layers": (config.get("num_hidden_layers"), source.num_layers),
        "vocab_size": (config.get("vocab_size", source.vocab), source.vocab),
    }
    for key, (theirs, ours) in pairs.items():
        if theirs != ours:
            raise MoesaicError(
                f"{target.name}: was not made from {name}: {key} is {theirs} there and {ours} in {name}; give the base "
                f"that its {PROVENANCE_FILE} names"
            )


def _from_config(config: Mapping[str, Any]) -> str:
    return (
        f"{config['num_experts']} experts, top-{config['num_experts_per_tok']}, {config['routing_rule']}, weighting "
        f"{config['routing_weighting']}"
    )


def _from_recipe(recipe: UpcycleRecipe, spec: LayerSpec) -> str:
    copies = spec.experts // spec.shards
    origin = f" = {copies} {'specialists' if spec.specialists else 'copies'} x {spec.shards} shards"
    shared = f" + {spec.shared_experts} shared" if spec.shared_experts else ""
    return (
        f"{recipe.method}, {spec.experts} experts{origin if spec.shards > 1 else ''}{shared}, top-{spec.top_k}, "
        f"{spec.routing}, weighting {spec.weighting}, {spec.router_init} router, scale {recipe.scale}"
    )


def _why(spec: LayerSpec) -> list[str]:
    """Return what else explains a random router's figures: no latin square exists, M!/M^M of the tokens are covered."""
    reasons: list[str] = []
    if spec.router_init != "random" or spec.shards == 1:
        return reasons
    domains = spec.experts // spec.shards
    if spec.specialists and domains % spec.shards:
        reasons.append(f"M={spec.shards} does not divide N={domains}, so there is no latin square")
    if spec.routing == "one_per_group" and spec.shards == spec.top_k:
        share = factorial(spec.shards) / spec.shards**spec.shards
        reasons.append(f"random rows give all {spec.shards} shards to {100 * share:.2g}% of the tokens")
    return reasons


def other_weights(source: Checkpoint, recorded: str | None, *, quiet: bool) -> list[str]:
    """A note where a source's weights are not those whose hash the target recorded; figures are made all the same."""
    if recorded is None or fingerprint(source) == recorded:
        return []
    message = (
        f"the weights of {source.name} are not those that {PROVENANCE_FILE} records for the source: they have changed, "
        "or this is another model"
    )
    notice(message, quiet=quiet)
    return [message]


# --- specialists ------------------------------------------------------------------------------------------------------


def open_specialists(origin: Origin, base: DenseModel) -> tuple[list[DenseModel] | None, list[str]]:
    """Open the base and the specialists that a statement is about.

    Returns:
        The models, or None where there are none or they cannot be compared with; and notes that say why not.
    """
    if not origin.specialists:
        return None, []
    models = [base]
    try:
        for path, record in origin.specialists:
            model = detect(open_checkpoint(path))
            _refuse_another(base, model, record, origin.moe_layers)
            models.append(model)
    except MoesaicError as error:
        return None, [f"the experts could not be compared with the specialists' own files: {error}"]
    return models, []


def _refuse_another(
    base: DenseModel, specialist: DenseModel, record: Mapping[str, Any], moe_layers: Sequence[int]
) -> None:
    """Refuse a model of another shape than the base, or with other weights than `upcycle` read."""
    name = specialist.checkpoint.name
    for key in ("hidden", "intermediate", "num_layers", "activation", "ffn_bias"):
        ours, theirs = getattr(base, key), getattr(specialist, key)
        if ours != theirs:
            raise MoesaicError(f"{name} is another model than the base: {key} is {theirs} there and {ours} in the base")
    if not _has_recorded_weights(specialist, record, moe_layers):
        raise MoesaicError(
            f"the weights of {name} are not those that {PROVENANCE_FILE} records for it: they have changed, or this is "
            "another model"
        )


def _has_recorded_weights(specialist: DenseModel, record: Mapping[str, Any], moe_layers: Sequence[int]) -> bool:
    """Whether a specialist has the weights whose hash was recorded; also where that cannot be told.

    The hash is of the whole checkpoint where all of it went into the target. Otherwise it is of what was used, which
    can be told again where that was the FFNs alone.
    """
    if record.get("weights_hash") is not None:
        return fingerprint(specialist.checkpoint) == record["weights_hash"]
    parts = [part for layer in moe_layers for part in specialist.ffns[layer].parts().values()]
    used = {info.name: info for part in parts for info in part.sources}
    if record.get("used_tensors") != len(used):
        return True
    hashes = scan(used.values(), 1, allow_nonfinite=True)
    return weights_hash((i.name, i.dtype, i.shape, hashes[i.name]) for i in used.values()) == record.get("used_hash")
