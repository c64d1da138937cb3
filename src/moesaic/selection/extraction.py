"""The verb `extract`: a checkpoint of the same family with only the kept experts."""

import copy
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moesaic.checkpoint.pieces import NewTensor, slot_tensor, whole
from moesaic.checkpoint.record import model_card, original_experts, read_provenance
from moesaic.checkpoint.rewrite import Rewrite, RewriteResult, rewrite_unless_dry
from moesaic.checkpoint.source import Checkpoint, open_checkpoint
from moesaic.families.counting import beyond_depth, layer_of
from moesaic.families.moe import EXPERT_COUNT_KEYS, MoELayerTensors, MoEModel, detect_running
from moesaic.selection.choose import check_counts, own_groups, refuse_uneven
from moesaic.selection.lineage import extend, find_lineage
from moesaic.selection.rules import cut_routing
from moesaic.selection.selection import Selection, load_selection
from moesaic.selection.source import describe, refuse_other_model

_TOP_K_ALIASES = ("experts_per_token",)
"""Further config keys of the number of active experts (GPT-OSS as published)."""


@dataclass(frozen=True, kw_only=True)
class ExtractRecipe:
    """What to extract."""

    checkpoint: str
    """The full model: folder or hub id."""
    selection: str
    """The file that says which experts to keep."""
    top_k: int | None = None
    """Active experts of the result; None takes the selection's, else the model's."""
    allow_nonfinite: bool = False
    """Accept NaN and infinity in the weights."""


@dataclass(frozen=True, kw_only=True)
class ExtractResult(RewriteResult):
    """What was made."""

    experts: int
    """Routed experts per layer of the result."""
    experts_before: int
    top_k: int

    def lines(self) -> list[str]:
        """For people."""
        return [self.line(f"{self.experts} of {self.experts_before} experts per layer, {self.top_k} active")]


def extract(
    checkpoint: str | Path,
    selection: str | Path | Selection,
    out: str | Path,
    *,
    top_k: int | None = None,
    allow_nonfinite: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    quiet: bool = True,
    workers: int | None = None,
) -> ExtractResult:
    """Write a standalone checkpoint of the same family and layout with only the selected experts.

    Router rows, selection biases and experts are sliced; everything else, shared experts included, is copied. The ids
    that the experts had are recorded in moesaic.json, for `merge_back`. Keeping all experts gives the same tensors.

    Args:
        checkpoint: the full model: folder, or hub id `org/name[@revision]`.
        selection: a file of `select`, or a `Selection`.
        out: folder to write.
        top_k: lower the number of active experts to this. Default: what the selection was made for, else the model's.
        allow_nonfinite: accept NaN and infinity in the weights.
        overwrite: replace `out` if it exists.
        dry_run: check everything, write nothing.
        quiet: print no progress.
        workers: threads; the bytes written do not depend on it. Default: one per core, at most 8.

    Raises:
        MoesaicError: a selection for another model, or one that the family's config or router cannot hold; a NaN in
            the source; a full disk; a target that exists.
    """
    started = time.monotonic()
    loaded = selection if isinstance(selection, Selection) else load_selection(selection)
    where = "selection" if isinstance(selection, Selection) else str(selection)
    recipe = ExtractRecipe(checkpoint=str(checkpoint), selection=where, top_k=top_k, allow_nonfinite=allow_nonfinite)
    plan, active = plan_extract(recipe, loaded, out)
    written = rewrite_unless_dry(plan, out, dry_run=dry_run, overwrite=overwrite, workers=workers, quiet=quiet)
    return ExtractResult(
        out=written,
        experts=loaded.counts[0],
        experts_before=loaded.source.num_experts,
        top_k=active,
        nbytes=plan.files.nbytes,
        seconds=time.monotonic() - started,
    )


def plan_extract(recipe: ExtractRecipe, selection: Selection, out: str | Path) -> tuple[Rewrite, int]:
    """The new checkpoint, resolved from headers, and its number of active experts."""
    source = open_checkpoint(recipe.checkpoint)
    model = detect_running(source)
    identity = describe(source, model)
    refuse_other_model(selection.source, identity, recipe.selection)
    keep = refuse_uneven(selection, recipe.selection)
    top_k = selection.top_k if recipe.top_k is None else recipe.top_k
    active = check_counts(identity, source.config, selection.kept, top_k=top_k, where=recipe.selection)
    routing = (read_provenance(source.path) or {}).get("routing")
    known = original_experts(source, identity.num_experts, len(identity.layers))
    lineage = extend(identity, selection.kept, find_lineage(source))
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
    plan = Rewrite(
        verb="extract",
        sources=(("full", source),),
        tensors=tuple(sliced_tensors(source, model, selection)),
        config=cut_config(source.config, model, selection, active),
        recipe=recipe,
        seed=None,
        card=card,
        record={
            "experts": {
                "original": [[row[one] for one in ids] for row, ids in zip(known, selection.kept, strict=True)]
            },
            "lineage": lineage.to_json(),
            **({"routing": cut_routing(routing, selection.kept)} if routing else {}),
            "selection": {"method": selection.method, "details": dict(selection.details)},
        },
        allow_nonfinite=recipe.allow_nonfinite,
    )
    return plan, active


def sliced_tensors(source: Checkpoint, model: MoEModel, selection: Selection) -> list[NewTensor]:
    """All tensors of the result, in the order of the source."""
    made: dict[str, NewTensor] = {}
    sliced: set[str] = set()
    if selection.counts[0] < model.num_experts:  # layers that nothing was selected for, and that do not run
        sliced.update(name for name in source.tensors if beyond_depth(source.config, layer_of(name)))
    for layer, ids in zip(model.layers, selection.kept, strict=True):
        for tensor in layer.expert_tensors:
            sliced.update(tensor.names(layer.num_experts))
        made.update(_sliced_layer(source, layer, ids))
    return [
        made.get(name) or whole(info) for name, info in source.tensors.items() if name in made or name not in sliced
    ]


def _sliced_layer(source: Checkpoint, layer: MoELayerTensors, ids: tuple[int, ...]) -> dict[str, NewTensor]:
    made: dict[str, NewTensor] = {}
    for tensor in layer.expert_tensors:
        if tensor.axis is not None:
            info = source.tensors[tensor.name]
            made[tensor.name] = slot_tensor(tensor.name, [(info, expert) for expert in ids], axis=tensor.axis)
            continue
        old_names = tensor.names(layer.num_experts)
        for name, expert in zip(tensor.names(len(ids)), ids, strict=True):
            made[name] = whole(source.tensors[old_names[expert]], name)
    return made


_PREDICTED = "num_nextn_predict_layers"


def cut_config(config: Mapping[str, Any], model: MoEModel, selection: Selection, active: int) -> dict[str, Any]:
    """The config with the new numbers of experts and active experts, and the groups of the kept experts."""
    new = copy.deepcopy(dict(config))
    for key in EXPERT_COUNT_KEYS:
        if config.get(key) == model.num_experts:
            new[key] = selection.counts[0]
    for key in (model.family.top_k_key, *_TOP_K_ALIASES):
        if key in config:
            new[key] = active
    if config.get(_PREDICTED) and selection.counts[0] < model.num_experts:
        new[_PREDICTED] = 0
    groups = own_groups(config, len(selection.kept))
    if groups is not None and selection.counts[0] < model.num_experts:
        new["expert_groups"] = [
            [row[expert] for expert in ids] for row, ids in zip(groups, selection.kept, strict=True)
        ]
    return new
