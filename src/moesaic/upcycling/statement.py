"""What can be promised about the result's MoE layers at initialisation (methods.md section 1). No torch.

D1, D2, D3, N1 and N2 are the statements of that page; S1 is the one with shared experts. All hold for the FFN of each
MoE layer, in exact arithmetic; rounding to the result's dtype comes on top.
"""

from dataclasses import dataclass
from typing import Literal

from moesaic.upcycling.choices import LayerSpec

Code = Literal["N1", "N2", "D1", "D2", "D3", "S1", "none"]


@dataclass(frozen=True, kw_only=True)
class Statement:
    """One statement about every MoE layer: its code in methods.md, and a sentence."""

    code: Code
    text: str

    @property
    def preserves(self) -> bool:
        """Whether every MoE layer computes what the dense FFN computes."""
        return self.code in ("N1", "D2", "S1")


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
    whole = spec.exact_factors.down * (2 if spec.shared_experts else 1)
    if spec.factors != spec.exact_factors and (spec.factors.gate_up, spec.factors.down) != (1.0, whole):
        return "the scale is not the exact one"
    if spec.top_k % spec.shards:
        return f"K={spec.top_k} is not a multiple of M={spec.shards}"
    covers = spec.router_init == "latin_square" or (spec.router_init == "tied" and spec.routing == "topk")
    if spec.shards > 1 and not covers:
        return f"{spec.router_init} router rows under {spec.routing} do not give every token all shards"
    return None
