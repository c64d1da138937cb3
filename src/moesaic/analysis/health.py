"""How evenly the experts of a layer are used, and what that means in plain words.

Letters: S scopes, L MoE layers, E experts, K active.
"""

import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

from moesaic.analysis.inspection import LEVELS, Level, Verdict

SPREAD_COLLAPSED, SPREAD_SKEWED = 0.25, 0.60
EXCESS_COLLAPSED, EXCESS_SKEWED = 0.45, 0.20
"""DivMoE (5.2) calls 60% of the tokens in two of eight experts a collapse, at K = 2: that is an excess of 0.47."""
SELECTIONS_TO_JUDGE_DEATH = 20

RULE = (
    "Two figures. The spread is (n - K) / (E - K) of a load as uneven as n equally busy experts would make it (n is "
    "exp of its entropy): 0 when all tokens use the same K experts, 1 when all E are used equally often. The excess is "
    "what the K busiest experts take above the K / E of an even load, over the most they could: 0 to 1. "
    f"Collapsed: a spread below {SPREAD_COLLAPSED:.2f}, an excess above {EXCESS_COLLAPSED:.2f}, or more than half of "
    f"the experts never selected. Skewed: a spread below {SPREAD_SKEWED:.2f}, an excess above {EXCESS_SKEWED:.2f}, or "
    "any expert never selected. Healthy: everything else. Experts that no token selected count only where there are at "
    f"least {SELECTIONS_TO_JUDGE_DEATH} selections per expert. The model is as its worst layer. On one domain alone an "
    "uneven load is not a fault: it is what specialisation looks like."
)


def effective_experts(load_SLE: Float[ndarray, "scopes layers experts"]) -> Float[ndarray, "scopes layers"]:
    """exp of the entropy of the load: E when it is even, 1 when one expert takes everything."""
    return np.exp(_entropy(load_SLE))


def levels(
    counts_SLE: Int[ndarray, "scopes layers experts"],
    effective_SL: Float[ndarray, "scopes layers"],
    dead_SL: Int[ndarray, "scopes layers"],
    active: int,
) -> Int[ndarray, "scopes layers"]:
    """The verdict of each layer by `RULE`, as an index into `LEVELS`."""
    experts = counts_SLE.shape[-1]
    if experts == active:
        return np.zeros(effective_SL.shape, dtype=np.int64)  # nothing to choose: every load is even
    selections_SL = counts_SLE.sum(axis=-1)
    busiest_SL = np.sort(counts_SLE, axis=-1)[..., -active:].sum(axis=-1) / np.maximum(selections_SL, 1)
    spread_SL = (effective_SL - active) / (experts - active)
    excess_SL = (busiest_SL - active / experts) / (1 - active / experts)
    enough_SL = selections_SL >= SELECTIONS_TO_JUDGE_DEATH * experts
    collapsed_SL = (spread_SL < SPREAD_COLLAPSED) | (excess_SL > EXCESS_COLLAPSED)
    skewed_SL = (spread_SL < SPREAD_SKEWED) | (excess_SL > EXCESS_SKEWED)
    return np.where(
        collapsed_SL | (enough_SL & (2 * dead_SL > experts)), 2, np.where(skewed_SL | (enough_SL & (dead_SL > 0)), 1, 0)
    )


def layer_verdict(layer: int, level: Level, load_E: Float[ndarray, " experts"], active: int) -> Verdict:
    """One layer's verdict in words, with the figures that it rests on."""
    experts = len(load_E)
    effective = float(effective_experts(load_E[None, None])[0, 0])
    top = np.sort(load_E)[::-1]
    busiest = min(active, experts)
    dead = int((load_E == 0).sum())
    parts = [f"layer {layer} is {level}: the load is that of {effective:.1f} of {experts} experts"]
    parts.append(f"the {_experts(busiest, 'busiest')} {'take' if busiest > 1 else 'takes'} {top[:busiest].sum():.0%}")
    if dead:
        parts.append(f"{_experts(dead)} {'are' if dead > 1 else 'is'} never selected")
    return Verdict(level=level, sentence=", ".join(parts))


def model_verdict(verdicts: Sequence[Verdict], effective_L: Float[ndarray, " layers"]) -> Verdict:
    """The model's: its worst layer's level, how many layers there are of each, and the worst one's figures.

    Of the layers with the worst level that is the one whose load is that of the fewest experts (`effective_L`).
    """
    worst = max(verdicts, key=lambda verdict: LEVELS.index(verdict.level)).level
    number = {level: sum(verdict.level == level for verdict in verdicts) for level in LEVELS}
    if len(verdicts) == 1 and worst != "healthy":
        return verdicts[0]
    if len(verdicts) == 1:
        return Verdict(level="healthy", sentence="the only MoE layer uses its experts evenly")
    if number["healthy"] == len(verdicts):
        return Verdict(level="healthy", sentence=f"all {len(verdicts)} MoE layers use their experts evenly")
    said = " and ".join(f"{number[level]} {level}" for level in ("collapsed", "skewed") if number[level])
    place = min(np.flatnonzero([verdict.level == worst for verdict in verdicts]), key=lambda layer: effective_L[layer])
    sentence = f"of {len(verdicts)} MoE layers, {said}; the worst: {verdicts[int(place)].sentence}"
    return Verdict(level=worst, sentence=sentence)


def normalised_entropy(load_XE: Float[ndarray, "... experts"]) -> Float[ndarray, "..."]:
    """Entropy of a load over log E; NaN where there is no load."""
    total_X = load_XE.sum(axis=-1)
    entropy_X = _entropy(load_XE) / math.log(max(2, load_XE.shape[-1]))
    return np.where(total_X > 0, entropy_X, np.nan)


def _entropy(load_XE: Float[ndarray, "... experts"]) -> Float[ndarray, "..."]:
    with np.errstate(divide="ignore", invalid="ignore"):
        terms_XE = np.where(load_XE > 0, load_XE * np.log(load_XE), 0.0)
    return -terms_XE.sum(axis=-1)


def _experts(number: int, kind: str = "") -> str:
    if number == 1:
        return f"{kind} expert".strip() if kind else "1 expert"
    return f"{number} {kind} experts".replace("  ", " ")
