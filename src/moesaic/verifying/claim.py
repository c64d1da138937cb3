"""What a target claims about itself: read from its moesaic.json and config, before any model is loaded (no torch)."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import factorial, frexp
from typing import Any

from moesaic.checkpoint.record import PROVENANCE_FILE, fingerprint, read_provenance
from moesaic.checkpoint.source import Checkpoint
from moesaic.common.errors import MoesaicError
from moesaic.common.progress import notice
from moesaic.common.recipe import load_recipe
from moesaic.families.dense import DenseModel
from moesaic.families.family import MOE_PREFIX
from moesaic.upcycling.choices import LayerSpec, choose
from moesaic.upcycling.recipe import UpcycleRecipe
from moesaic.upcycling.result import Code, statement


@dataclass(frozen=True, kw_only=True)
class Claim:
    """How a target was made, and the statement that follows.

    Attributes:
        code, text: the statement (`none`: nothing is promised, and why).
        made: how the target was made, one phrase.
        spec: the resolved MoE layers; None where moesaic.json does not say.
        recipe: the upcycle recipe; None likewise.
        shards: M, the number of pieces that every dense FFN was cut into.
        moe_layers: the MoE layers' indices.
        identical: whether every source has the base's weights, so that all other weights are the base's too.
        base_hash: hash of the base's weights that moesaic.json recorded.
        specialist_records: what moesaic.json recorded of each specialist, in the recipe's order.
    """

    code: Code
    text: str
    made: str
    spec: LayerSpec | None
    recipe: UpcycleRecipe | None
    shards: int
    moe_layers: tuple[int, ...]
    identical: bool
    base_hash: str | None
    specialist_records: tuple[Mapping[str, Any], ...] = ()

    @property
    def routed_share(self) -> float:
        """The share of the output that exactly scaled routed experts have: half of it beside shared experts."""
        exact = self.spec is not None and self.spec.factors == self.spec.exact_factors
        return 0.5 if self.spec is not None and self.spec.shared_experts and exact else 1.0

    @property
    def factors_are_powers_of_two(self) -> bool:
        """Whether scaling rounds nothing, whatever the data type."""
        if self.spec is None:
            return False
        factors = self.spec.factors
        return all(frexp(value)[0] == 0.5 for value in (factors.gate_up, factors.down, factors.shared_down))


def read_claim(source: DenseModel, target: Checkpoint) -> Claim:
    """Return what the target says it is, checked against the source.

    Raises:
        MoesaicError: the target is no checkpoint that `upcycle` writes, or not one of this source.
    """
    _refuse_wrong_pair(source, target)
    config = target.config
    shards = int(config["intermediate_size"]) // int(config["moe_intermediate_size"])
    moe_layers = tuple(int(layer) for layer in config["moe_layers"])
    record = read_provenance(target.path)
    if record is None or record["verb"] != "upcycle":
        text = (
            f"{target.name} has no {PROVENANCE_FILE}, so how it was made is not known; the figures are measured"
            if record is None
            else f"`{record['verb']}` has changed the weights since they were upcycled; the figures are measured"
        )
        return Claim(
            code="none",
            text=text,
            made=_from_config(config),
            spec=None,
            recipe=None,
            shards=shards,
            moe_layers=moe_layers,
            identical=False,
            base_hash=None,
        )
    recipe = load_recipe(UpcycleRecipe, record["recipe"])
    spec = choose(recipe, hidden=source.hidden, intermediate=source.intermediate, biases=source.ffn_bias).layer
    hashes = [entry.get("weights_hash") for entry in record["sources"]]
    identical = None not in hashes and len(set(hashes)) == 1
    promise = statement(spec, identical=identical)
    return Claim(
        code=promise.code,
        text="; ".join([promise.text, *_why(spec)]),
        made=_from_recipe(recipe, spec),
        spec=spec,
        recipe=recipe,
        shards=spec.shards,
        moe_layers=moe_layers,
        identical=identical,
        base_hash=hashes[0],
        specialist_records=tuple(record["sources"][1:]),
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
