"""The verb `extract`: a checkpoint of the same family with only the kept experts."""

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moesaic.checkpoint.lazy import Lazy, stored
from moesaic.checkpoint.push import pushed
from moesaic.checkpoint.record import model_card, original_experts, read_provenance
from moesaic.checkpoint.source import Checkpoint, open_checkpoint
from moesaic.checkpoint.write import NewCheckpoint, WriteResult, write_unless_dry
from moesaic.common.errors import MoesaicError
from moesaic.common.progress import notice
from moesaic.common.verbs import verb
from moesaic.families.counting import predicts
from moesaic.families.identity import describe, find_lineage, refuse_other_model
from moesaic.families.moe import (
    EXPERT_COUNT_KEYS,
    PREDICTION_KEYS,
    TOP_K_ALIASES,
    MoEModel,
    detect_running,
    prediction_notices,
)
from moesaic.families.moe_table import KNOWN
from moesaic.modeling.names import code_files
from moesaic.routing.subset import Selection, check_counts, cut_routing, load_selection, own_groups
from moesaic.selection.recipe import ExtractRecipe


@dataclass(frozen=True, kw_only=True, repr=False)
class ExtractResult(WriteResult):
    """What was made."""

    experts: int
    """Routed experts per layer of the result."""
    experts_before: int
    top_k: int

    def lines(self) -> list[str]:
        """For people."""
        return [self.line(f"{self.experts} of {self.experts_before} experts per layer, {self.top_k} active")]


@verb(ExtractRecipe, positional=("checkpoint", "selection"), out="folder")
@pushed
def extract(
    recipe: ExtractRecipe,
    out: str | Path,
    *,
    overwrite: bool = False,
    dry_run: bool = False,
    quiet: bool = True,
    workers: int | None = None,
) -> ExtractResult:
    """Write a standalone checkpoint of the same family and layout with only the selected experts.

    Router rows, selection biases and experts are sliced; everything else, shared experts included, is copied. The ids
    that the experts had are recorded in moesaic.json, for `merge_back`. Keeping all experts gives the same tensors.

    Raises:
        MoesaicError: a selection for another model, or one that the family's config or router cannot hold; a NaN in
            the source; a full disk; a target that exists.
    """
    started = time.monotonic()
    given = recipe.selection
    selection = given if isinstance(given, Selection) else load_selection(given)
    recipe = replace(recipe, selection="selection" if isinstance(given, Selection) else str(given))
    new, active = resolve_extract(recipe, selection, out)
    whole = selection.counts[0] == selection.source.num_experts
    fate = "kept, as all experts are" if whole else "left out, as nothing says which of its experts to keep"
    for line in prediction_notices(new.sources[0][1], fate):
        notice(line, quiet=quiet)
    written = write_unless_dry(new, out, dry_run=dry_run, overwrite=overwrite, workers=workers, quiet=quiet)
    return ExtractResult(
        out=written,
        experts=selection.counts[0],
        experts_before=selection.source.num_experts,
        top_k=active,
        nbytes=new.files.nbytes,
        seconds=time.monotonic() - started,
    )


def resolve_extract(recipe: ExtractRecipe, selection: Selection, out: str | Path) -> tuple[NewCheckpoint, int]:
    """The new checkpoint, resolved from headers, and its number of active experts."""
    source = open_checkpoint(recipe.checkpoint, as_stored=True)
    model = detect_running(source)
    identity = describe(source, model)
    refuse_other_model(selection.source, identity, recipe.selection)
    keep = refuse_uneven(selection, recipe.selection)
    top_k = selection.top_k if recipe.top_k is None else recipe.top_k
    active = check_counts(identity, source.config, selection.kept, top_k=top_k, where=recipe.selection)
    routing = (read_provenance(source.path) or {}).get("routing")
    known = original_experts(source, identity.num_experts, len(identity.layers))
    config = cut_config(source.config, model, selection, active)
    card = model_card(
        title=Path(out).name,
        bases=[source.name],
        tags=["expert-subset"],
        command=["moesaic", "extract", recipe.checkpoint, recipe.selection, str(out)],
        facts={
            "Experts per layer": f"{keep} of {identity.num_experts}",
            "Active experts": active,
            "Selected by": selection.method,
        },
    )
    new = NewCheckpoint(
        verb="extract",
        sources=(("full", source),),
        tensors=sliced_tensors(source, model, selection),
        config=config,
        texts=code_files(config),
        recipe=recipe,
        seed=None,
        card=card,
        record={
            "experts": {"original": _of_kept(known, selection)},
            "lineage": [
                {"model": identity.to_json(), "ids": [list(ids) for ids in selection.kept]},
                *({"model": one.to_json(), "ids": _of_kept(ids, selection)} for one, ids in find_lineage(source)),
            ],
            **({"routing": cut_routing(routing, selection.kept)} if routing else {}),
            "selection": {"method": selection.method, "details": _without_rows(selection.details)},
        },
        allow_nonfinite=recipe.allow_nonfinite,
    )
    return new, active


def _without_rows(details: Mapping[str, Any]) -> dict[str, Any]:
    """The details without the rows that the selection was made on, which are as many as the data has."""
    data = details.get("data")
    return {**details, "data": {key: value for key, value in data.items() if key != "rows"}} if data else dict(details)


def _of_kept(values: Sequence[Sequence[int]], selection: Selection) -> list[list[int]]:
    """Of a value per expert in each MoE layer, those of the kept experts."""
    return [[row[expert] for expert in ids] for row, ids in zip(values, selection.kept, strict=True)]


def refuse_uneven(selection: Selection, where: str) -> int:
    """The one number of experts that every layer keeps; a config can hold no more than one."""
    counts = sorted(set(selection.counts))
    if len(counts) > 1:
        raise MoesaicError(
            f"{where}: keeps {counts[0]} to {counts[-1]} experts depending on the layer, but the config of "
            f"{selection.source.model_type} holds one number for all layers, and so do all other families "
            f"({KNOWN}); keep the same number in each layer, or use the selection as "
            "a mask (moesaic.restrict, generate --selection)"
        )
    return counts[0]


def sliced_tensors(source: Checkpoint, model: MoEModel, selection: Selection) -> dict[str, Lazy]:
    """All tensors of the result, in the order of the source."""
    made: dict[str, Lazy] = {}
    sliced: set[str] = set()
    if selection.counts[0] < model.num_experts:  # layers that nothing was selected for, and that do not run
        sliced.update(name for name in source.tensors if predicts(source.config, name))
    for layer, ids in zip(model.layers, selection.kept, strict=True):
        for tensor in layer.expert_tensors:
            names = tensor.names(layer.num_experts)
            sliced.update(names)
            if tensor.axis is not None:
                made[tensor.name] = stored(source.tensors[tensor.name]).take(ids, tensor.axis)
            else:
                own = zip(tensor.names(len(ids)), ids, strict=True)
                made |= {name: stored(source.tensors[names[expert]]) for name, expert in own}
    return {
        name: made[name] if name in made else stored(info)
        for name, info in source.tensors.items()
        if name in made or name not in sliced
    }


def cut_config(config: Mapping[str, Any], model: MoEModel, selection: Selection, active: int) -> dict[str, Any]:
    """The config with the new numbers of experts and active experts, and the groups of the kept experts."""
    new = copy.deepcopy(dict(config))
    for key in EXPERT_COUNT_KEYS:
        if config.get(key) == model.num_experts:
            new[key] = selection.counts[0]
    for key in (model.family.top_k_key, *TOP_K_ALIASES):
        if config.get(key) == model.top_k:
            new[key] = active
    if selection.counts[0] < model.num_experts:
        new |= dict.fromkeys((key for key in PREDICTION_KEYS if config.get(key)), 0)
    groups = own_groups(config, len(selection.kept))
    if groups is not None and selection.counts[0] < model.num_experts:
        new["expert_groups"] = _of_kept(groups, selection)
    return new
