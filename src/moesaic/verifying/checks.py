"""What has to hold for a statement, and the limits: rounding of the data types involved and nothing else."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from moesaic.verifying.claim import Claim
from moesaic.verifying.report import Check, LayerMeasure

_RUN_LIMIT = {"float32": 1e-5, "float64": 1e-5, "bfloat16": 3e-2, "float16": 4e-3}
"""Relative error of one FFN from the arithmetic of a run in this data type."""

_STORED_LIMIT = {"F64": 0.0, "F32": 1e-6, "F16": 1e-3, "BF16": 8e-3}
"""Relative error of one FFN from rounding its weights to this data type once."""

_PRECISION = {"F64": 53, "F32": 24, "F16": 11, "BF16": 8}

LOGIT_LIMIT = 1e-3
"""Largest logit difference between two models that are one function, in fp32; in proportion for logits above 50."""

PERPLEXITY_LIMIT = 1e-4
"""Relative difference of the perplexities of two models that are the same function: equal to four digits."""

_Measures = Sequence[LayerMeasure]


def checks_for(
    claim: Claim,
    measures: _Measures,
    *,
    run_dtype: str,
    stored: Iterable[str],
    logit_difference: float,
    perplexities: tuple[float, float],
) -> list[Check]:
    """Return the checks that decide whether the target's statement holds.

    Args:
        claim: the statement and how the target was made.
        measures: one per MoE layer.
        run_dtype: data type of the run, such as `float32`.
        stored: safetensors codes of the source's weights and of the target's experts.
        logit_difference: largest logit difference, scaled down for logits above 50.
        perplexities: of source and target.
    """
    rounding = _stored_rounding(claim, set(stored))
    limit = _RUN_LIMIT[run_dtype] + rounding
    checks = _CHECKS[claim.code](claim, measures, limit)
    exact_run = rounding == 0 and run_dtype in ("float32", "float64")
    if claim.code in ("N1", "D2", "S1") and claim.identical and exact_run:
        dense, moe = perplexities
        checks += [
            Check(name="largest logit difference", value=logit_difference, limit=LOGIT_LIMIT),
            Check(name="relative perplexity difference", value=abs(moe / dense - 1), limit=PERPLEXITY_LIMIT),
        ]
    return checks


def _stored_rounding(claim: Claim, stored: set[str]) -> float:
    """Return the error of the target's stored weights: none where scaling and the data type round nothing."""
    least = min(stored, key=lambda code: _PRECISION[code])
    same_type = len(stored) == 1
    return 0.0 if same_type and claim.factors_are_powers_of_two else _STORED_LIMIT[least]


def _preserved(claim: Claim, measures: _Measures, limit: float) -> list[Check]:
    """y = FFN(x), which needs every shard for every token."""
    checks = [Check(name="FFN relative error, worst layer", value=_worst(m.error for m in measures), limit=limit)]
    return checks + _covered(claim, measures)


def _identical_to_formula(claim: Claim, measures: _Measures, limit: float) -> list[Check]:
    known = [m.identity_error for m in measures if m.identity_error is not None]
    checks = [Check(name=f"error of {claim.code}, worst layer", value=_worst(known), limit=limit)] if known else []
    covered = _covered(claim, measures) if claim.code in ("N2", "D3") else []
    distinct = [1 - m.distinct for m in measures if m.distinct is not None]
    if claim.code in ("D1", "D3") and distinct:
        checks.append(Check(name="share of tokens with two experts of one domain", value=max(distinct), limit=0.0))
    if claim.code in ("D1", "D3"):
        worst = _worst(m.weight_sum_error for m in measures)
        checks.append(Check(name="deviation of the routing weights' sum from 1", value=worst, limit=limit))
    return checks + covered


def _covered(claim: Claim, measures: _Measures) -> list[Check]:
    missing = [1 - m.coverage for m in measures if m.coverage is not None]
    if claim.shards == 1 or not missing:
        return []
    return [Check(name="share of tokens without some shard", value=max(missing), limit=0.0)]


def _nothing(_claim: Claim, _measures: _Measures, _limit: float) -> list[Check]:
    return []


_CHECKS: Mapping[str, Callable[[Claim, _Measures, float], list[Check]]] = {
    "N1": _preserved,
    "D2": _preserved,
    "S1": _preserved,
    "N2": _identical_to_formula,
    "D1": _identical_to_formula,
    "D3": _identical_to_formula,
    "none": _nothing,
}


def _worst(values: Iterable[float]) -> float:
    """Return the largest value; a NaN counts as infinite."""
    return max(float("inf") if value != value else value for value in values)
