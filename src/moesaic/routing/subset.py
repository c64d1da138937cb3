"""A selection: which routed experts of each MoE layer to keep, with their scores; a JSON file. Torch-free.

`check_counts` says whether a router can run with only these, `cut_routing` what becomes of a recorded training rule.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from moesaic.checkpoint.headers import load_format
from moesaic.common.errors import MoesaicError
from moesaic.common.files import write_file
from moesaic.common.recipe import load_document
from moesaic.common.shown import Shown
from moesaic.families.identity import SourceModel
from moesaic.families.moe_table import family_of

FORMAT = "moesaic-selection/1"


@dataclass(frozen=True, kw_only=True)
class _Data:
    """The records that a selection was made on."""

    split: float | None = None
    """The share of them that was used."""
    seed: int = 0
    rows: str | None = None


@dataclass(frozen=True, kw_only=True)
class _Details:
    """Of a selection's details, what is used and not only shown."""

    top_k: int | None = None
    data: _Data | None = None
    unreached: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, kw_only=True, repr=False)
class Selection(Shown):
    """The experts to keep. Rows follow `layers`, the indices of the MoE layers in the model."""

    source: SourceModel
    method: str
    layers: tuple[int, ...]
    kept: tuple[tuple[int, ...], ...]
    """Ids of the kept experts per layer, in rising order."""
    scores: tuple[tuple[float, ...], ...]
    """Score of every expert per layer, higher is better; an expert that no token reached has 0."""
    routing_mass_kept: tuple[float, ...] | None
    """Share of the router's probability that goes to the kept experts, per layer; None where it was not measured."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """What the method was given (data, seed, tokens, ...), for people; `top_k` is used (see the property)."""

    def __post_init__(self) -> None:
        load_document(_Details, self.details, "selection: details", others=True)
        if problem := _problem(self):
            raise MoesaicError(f"selection: {problem}")

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of kept experts per layer."""
        return tuple(len(ids) for ids in self.kept)

    @property
    def top_k(self) -> int | None:
        """Active experts that the selection was made for, where they are fewer than the model's."""
        return self.details.get("top_k")

    def to_dict(self) -> dict[str, Any]:
        """The document that `save_selection` writes."""
        mass = self.routing_mass_kept
        return {
            "format": FORMAT,
            "source": self.source.to_json(),
            "method": self.method,
            "layers": list(self.layers),
            "kept": [list(ids) for ids in self.kept],
            "scores": [list(row) for row in self.scores],
            "routing_mass_kept": None if mass is None else list(mass),
            "details": dict(self.details),
        }

    def lines(self) -> list[str]:
        """How many experts, how they were chosen, and what they are worth to the router."""
        mass, tokens = self.routing_mass_kept, self.details.get("domains", {})
        share = "" if mass is None else f", {sum(mass) / len(mass):.1%} of the routing mass"
        first = f"{self.counts[0]} of {self.source.num_experts} experts per layer by {self.method}{share}"
        return [first, *(f"  {name}: {count:,} tokens" for name, count in tokens.items() if len(tokens) > 1)]

    def rows(self) -> list[dict[str, Any]]:
        """A row per layer and expert."""
        return [
            {"layer": layer, "expert": expert, "score": score, "kept": expert in kept}
            for layer, kept, scores in zip(self.layers, map(set, self.kept), self.scores, strict=True)
            for expert, score in enumerate(scores)
        ]


def save_selection(selection: Selection, file: str | Path) -> None:
    """Write a selection as JSON; numbers are written so that they read back as the same float64."""
    write_file(Path(file), json.dumps(selection.to_dict(), allow_nan=False) + "\n")


def load_selection(file: str | Path) -> Selection:
    """Read a selection; a file that is none, or contradicts itself, is a MoesaicError that says where."""
    path = Path(file)
    return load_document(Selection, load_format(path, FORMAT, "a selection"), str(path), way_out="select again")


def _problem(selection: Selection) -> str | None:
    """What contradicts what, or None."""
    source, layers = selection.source, selection.layers
    if layers != source.layers:
        return f"layers {list(layers)} are not the MoE layers of its source, {list(source.layers)}"
    mass = selection.routing_mass_kept
    for name, rows in (("kept", selection.kept), ("scores", selection.scores), ("routing_mass_kept", mass)):
        if rows is not None and len(rows) != len(layers):
            return f"{name} has {len(rows)} rows for {len(layers)} MoE layers"
    for layer, ids in zip(layers, selection.kept, strict=True):
        if problem := _bad_ids(ids, source.num_experts):
            return f"kept in layer {layer}: {problem}"
    for layer, row in zip(layers, selection.scores, strict=True):
        if len(row) != source.num_experts:
            return f"layer {layer} has {len(row)} scores for {source.num_experts} experts"
        if not all(map(math.isfinite, row)):
            return f"layer {layer} has a score that is not a finite number"
    if mass is not None and not all(0.0 <= share <= 1.0 + 1e-9 for share in mass):
        return "routing_mass_kept has a share outside 0 to 1"
    return _bad_top_k(selection.top_k, source.top_k)


def _bad_top_k(top_k: Any, most: int) -> str | None:
    if top_k is None or (type(top_k) is int and 1 <= top_k <= most):
        return None
    return f"details.top_k must be from 1 to {most}, got {top_k!r}"


def _bad_ids(ids: Sequence[Any], num_experts: int) -> str | None:
    if not ids:
        return "no expert"
    if any(first >= second for first, second in pairwise(ids)):
        return f"expert ids must rise, got {list(ids)}"
    if ids[0] < 0 or ids[-1] >= num_experts:
        return f"expert ids must be from 0 to {num_experts - 1}, got {list(ids)}"
    return None


# --- which subsets a router can run with -----------------------------------------------------------------------------


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
    _check_groups(source, config, _one_of_each(config, kept), active, where)
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


def _one_of_each(config: Mapping[str, Any], kept: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
    """Of copies that our `one_per_group` uses as one, the first that is kept: a family's own groups count these."""
    groups = own_groups(config, len(kept))
    if groups is None:
        return kept
    firsts = [
        {of_layer[expert]: expert for expert in reversed(ids)} for of_layer, ids in zip(groups, kept, strict=True)
    ]
    return [sorted(first.values()) for first in firsts]


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


def cut_routing(record: Mapping[str, Any] | None, kept: Sequence[Sequence[int]]) -> dict[str, Any] | None:
    """The `routing` entry of moesaic.json for a model with the kept experts of each MoE layer."""
    if record is None:
        return None
    bias = record["selection_bias"]
    try:
        rows = None if bias is None else [[row[expert] for expert in ids] for row, ids in zip(bias, kept, strict=True)]
        return {"rule": cut_rule(record["rule"], kept), "selection_bias": rows}
    except (ValueError, IndexError) as error:
        raise MoesaicError(
            "moesaic.json: its routing rule is not for this number of layers and experts; it is another checkpoint's"
        ) from error


def cut_rule(rule: Mapping[str, Any], kept: Sequence[Sequence[int]]) -> dict[str, Any]:
    """A `RuleConfig` as plain values for fewer experts: the kept experts' groups, pools no larger than what is left."""
    cut = dict(rule)
    if (groups := rule.get("expert_groups")) is not None:
        rows = {tuple(groups[expert] for expert in ids) for ids in kept}
        if len(rows) > 1:
            raise MoesaicError(
                "selection: the recorded rule one_per_group has one list of groups for all layers, but the kept "
                "experts' groups differ from layer to layer; keep the same groups in each layer"
            )
        cut["expert_groups"] = list(rows.pop())
    if (size := rule.get("pool_size")) is not None:
        most = len(kept[0])
        cut["pool_size"] = min(size, most) if isinstance(size, int) else [min(one, most) for one in size]
    return cut
