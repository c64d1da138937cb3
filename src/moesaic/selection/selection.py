"""A selection: which routed experts of each MoE layer to keep, with their scores; a JSON file. Torch-free."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from moesaic.checkpoint.headers import load_json
from moesaic.checkpoint.pio import write_file
from moesaic.common.errors import MoesaicError
from moesaic.selection.source import SourceModel, source_from_json

FORMAT = "moesaic-selection/1"

_KEYS = ("format", "source", "method", "layers", "kept", "scores", "routing_mass_kept", "details")


@dataclass(frozen=True, kw_only=True)
class Selection:
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

    def to_json(self) -> dict[str, Any]:
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


def save_selection(selection: Selection, file: str | Path) -> None:
    """Write a selection as JSON; numbers are written so that they read back as the same float64."""
    write_file(Path(file), json.dumps(selection.to_json(), allow_nan=False) + "\n")


def load_selection(file: str | Path) -> Selection:
    """Read a selection; a file that is none, or contradicts itself, is a MoesaicError that says where."""
    path = Path(file)
    value = load_json(path)
    if value.get("format") != FORMAT:
        raise MoesaicError(f"{path}: not a selection (format is {value.get('format')!r}, expected {FORMAT!r})")
    if unknown := sorted(value.keys() - set(_KEYS)):
        raise MoesaicError(f"{path}: unknown key {unknown[0]!r}; a selection has {', '.join(_KEYS)}")
    if missing := [key for key in _KEYS if key not in value]:
        raise MoesaicError(f"{path}: has no {missing[0]!r}; a selection has {', '.join(_KEYS)}")
    try:
        mass = value["routing_mass_kept"]
        return Selection(
            source=source_from_json(value["source"], str(path)),
            method=str(value["method"]),
            layers=tuple(value["layers"]),
            kept=tuple(tuple(ids) for ids in value["kept"]),
            scores=tuple(tuple(map(float, row)) for row in value["scores"]),
            routing_mass_kept=None if mass is None else tuple(map(float, mass)),
            details=dict(value["details"]),
        )
    except MoesaicError as error:
        raise MoesaicError(f"{path}: {str(error).removeprefix(f'{path}: ').removeprefix('selection: ')}") from error
    except (TypeError, ValueError) as error:
        raise MoesaicError(f"{path}: has a value of the wrong type ({error})") from error


def compare_selections(first: Selection, second: Selection) -> list[dict[str, Any]]:
    """Per layer: how many experts each keeps, how many both keep, and that number over the size of the union.

    The two may keep different numbers, and be of different models as long as layers and number of experts agree.
    """
    _refuse_other_shape(first, second)
    rows = []
    for layer, ours, theirs in zip(first.layers, first.kept, second.kept, strict=True):
        both, either = set(ours) & set(theirs), set(ours) | set(theirs)
        rows.append(
            {
                "layer": layer,
                "kept": [len(ours), len(theirs)],
                "common": len(both),
                "overlap": len(both) / len(either) if either else 1.0,
            }
        )
    return rows


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
    if any(not isinstance(expert, int) or isinstance(expert, bool) for expert in ids):
        return f"expert ids must be whole numbers, got {list(ids)}"
    if any(first >= second for first, second in pairwise(ids)):
        return f"expert ids must rise, got {list(ids)}"
    if ids[0] < 0 or ids[-1] >= num_experts:
        return f"expert ids must be from 0 to {num_experts - 1}, got {list(ids)}"
    return None


def _refuse_other_shape(first: Selection, second: Selection) -> None:
    for key in ("layers", "num_experts"):
        ours, theirs = getattr(first.source, key), getattr(second.source, key)
        if ours != theirs:
            raise MoesaicError(
                f"the selections are of models with different {key}: {ours} ({first.source.name}) and "
                f"{theirs} ({second.source.name})"
            )
