"""How useful more copies of each expert would be: from weights, from gradients, or from a file.

E experts; utilities are one number per expert and layer, not negative.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moesaic.checkpoint.headers import load_json
from moesaic.checkpoint.record import source_record
from moesaic.checkpoint.source import Checkpoint
from moesaic.common.errors import MoesaicError
from moesaic.common.progress import progress
from moesaic.expansion.gradients import ExpertGradients, expert_gradients, norms_of_stacks
from moesaic.expansion.layers import LayerFile
from moesaic.expansion.recipe import GRADIENT_UTILITIES
from moesaic.expansion.resolve import ExpandPlan
from moesaic.families.counting import beyond_depth

FORMAT = "moesaic-utility/1"
_MATRICES = ("gate", "up", "down", "gate_up")


@dataclass(frozen=True, kw_only=True)
class UtilityTable:
    """Utilities and where they come from; what utility.json holds."""

    utility: str
    config_hash: str
    """Of the checkpoint that they are of."""
    per_layer: Mapping[int, tuple[float, ...]]
    tokens: Mapping[int, tuple[int, ...]] | None
    """Calibration tokens that each expert saw; None where no text was used."""
    batches: int | None
    asked: int | None = None
    """Batches that the recipe wanted."""

    @property
    def notices(self) -> tuple[str, ...]:
        """Text that was short, and the experts that saw no token."""
        short = self.batches is not None and self.asked is not None and self.batches < self.asked
        return (
            *([f"the calibration text fills {self.batches} of {self.asked} batches"] if short else []),
            *self._unseen(),
        )

    def _unseen(self) -> tuple[str, ...]:
        unseen = {
            layer: [expert for expert, count in enumerate(counts) if not count]
            for layer, counts in (self.tokens or {}).items()
        }
        return tuple(
            f"layer {layer}: no calibration token reached expert {', '.join(map(str, experts))}, whose utility is 0"
            for layer, experts in unseen.items()
            if experts
        )

    def text(self) -> str:
        """As JSON."""
        layers = {
            str(layer): {"utility": list(values), "tokens": None if self.tokens is None else list(self.tokens[layer])}
            for layer, values in self.per_layer.items()
        }
        record = {
            "format": FORMAT,
            "utility": self.utility,
            "config_hash": self.config_hash,
            "batches": self.batches,
            "layers": layers,
        }
        return json.dumps(record, indent=2) + "\n"


def needs_model(plan: ExpandPlan) -> bool:
    """Whether the utilities need gradients."""
    return plan.recipe.utility in GRADIENT_UTILITIES


def find_utilities(plan: ExpandPlan, *, quiet: bool = False) -> UtilityTable | None:
    """The utilities that a plan asks for; None for `uniform`, which needs none.

    Raises:
        MoesaicError: text or a file that cannot be used, a loss that is not finite.
    """
    recipe = plan.recipe
    if recipe.utility_from is not None:
        return read_utilities(Path(recipe.utility_from), plan)
    if recipe.utility == "uniform":
        return None
    if recipe.utility == "weight_norm":
        return utility_table(plan, weight_norms(plan, quiet=quiet), None)
    gradients = expert_gradients(plan, quiet=quiet)
    return utility_table(plan, scores(str(recipe.utility), gradients), gradients)


def weight_norms(plan: ExpandPlan, *, quiet: bool = False) -> dict[int, tuple[float, ...]]:
    """`||w||_2` of all matrices of each expert together, one matrix in memory at a time."""
    norms = {}
    with progress(len(plan.model.layers), "layers", label="weight norms", quiet=quiet) as tick:
        for layer in plan.model.layers:
            file = LayerFile(layer=layer, tensors=plan.checkpoint.tensors, interleaved=plan.model.family.interleaved)
            norms[layer.layer] = tuple(_weight_norm(file, expert) for expert in range(layer.num_experts))
            tick(1)
    return norms


def _weight_norm(file: LayerFile, expert: int) -> float:
    matrices = [file.read_slot(tensor, expert) for tensor in file.experts if tensor.role in _MATRICES]
    return norms_of_stacks([matrix.unsqueeze(0) for matrix in matrices])[0]


_SCORES: dict[str, Callable[[ExpertGradients, int], tuple[float, ...]]] = {
    "gradient_norm": lambda found, layer: found.gradient_norms[layer],
    "gradient_squared": lambda found, layer: tuple(norm**2 for norm in found.gradient_norms[layer]),
    "saliency": lambda found, layer: tuple(
        weight * norm for weight, norm in zip(found.weight_norms[layer], found.gradient_norms[layer], strict=True)
    ),
}


def read_utilities(path: Path, plan: ExpandPlan) -> UtilityTable:
    """Utilities that an earlier run saved for this model.

    Raises:
        MoesaicError: not such a file, one of another model, or with numbers that are no utilities.
    """
    record = load_json(path)
    if record.get("format") != FORMAT:
        raise MoesaicError(f"--utility-from {path}: is not a utility.json of `moesaic expand`")
    if record.get("config_hash") != _config_hash(plan.checkpoint):
        raise MoesaicError(f"--utility-from {path}: is of a model with another config.json than {plan.checkpoint.name}")
    layers = record.get("layers")
    if not isinstance(layers, dict):
        raise MoesaicError(f"--utility-from {path}: has no layers; compute the utilities again")
    per_layer: dict[int, tuple[float, ...]] = {}
    for layer in plan.model.layers:
        entry = layers.get(str(layer.layer))
        if entry is None and beyond_depth(plan.checkpoint.config, layer.layer):
            continue
        values = entry.get("utility") if isinstance(entry, dict) else None
        if values is None or not _are_utilities(values, layer.num_experts):
            raise MoesaicError(
                f"--utility-from {path}: layer {layer.layer} does not have {layer.num_experts} finite numbers that are "
                "not negative; compute the utilities again"
            )
        per_layer[layer.layer] = tuple(values)
    return UtilityTable(
        utility=str(record.get("utility")),
        config_hash=_config_hash(plan.checkpoint),
        per_layer=per_layer,
        tokens=None,
        batches=None,
    )


def _are_utilities(values: Any, count: int) -> bool:
    return (
        isinstance(values, list)
        and len(values) == count
        and all(type(value) in (int, float) and math.isfinite(value) and value >= 0 for value in values)
    )


def scores(utility: str, gradients: ExpertGradients) -> dict[int, tuple[float, ...]]:
    """A gradient utility of each expert, per layer."""
    return {layer: _SCORES[utility](gradients, layer) for layer in gradients.gradient_norms}


def utility_table(
    plan: ExpandPlan, per_layer: Mapping[int, tuple[float, ...]], gradients: ExpertGradients | None
) -> UtilityTable:
    """Utilities of a plan's checkpoint, with what is known of their calibration."""
    return UtilityTable(
        utility=str(plan.recipe.utility),
        config_hash=_config_hash(plan.checkpoint),
        per_layer=per_layer,
        tokens=gradients.tokens if gradients else None,
        batches=gradients.batches if gradients else None,
        asked=plan.recipe.utility_batches,
    )


def _config_hash(checkpoint: Checkpoint) -> str:
    return source_record(checkpoint, None)["config_hash"]
