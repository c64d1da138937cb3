"""From scores to kept experts, and which numbers of experts a family can hold. Torch-free."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float64
from numpy import ndarray

from moesaic.common.errors import MoesaicError
from moesaic.families.moe_table import MOE_FAMILIES, family_of
from moesaic.selection.scorers import mix_domains
from moesaic.selection.selection import Selection
from moesaic.selection.source import SourceModel, refuse_other_model


def parse_keep(text: str | int, num_experts: int, num_groups: int = 1) -> int:
    """Number of experts in "32" or "25%" (rounded up, to whole experts per group); refuses what is not in 1..E."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", str(text))
    if match:
        share = float(match[1]) / 100
        keep = math.ceil(round(share * num_experts / num_groups, 9)) * num_groups
    elif re.fullmatch(r"\s*\d+\s*", str(text)):
        keep = int(text)
    else:
        raise MoesaicError(f"--keep {text}: not a number of experts; write 32, or 25%")
    if not 1 <= keep <= num_experts:
        raise MoesaicError(f"--keep {text}: must be from 1 to {num_experts}, the number of experts in each layer")
    return keep


def best_experts(scores_E: Float64[ndarray, " experts"], keep: int, num_groups: int = 1) -> tuple[int, ...]:
    """Ids of the `keep` best experts in rising order, equally many of each group; of equal scores the lower id wins."""
    assert keep % num_groups == 0, "check_counts comes first"
    size = len(scores_E) // num_groups
    ids = [
        group * size + int(place)
        for group in range(num_groups)
        for place in np.argsort(-scores_E[group * size : (group + 1) * size], kind="stable")[: keep // num_groups]
    ]
    return tuple(sorted(ids))


def check_counts(
    source: SourceModel,
    config: Mapping[str, Any],
    kept: Sequence[Sequence[int]],
    *,
    top_k: int | None,
    where: str,
) -> int:
    """The number of active experts of a model cut to `kept`; refuses what its router could not run with.

    Args:
        source: the full model.
        config: its configuration.
        kept: ids per MoE layer.
        top_k: the number of active experts asked for; None keeps the model's.
        where: the file or flag that says what is kept, for messages.
    """
    active = source.top_k if top_k is None else top_k
    if not 1 <= active <= source.top_k:
        raise MoesaicError(f"--top-k {active}: must be from 1 to {source.top_k}, the model's number of active experts")
    least = min(len(ids) for ids in kept)
    if least < active:
        way_out = f"keep at least {active}, or lower it with --top-k {least}"
        raise MoesaicError(f"{where}: keeps {least} experts, but each token uses {active}; {way_out}")
    _check_groups(source, config, kept, active, where)
    _check_own_groups(config, kept, active, where)
    return active


def _check_groups(
    source: SourceModel, config: Mapping[str, Any], kept: Sequence[Sequence[int]], active: int, where: str
) -> None:
    """Group-limited selection: equally many experts in each group, and enough of them in the groups that are used."""
    groups, family = source.num_groups, family_of(config)
    if groups == 1:
        return
    size = source.num_experts // groups
    for layer, ids in zip(source.layers, kept, strict=True):
        counts = [sum(expert // size == group for expert in ids) for group in range(groups)]
        if len(set(counts)) > 1:
            raise MoesaicError(
                f"{where}: layer {layer} keeps {counts} experts of its {groups} groups, but group-limited selection "
                f"needs equally many in each; --keep must be a multiple of {groups}"
            )
        # transformers' sigmoid routers rank a group by the sum of its two best experts.
        if counts[0] < 2 and family is not None and family.scoring == "sigmoid":
            raise MoesaicError(f"{where}: layer {layer} keeps {counts[0]} expert per group; at least 2 are needed")
        used = int(config.get("topk_group") or groups)
        if counts[0] * used < active:
            raise MoesaicError(
                f"{where}: layer {layer} keeps {counts[0]} experts per group and a token sees {used} groups, but it "
                f"uses {active} experts; keep more, or lower it with --top-k {counts[0] * used}"
            )


def _check_own_groups(config: Mapping[str, Any], kept: Sequence[Sequence[int]], active: int, where: str) -> None:
    """`one_per_group`: as many groups with a kept expert as there are active experts."""
    for row, (layer_groups, ids) in enumerate(zip(own_groups(config, len(kept)) or [], kept, strict=False)):
        left = len({layer_groups[expert] for expert in ids})
        if left < active:
            raise MoesaicError(
                f"{where}: keeps experts of {left} groups in MoE layer {row}, but one_per_group needs {active}; "
                f"keep more, or lower it with --top-k {left}"
            )


def own_groups(config: Mapping[str, Any], num_layers: int) -> list[list[int]] | None:
    """The group of each expert per MoE layer where the routing rule is our `one_per_group`, else None."""
    groups = config.get("expert_groups")
    if config.get("routing_rule") != "one_per_group" or not groups:
        return None
    return groups if isinstance(groups[0], list) else [groups] * num_layers


def refuse_uneven(selection: Selection, where: str) -> int:
    """The one number of experts that every layer keeps; a config can hold no more than one."""
    counts = sorted(set(selection.counts))
    if len(counts) > 1:
        raise MoesaicError(
            f"{where}: keeps {counts[0]} to {counts[-1]} experts depending on the layer, but the config of "
            f"{selection.source.model_type} holds one number for all layers, and so do all other families "
            f"({', '.join([*MOE_FAMILIES, 'moesaic_*'])}); keep the same number in each layer, or use the selection as "
            "a mask (moesaic.restrict, generate --selection)"
        )
    return counts[0]


def union_selections(first: Selection, second: Selection) -> Selection:
    """The experts that either keeps, filled up so that every layer (and group) keeps the same number.

    Layers with fewer take their best experts by the sum of both scores, each layer's row normalised to sum 1.
    """
    refuse_other_model(first.source, second.source, "the second selection")
    source = first.source
    scores_LE = mix_domains([np.array(one.scores, dtype=np.float64).clip(min=0) for one in (first, second)])
    union = [set(ours) | set(theirs) for ours, theirs in zip(first.kept, second.kept, strict=True)]
    size = source.num_experts // source.num_groups
    most = max(sum(expert // size == group for expert in ids) for ids in union for group in range(source.num_groups))
    kept = []
    for ids, scores_E in zip(union, scores_LE, strict=True):
        first_E = scores_E + np.isin(np.arange(source.num_experts), sorted(ids)) * (scores_E.max() + 1)
        kept.append(best_experts(first_E, most * source.num_groups, source.num_groups))
    return Selection(
        source=source,
        method="union",
        layers=source.layers,
        kept=tuple(kept),
        scores=tuple(tuple(row) for row in scores_LE.tolist()),
        routing_mass_kept=None,
        details={
            "top_k": _larger(first.top_k, second.top_k),
            "methods": [first.method, second.method],
            "filled_up": [len(row) - len(ids) for row, ids in zip(kept, union, strict=True)],
        },
    )


def _larger(first: int | None, second: int | None) -> int | None:
    """The larger number of active experts; None is the model's own, which is the largest."""
    return None if first is None or second is None else max(first, second)
