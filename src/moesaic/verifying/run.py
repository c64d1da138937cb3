"""The verb `verify`: which statement about an upcycled or expanded checkpoint applies, and its measured error."""

import gc
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moesaic.checkpoint.record import read_provenance
from moesaic.checkpoint.source import Checkpoint, open_checkpoint
from moesaic.common.errors import MoesaicError
from moesaic.common.progress import progress
from moesaic.common.verbs import verb
from moesaic.families.dense import DenseModel, detect
from moesaic.loading import load
from moesaic.modeling.finite import Seen, watched
from moesaic.probe import run_logits, tokens_for
from moesaic.verifying.measure import (
    DenseRun,
    Identity,
    compare_logits,
    decoder_layers,
    from_specialists,
    measure_layer,
    rho,
    run_dense,
    scaled_dense,
    view_layer,
)
from moesaic.verifying.origin import Origin, open_specialists, other_weights, read_origin
from moesaic.verifying.recipe import Check, ExpandedReport, LayerMeasure, VerifyRecipe, VerifyReport

_PRESERVES = ("N1", "D2", "S1")
"""Statements that say y = FFN(x)."""

_RUN_LIMIT = {"float32": 1e-5, "float64": 1e-5, "bfloat16": 3e-2, "float16": 4e-3}
"""Relative error of one FFN from the arithmetic of a run in this data type."""

_STORED_LIMIT = {"F64": 0.0, "F32": 1e-6, "F16": 1e-3, "BF16": 8e-3}
"""Relative error of one FFN from rounding its weights to this data type once; the least precise type comes last."""

LOGIT_LIMIT = 1e-3
"""Largest logit difference between two models that are one function, in fp32; in proportion for logits above 50."""

PERPLEXITY_LIMIT = 1e-4
"""Relative difference of the perplexities of two models that are the same function: equal to four digits."""

_EXPANDED_LIMIT = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}
"""Relative error of all logits together, by the type that the models run in: rounding, and tokens near a tie."""


@verb(VerifyRecipe, positional=("source", "target"))
def verify(recipe: VerifyRecipe, *, quiet: bool = True) -> VerifyReport | ExpandedReport:
    """Say which statement about an upcycled or expanded checkpoint applies, and measure it on up to 1,000 tokens.

    Returns:
        The statement, the figures for the whole model and (after `upcycle`) per layer, and whether the statement holds.

    Raises:
        MoesaicError: the target was made by neither, or not from this source; a text that cannot be read.
    """
    if recipe.batch_size < 1:
        raise MoesaicError(f"--batch-size {recipe.batch_size}: must be at least 1")
    before, after = open_checkpoint(recipe.source), open_checkpoint(recipe.target)
    record = read_provenance(after.path)
    if record is not None and record.get("verb") == "expand":
        return _verify_expanded(recipe, before, after, record, quiet)
    return _verify_upcycled(recipe, before, after, quiet)


# --- what upcycle made ------------------------------------------------------------------------------------------------


def _verify_upcycled(recipe: VerifyRecipe, before: Checkpoint, moe: Checkpoint, quiet: bool) -> VerifyReport:
    """Run the dense base, then the MoE, and compare each MoE layer on the base's hidden states."""
    base = detect(before)
    origin = read_origin(base, moe)
    tokens_BL, described = tokens_for(before, moe, recipe.text, vocab=base.vocab)
    notes = other_weights(before, origin.base_hash, quiet=quiet)
    with progress(2 * tokens_BL.numel(), unit="tokens", label="verifying", quiet=quiet) as tick:
        model = load(before.path, device=recipe.device, dtype=recipe.dtype or "float32")
        dtype = model.dtype
        with watched(model) as seen:
            dense = run_dense(model, tokens_BL, origin.moe_layers, recipe.batch_size, tick)
        del model
        gc.collect()
        model = load(moe.path, device=recipe.device, dtype=dtype)
        with watched(model) as seen_after:
            compared = compare_logits(model, tokens_BL, dense, recipe.batch_size, tick)
        in_half = _run_in_half(recipe, moe, tokens_BL)
    difference, dense_perplexity, moe_perplexity = compared
    specialists, more = open_specialists(origin, base)
    measures = _measure_layers(model, origin, dense, specialists)
    checks = _checks(
        origin,
        measures,
        run_dtype=_name(dtype),
        stored={base.dtype, *(one.dtype for one in specialists or ()), *_expert_dtypes(moe)},
        logit_difference=difference / max(1.0, dense.logits_BLV.abs().max().item() / 50),
        perplexities=(dense_perplexity, moe_perplexity),
    )
    return VerifyReport(
        source=before.name,
        target=moe.name,
        made=origin.made,
        code=origin.code,
        statement=origin.text,
        tokens=tokens_BL.numel(),
        text=described,
        dtype=_name(dtype),
        layers=measures,
        checks=checks,
        max_logit_difference=difference,
        perplexity_source=dense_perplexity,
        perplexity_target=moe_perplexity,
        notes=(*notes, *more, *_zero_states(dense), *_half_notes(in_half)),
        not_finite=_not_finite({before.name: seen, moe.name: seen_after} | in_half),
    )


def _expert_dtypes(moe: Checkpoint) -> set[str]:
    return {info.dtype for name, info in moe.tensors.items() if ".experts." in name}


def _run_in_half(recipe: VerifyRecipe, after: Checkpoint, tokens_BL: Tensor) -> dict[str, Seen]:
    """Run a result that is stored in float16 in float16 as well: its range is small enough to end exact arithmetic."""
    if recipe.dtype is not None or "F16" not in {info.dtype for info in after.tensors.values()}:
        return {}
    model = load(after.path, device=recipe.device, dtype="float16")
    with watched(model) as seen:
        for _ in run_logits(model, tokens_BL, recipe.batch_size, lambda _tokens: None):
            pass
    return {f"{after.name} in float16": seen}


def _half_notes(in_half: Mapping[str, Seen]) -> list[str]:
    return [f"{name}: all values are finite" for name, seen in in_half.items() if seen.not_finite is None]


def _not_finite(runs: Mapping[str, Seen]) -> list[str]:
    """Where the models gave NaN or infinity."""
    return [f"{name}: {seen.not_finite}" for name, seen in runs.items() if seen.not_finite is not None]


def _zero_states(dense: DenseRun) -> list[str]:
    """Say where tokens have a hidden state of zeros, as a padding token's may be."""
    zeros = {layer: int((~states_TD.any(-1)).sum()) for layer, states_TD in dense.hidden_TD.items()}
    return [
        f"{count} token{'s' if count > 1 else ''} with a hidden state of zeros (all router logits tie) left out of the "
        f"figures of layer {layer}"
        for layer, count in zeros.items()
        if count
    ]


def _measure_layers(
    model: Any, origin: Origin, dense: Any, specialists: Sequence[DenseModel] | None
) -> list[LayerMeasure]:
    groups = None if origin.spec is None or origin.spec.groups is None else torch.tensor(origin.spec.groups)
    identity, factor = _identity(origin, specialists)
    blocks: Any = decoder_layers(model)
    views = (view_layer(blocks[layer].mlp, layer, dense) for layer in origin.moe_layers)
    return [
        measure_layer(
            view,
            shards=origin.shards,
            scaling=blocks[view.layer].mlp.gate.routed_scaling_factor,
            groups_E=groups,
            identity=identity,
            rho=factor,
        )
        for view in views
    ]


def _identity(origin: Origin, specialists: Sequence[DenseModel] | None) -> tuple[Identity | None, Identity | None]:
    """Return the identity that the statement asserts beyond y = FFN(x), and N2's factor."""
    spec, share = origin.spec, origin.routed_share
    if spec is None or origin.code not in ("N2", "D1", "D3"):
        return None, None
    if origin.code == "N2":
        return scaled_dense(shards=spec.shards, share=share), rho(shards=spec.shards)
    # With K = M every shard counts the same, whatever the router's weights are.
    factors = None if origin.code == "D3" and spec.top_k == spec.shards else spec.factors
    return from_specialists(specialists, shards=spec.shards, share=share, factors=factors), None


def _checks(
    origin: Origin,
    measures: Sequence[LayerMeasure],
    *,
    run_dtype: str,
    stored: set[str],
    logit_difference: float,
    perplexities: tuple[float, float],
) -> list[Check]:
    """The checks that decide whether the target's statement holds; the limits are rounding and nothing else.

    Args:
        origin: the statement and how the target was made.
        measures: one per MoE layer.
        run_dtype: data type of the run, such as `float32`.
        stored: safetensors codes of the weights of all sources and of the target's experts.
        logit_difference: largest logit difference, scaled down for logits above 50.
        perplexities: of source and target.
    """
    code, checks = origin.code, []
    if code == "none":
        return checks
    # The stored weights are rounded once, but for powers of two in the source's own type.
    exact = len(stored) == 1 and origin.factors_are_powers_of_two
    rounding = 0.0 if exact else _STORED_LIMIT[max(stored, key=list(_STORED_LIMIT).index)]
    limit = _RUN_LIMIT[run_dtype] + rounding

    def check(name: str, values: Iterable[float | None], limit: float) -> None:
        if known := [value for value in values if value is not None]:
            checks.append(Check(name=name, value=_worst(known), limit=limit))

    if code in _PRESERVES:
        check("FFN relative error, worst layer", (m.error for m in measures), limit)
    else:
        check(f"error of {code}, worst layer", (m.identity_error for m in measures), limit)
    if code in ("D1", "D3"):
        apart = (None if m.distinct is None else 1 - m.distinct for m in measures)
        check("share of tokens with two experts of one domain", apart, 0.0)
        check("deviation of the routing weights' sum from 1", (m.weight_sum_error for m in measures), limit)
    if code != "D1" and origin.shards > 1:  # every token needs every shard
        missing = (None if m.coverage is None else 1 - m.coverage for m in measures)
        check("share of tokens without some shard", missing, 0.0)
    if code in _PRESERVES and origin.identical and rounding == 0 and run_dtype in ("float32", "float64"):
        dense, moe = perplexities
        checks.append(Check(name="largest logit difference", value=logit_difference, limit=LOGIT_LIMIT))
        checks.append(Check(name="relative perplexity difference", value=abs(moe / dense - 1), limit=PERPLEXITY_LIMIT))
    return checks


# --- what expand made -------------------------------------------------------------------------------------------------


def _verify_expanded(
    recipe: VerifyRecipe, before: Checkpoint, after: Checkpoint, record: Mapping[str, Any], quiet: bool
) -> ExpandedReport:
    """Run an expanded model and its source on the same tokens.

    A statement that is exact but for noise (`--delta`) is not checked against a limit: the noise's effect is measured.
    """
    if before.config.get("vocab_size") != after.config.get("vocab_size"):
        raise MoesaicError(
            f"{after.name}: has another vocabulary than {before.name}; give the checkpoint that was expanded"
        )
    notes = other_weights(before, (record.get("sources") or [{}])[0].get("weights_hash"), quiet=quiet)
    tokens_BL, described = tokens_for(before, after, recipe.text, vocab=int(before.config["vocab_size"]))
    with progress(2 * tokens_BL.numel(), unit="tokens", label="verifying", quiet=quiet) as tick:
        model = load(before.path, device=recipe.device, dtype=recipe.dtype or "float32")
        dtype = model.dtype
        with watched(model) as seen:
            logits_BLV = torch.cat(list(run_logits(model, tokens_BL, recipe.batch_size, tick)))
        del model
        gc.collect()
        model = load(after.path, device=recipe.device, dtype=dtype)
        with watched(model) as seen_after:
            other_BLV = torch.cat(list(run_logits(model, tokens_BL, recipe.batch_size, tick)))
        in_half = _run_in_half(recipe, after, tokens_BL)
    error = ((other_BLV - logits_BLV).norm() / logits_BLV.norm()).item()
    statement = record.get("statement", {})
    exact = statement.get("code") in ("E1", "E2", "E3") and not record.get("recipe", {}).get("delta")
    limit = _EXPANDED_LIMIT.get(_name(dtype), _EXPANDED_LIMIT["float32"])
    value = error if math.isfinite(error) else math.inf
    return ExpandedReport(
        source=before.name,
        target=after.name,
        code=str(statement.get("code")),
        statement=str(statement.get("text")),
        tokens=tokens_BL.numel(),
        text=described,
        dtype=_name(dtype),
        error=error,
        max_logit_difference=(other_BLV - logits_BLV).abs().max().item(),
        loss_source=_loss(logits_BLV, tokens_BL),
        loss_target=_loss(other_BLV, tokens_BL),
        checks=[Check(name="relative error of the logits", value=value, limit=limit)] if exact else [],
        notes=(*notes, *_half_notes(in_half)),
        not_finite=_not_finite({before.name: seen, after.name: seen_after} | in_half),
    )


def _loss(logits_BLV: Tensor, tokens_BL: Tensor) -> float:
    return nn.functional.cross_entropy(logits_BLV[:, :-1].flatten(0, 1), tokens_BL[:, 1:].flatten()).item()


def _worst(values: Iterable[float]) -> float:
    """Return the largest value; a NaN counts as infinite."""
    return max(float("inf") if value != value else value for value in values)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
