"""What a checkpoint's files say about its experts. Torch-free."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from moesaic.analysis.inspection import ModelFacts
from moesaic.checkpoint.record import read_provenance
from moesaic.checkpoint.source import Checkpoint
from moesaic.common.errors import MoesaicError
from moesaic.families.identity import describe, group_count
from moesaic.families.moe import MoEModel, detect_running
from moesaic.families.moe_table import MOE_FAMILIES, family_of

_SHARED_KEYS = ("num_shared_experts", "n_shared_experts")
_MOST_RUNS = 1000


class Groups(NamedTuple):
    """Group of each expert, per MoE layer, and what they are."""

    of_experts: tuple[tuple[int, ...], ...] | None
    words: str


def open_routers(checkpoint: Checkpoint) -> MoEModel:
    """The experts of a checkpoint; a model without routers is refused in words of its own."""
    config = checkpoint.config
    if family_of(config) is None:
        known = ", ".join([*MOE_FAMILIES, "moesaic_*"])
        raise MoesaicError(
            f"{checkpoint.name}: has no routers to look into: model_type {config.get('model_type')!r} is no MoE family "
            f"known here ({known})"
        )
    return detect_running(checkpoint)


def model_facts(checkpoint: Checkpoint, model: MoEModel) -> ModelFacts:
    """Everything about the model that does not depend on data; reads a sample of each tensor for the hash."""
    source = describe(checkpoint, model)
    groups = find_groups(checkpoint, model)
    return ModelFacts(
        name=source.name,
        revision=source.revision,
        model_type=source.model_type,
        sample_hash=source.sample_hash,
        num_layers=int(checkpoint.config["num_hidden_layers"]),
        layers=source.layers,
        num_experts=source.num_experts,
        top_k=source.top_k,
        num_shared_experts=_shared_experts(checkpoint, model),
        scoring=model.family.scoring,
        groups=groups.of_experts,
        groups_are=groups.words,
    )


def find_groups(checkpoint: Checkpoint, model: MoEModel) -> Groups:
    """The groups of the routing rule, or of what the experts were made from; none where neither is known."""
    layers, experts = len(model.layers), model.num_experts
    rule = ((read_provenance(checkpoint.path) or {}).get("routing") or {}).get("rule") or {}
    for groups in (rule.get("expert_groups"), checkpoint.config.get("expert_groups")):
        if groups:
            return Groups(_rows(groups, layers), "expert groups of the routing rule one_per_group")
    if (count := group_count(checkpoint.config, model)) > 1:
        row = tuple(expert * count // experts for expert in range(experts))
        return Groups((row,) * layers, "expert groups of the family's group-limited router")
    if (shards := _shards(checkpoint)) and experts % shards == 0 and experts > shards > 1:
        row = tuple(expert // shards for expert in range(experts))
        return Groups((row,) * layers, f"the {shards} shards of one FFN, as upcycling cut it")
    return Groups(None, "")


def _rows(groups: Sequence[Any], layers: int) -> tuple[tuple[int, ...], ...]:
    if isinstance(groups[0], Sequence):
        return tuple(tuple(map(int, row)) for row in groups)
    return (tuple(map(int, groups)),) * layers


def _shards(checkpoint: Checkpoint) -> int | None:
    """Shards that upcycling cut each FFN into, for a checkpoint that was upcycled, or trained from such a one."""
    folder = checkpoint.path
    for _ in range(_MOST_RUNS):
        record = read_provenance(folder) or {}
        if record.get("verb") == "upcycle":
            width, part = (checkpoint.config.get(key) for key in ("intermediate_size", "moe_intermediate_size"))
            return width // part if isinstance(width, int) and isinstance(part, int) and part else None
        sources = record.get("sources") or []
        if record.get("verb") != "train" or len(sources) != 1:
            return None
        folder = Path(str(sources[0].get("path")))
    return None


def _shared_experts(checkpoint: Checkpoint, model: MoEModel) -> int:
    for key in _SHARED_KEYS:
        if isinstance(checkpoint.config.get(key), int):
            return checkpoint.config[key]
    return int(any(layer.shared for layer in model.layers))
