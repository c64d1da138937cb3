"""What can be promised about a result, and what a conversion made (or would make), for people and programs. No torch.

docs/statements.md has the statements D1, D2, D3, N1, N2 and S1, with their proofs and tests. All hold for the
FFN of each MoE layer at initialisation, in exact arithmetic; rounding to the result's dtype comes on top.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moesaic.checkpoint import record as card
from moesaic.common.progress import amount
from moesaic.common.shown import Shown
from moesaic.common.statement import Statement
from moesaic.families.counting import count_shapes
from moesaic.upcycling.choices import LayerSpec
from moesaic.upcycling.plan import UpcyclePlan
from moesaic.upcycling.recipe import UpcycleRecipe


def statement(spec: LayerSpec, *, identical: bool) -> Statement:
    """The strongest statement that holds.

    Args:
        spec: the resolved MoE layers.
        identical: whether all experts, shared ones included, come from the same FFN (one source, or equal weights).
    """
    routed = _routed(spec, identical)
    if not spec.shared_experts:
        return routed
    count = f"{spec.shared_experts} shared expert{'s' if spec.shared_experts > 1 else ''} (the base's whole FFN)"
    if spec.factors != spec.exact_factors:
        return Statement(
            code="none",
            text=f"y = {spec.shared_experts} * FFN(x) + routed(x): the {count} are added unscaled; "
            f"of the routed part: {routed.text}",
        )
    if routed.preserves:
        return Statement(
            code="S1",
            text=f"y = FFN(x) for every x: half from the {count}, half from the routed experts, which add up to the "
            f"FFN by themselves ({routed.code})",
        )
    return Statement(
        code=routed.code, text=f"half the output is FFN(x) from the {count}; of the other half: {routed.text}"
    )


def _routed(spec: LayerSpec, identical: bool) -> Statement:
    """The statement about the routed experts' sum, apart from the half that shared experts take."""
    whose = ", FFN being the specialists' common one" if spec.specialists else ""
    obstacle = _obstacle(spec)
    if obstacle or not identical:
        return _composed(spec, identical, obstacle)
    if spec.weighting == "all":
        return Statement(
            code="N2",
            text="y = rho(x) * FFN(x) with rho(x) = E/T * sum over the T groups that a token uses of the probability "
            f"of one member; rho is at least 1, and 1 only for a flat router{whose}",
        )
    if spec.router_init == "latin_square" and spec.shards > 1:
        # Where all logits are equal every group takes its first expert; without biases FFN(0) = 0 all the same.
        ties = " but 0, where all logits tie" if spec.expert.biases else ""
        return Statement(
            code="D2", text=f"y = FFN(x) for every x{ties}: the latin square gives every token all shards{whose}"
        )
    return Statement(code="N1", text=f"y = FFN(x) for every x and every router that keeps whole groups together{whose}")


def _composed(spec: LayerSpec, identical: bool, obstacle: str | None) -> Statement:
    """Experts from different sources, or shards that need not be complementary."""
    if not spec.method.preserves:
        return Statement(code="none", text=f"nothing is preserved: {obstacle}")
    if obstacle is None and spec.weighting == "selected" and spec.shards > 1:
        over = (
            "" if spec.top_k == spec.shards else f", a mean over {spec.top_k // spec.shards} such sums by their weights"
        )
        return Statement(
            code="D3",
            text=f"y = sum over j of shard j of specialist d_j, all d_j different and known{over}: the distance to the "
            "base is the specialists' own drift",
        )
    if spec.weighting == "selected" and not identical:
        reason = f" ({obstacle})" if obstacle else ""
        return Statement(
            code="D1",
            text="y = sum of w_t * expert_t(x), the weights sum to 1"
            + (", all domains different" if spec.routing == "one_per_group" or spec.shards == 1 else "")
            + f"; nothing more is promised{reason}",
        )
    return Statement(code="none", text=f"nothing is preserved: {obstacle or 'the weights do not sum to 1'}")


def _obstacle(spec: LayerSpec) -> str | None:
    """Why the selected experts, as scaled, do not add up to whole FFNs; None where they do."""
    if not spec.method.preserves:
        return f"--method {spec.method.name} makes experts that are not parts of the FFN"
    # With shared experts the exact factors hold a half; a routed part that adds up to the FFN itself is fine as well.
    whole = spec.exact_factors.routed * (2 if spec.shared_experts else 1)
    if spec.factors != spec.exact_factors and (spec.factors.gate_up, spec.factors.routed) != (1.0, whole):
        return "the scale is not the exact one"
    if spec.top_k % spec.shards:
        return f"K={spec.top_k} is not a multiple of M={spec.shards}"
    covers = spec.router_init == "latin_square" or (spec.router_init == "tied" and spec.routing == "topk")
    if spec.shards > 1 and not covers:
        return f"{spec.router_init} router rows under {spec.routing} do not give every token all shards"
    return None


# --- the result -------------------------------------------------------------------------------------------------------

UNREAD = "nothing was read: where the specialists turn out to have equal weights, more is preserved than said here"
"""What a dry run adds to its statement."""


@dataclass(frozen=True, kw_only=True, repr=False)
class UpcycleResult(Shown):
    """The outcome of `upcycle`."""

    out: Path | None
    """The folder that was written; None for a dry run."""
    plan: UpcyclePlan
    statement: Statement
    notices: tuple[str, ...]
    seconds: float

    @staticmethod
    def count(plan: UpcyclePlan) -> tuple[int, int]:
        """Total and active parameters."""
        counted = count_shapes({tensor.name: tensor.shape for tensor in plan.files.tensors}, plan.config)
        return counted.total, counted.active

    def to_dict(self) -> dict[str, Any]:
        """Everything worth knowing as plain values, for `--json`."""
        layer = self.plan.layer
        total, active = self.count(self.plan)
        return {
            "out": None if self.out is None else str(self.out),
            "method": layer.method.name,
            "experts": layer.experts,
            "top_k": layer.top_k,
            "shards": layer.shards,
            "shared_experts": layer.shared_experts,
            "routing": layer.routing,
            "weighting": layer.weighting,
            "router_init": layer.router_init,
            "moe_layers": list(self.plan.moe_layers),
            "dtype": self.plan.dtype,
            "parameters": total,
            "active_parameters": active,
            "bytes": self.plan.files.nbytes,
            "files": [file.name for file in self.plan.files.files],
            "statement": {"code": self.statement.code, "text": self.statement.text},
            "notices": list(self.notices),
            "seconds": round(self.seconds, 3),
        }

    def brief(self) -> str:
        """What it is, and which statement holds."""
        layer = self.plan.layer
        where = "would be" if self.out is None else f"{self.out}:"
        experts = f"{layer.experts} experts, {layer.top_k} active"
        return f"{where} {layer.method.name}, {experts}, statement {self.statement.code}"

    def lines(self) -> list[str]:
        """The same for people."""
        layer, plan = self.plan.layer, self.plan
        total, active = self.count(plan)
        done = "would write" if self.out is None else f"{self.out}: wrote"
        took = "" if self.out is None else f" in {self.seconds:.1f} s"
        shared = f" and {layer.shared_experts} shared" if layer.shared_experts else ""
        return [
            f"{done} {amount(plan.files.nbytes)} in {len(plan.files.files)} file(s){took}",
            f"{layer.method.name}: {layer.experts} experts{shared}, {layer.top_k} active, "
            f"{len(plan.moe_layers)} of {plan.base.num_layers} layers, routing {layer.routing}, "
            f"router {layer.router_init}",
            f"{total:,} parameters, {active:,} active per token",
            f"{self.statement.code}{' or better' if UNREAD in self.notices else ''}: {self.statement.text}",
        ]


# --- the card ---------------------------------------------------------------------------------------------------------


def model_card(plan: UpcyclePlan, promise: Statement, parameters: tuple[int, int]) -> str:
    """README.md: what it was made of, with which command, how large it is and what it preserves.

    Args:
        plan: the conversion.
        promise: what holds for the MoE layers.
        parameters: total and active ones.
    """
    layer, recipe = plan.layer, plan.recipe
    named = zip(recipe.specialists, plan.specialists, strict=True)
    facts: dict[str, object] = {
        "Method": f"{recipe.method}: {layer.method.description} ({layer.method.paper})",
        "Base": plan.base.checkpoint.name,
        **{f"Specialist {specialist.name}": model.checkpoint.name for specialist, model in named},
        "Routed experts per MoE layer": f"{layer.experts}, {layer.top_k} active per token",
        "Shared experts": layer.shared_experts,
        "MoE layers": f"{len(plan.moe_layers)} of {plan.base.num_layers}",
        "Routing": f"{layer.routing}, softmax over {layer.weighting} experts, router {layer.router_init}",
        "Parameters": f"{parameters[0]:,}, {parameters[1]:,} active per token",
        "At initialisation": f"{promise.code}: {promise.text}",
    }
    return card.model_card(
        title=f"Mixture of experts from {plan.base.checkpoint.name}",
        bases=[model.checkpoint.name for model in plan.models],
        tags=["moe", recipe.method],
        command=command(recipe),
        facts=facts,
    )


def command(recipe: UpcycleRecipe) -> list[str]:
    """The command line that makes the same checkpoint in a folder OUT, nothing left to defaults."""
    flags = {
        name: getattr(recipe, name)
        for name in recipe.__dataclass_fields__
        if name not in ("base", "specialists", "allow_nonfinite")
    }
    specialists = [f"--specialist={specialist.name}={specialist.path}" for specialist in recipe.specialists]
    if recipe.specialists:
        del flags["experts"]
    options = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    nonfinite = ["--allow-nonfinite"] if recipe.allow_nonfinite else []
    return ["moesaic", "upcycle", recipe.base, "OUT", *specialists, *options, *nonfinite]
