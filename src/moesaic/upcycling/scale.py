"""The factor that undoes what routing weights take away from the experts' sum. E experts, K active, M shards."""

from dataclasses import dataclass

from moesaic.upcycling.recipe import Scale, Weighting


@dataclass(frozen=True, kw_only=True)
class Factors:
    """Factors on the linear maps of a layer's experts; applied in float32 before the cast to the output's dtype."""

    gate_up: float
    """On gate and up (and their biases) of every routed expert."""
    down: float
    """On down (and its bias) of every routed expert."""
    shared_down: float
    """On down (and its bias) of the shared experts."""


def factors(*, scale: Scale, weighting: Weighting, experts: int, top_k: int, shards: int, shared: int) -> Factors:
    """Factors of one layer (methods.md section 1).

    `exact`: weights that sum to 1 over K = M*(whole groups) give each shard 1/M, so down times M; a softmax over all E
    without renormalisation gives 1/E at a flat router, so down times E*M/K. With S shared experts (S whole FFNs) the
    routed part gets one half and each shared expert 1/(2S), so that exact experts still add up to the FFN.
    `paper`: the cube root of E*M/K (equation 5 of DivMoE: E_exp*G^2/k with E = E_exp*G, G = M) on all three matrices,
    whatever the weighting; the shared experts are left alone, as with `none`.
    """
    exact = {"selected": float(shards), "all": experts * shards / top_k}
    root = (experts * shards / top_k) ** (1 / 3)
    half = 0.5 if shared else 1.0
    table: dict[Scale, Factors] = {
        "exact": Factors(gate_up=1.0, down=exact[weighting] * half, shared_down=half / max(shared, 1)),
        "paper": Factors(gate_up=root, down=root, shared_down=1.0),
        "none": Factors(gate_up=1.0, down=1.0, shared_down=1.0),
    }
    return table[scale]
