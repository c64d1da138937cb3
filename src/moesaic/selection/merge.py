"""The verb `merge-back`: put a subset's (fine-tuned) experts back to where they came from in the full model."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moesaic.checkpoint.headers import TensorInfo
from moesaic.checkpoint.lazy import Lazy, combine, concat, promoted, stored
from moesaic.checkpoint.push import pushed
from moesaic.checkpoint.quantised import settings_of
from moesaic.checkpoint.record import PROVENANCE_FILE, model_card, read_provenance
from moesaic.checkpoint.source import Checkpoint, open_checkpoint
from moesaic.checkpoint.write import NewCheckpoint, WriteResult, write_unless_dry
from moesaic.common.errors import MoesaicError
from moesaic.common.progress import notice
from moesaic.common.recipe import Count, load_document
from moesaic.common.verbs import verb
from moesaic.families.counting import predicts
from moesaic.families.identity import Ids, SourceModel, describe, find_lineage
from moesaic.families.moe import (
    ROUTER_ROLES,
    ExpertTensor,
    MoELayerTensors,
    MoEModel,
    detect_running,
    prediction_notices,
)
from moesaic.modeling.names import code_files
from moesaic.selection.recipe import MergeBackRecipe
from moesaic.selection.slots import expert_part

_OF_THE_FULL_MODEL = ("routing", "experts", "lineage")
"""Keys of its moesaic.json that stay true: the training rule, and which experts of which models its experts are."""


@dataclass(frozen=True, kw_only=True, repr=False)
class MergeBackResult(WriteResult):
    """What was made."""

    experts: int
    """Experts put back, over all layers."""
    parts: tuple[str, ...]

    def lines(self) -> list[str]:
        """For people."""
        more = f" with {', '.join(self.parts)}" if self.parts else ""
        return [self.line(f"{self.experts} experts put back{more}")]


@verb(MergeBackRecipe, positional=("full", "subset"), out="folder")
@pushed
def merge_back(
    recipe: MergeBackRecipe,
    out: str | Path,
    *,
    overwrite: bool = False,
    dry_run: bool = False,
    quiet: bool = True,
    workers: int | None = None,
) -> MergeBackResult:
    """Write the full model with the subset's experts in their original places.

    `full` is the model that the subset was extracted from, or that with other subsets merged back: several go back one
    after the other. Experts that two of them hold are named and refused, unless `average` says how to combine them:
    (1 - average) * full + average * subset. Without training in between, the result equals `full` bit for bit.

    Raises:
        MoesaicError: the subset is not of this model (by the hash that `extract` recorded) or has another shape; two
            subsets hold the same expert; a full disk; a target that exists.
    """
    started = time.monotonic()
    new, ids = resolve_merge_back(recipe, out)
    sources = [source for _, source in new.sources]
    dequantised = [line for source in sources for line in source.dequantised]
    for line in (*dequantised, *prediction_notices(sources[0], "kept as the full model has it")):
        notice(line, quiet=quiet)
    written = write_unless_dry(new, out, dry_run=dry_run, overwrite=overwrite, workers=workers, quiet=quiet)
    return MergeBackResult(
        out=written,
        experts=sum(map(len, ids)),
        parts=recipe.parts,
        nbytes=new.files.nbytes,
        seconds=time.monotonic() - started,
    )


def resolve_merge_back(recipe: MergeBackRecipe, out: str | Path) -> tuple[NewCheckpoint, Ids]:
    """The new checkpoint, resolved from headers, and the ids that the subset's experts have in it."""
    full, subset = _opened(recipe)
    full_model, subset_model = detect_running(full), detect_running(subset)
    identity = describe(full, full_model)
    bases = _bases(full, identity)
    since, ids = _place(bases, subset, subset_model)
    _refuse_conflicts(recipe, since, ids, identity)
    merge = Merge(full=full, subset=subset, average=recipe.average)
    root = bases[-1]
    mine = {"name": subset.name, "ids": [list(row) for row in ids], "parts": list(recipe.parts)}
    merged = [*root.since, {**mine, "into": identity.to_json()}]
    record = read_provenance(full.path) or {}
    command = ["moesaic", "merge-back", recipe.full, recipe.subset, str(out)]
    new = NewCheckpoint(
        verb="merge-back",
        sources=(("full", full), ("subset", subset)),
        tensors=merged_tensors(merge, full_model, subset_model, ids, recipe.parts),
        config=full.config,
        texts=code_files(full.config),
        recipe=recipe,
        seed=None,
        card=model_card(
            title=Path(out).name,
            bases=[full.name],
            tags=["expert-merge-back"],
            command=command,
            facts={"Experts put back": sum(map(len, ids)), "Also put back": ", ".join(recipe.parts) or "nothing"},
        ),
        record={
            "merged": {"into": root.model.to_json(), "subsets": merged},
            **{key: record[key] for key in _OF_THE_FULL_MODEL if record.get(key)},
        },
        allow_nonfinite=recipe.allow_nonfinite,
    )
    return new, ids


def _opened(recipe: MergeBackRecipe) -> tuple[Checkpoint, Checkpoint]:
    """Both checkpoints; where they are quantised alike and nothing is computed, as they are stored."""
    full, subset = (open_checkpoint(ref, as_stored=True) for ref in (recipe.full, recipe.subset))
    alike = settings_of(full.config) == settings_of(subset.config)
    if (alike and recipe.average is None) or not (full.packed or subset.packed):
        return full, subset
    return open_checkpoint(recipe.full), open_checkpoint(recipe.subset)


@dataclass(frozen=True, kw_only=True)
class _Base:
    """A model that a subset may come from: the one given, or one that it was made from by merging back."""

    model: SourceModel
    since: tuple[Mapping[str, Any], ...]
    """What was put back into it since: these places conflict, those that were put back before are its own."""


def _bases(full: Checkpoint, identity: SourceModel) -> list[_Base]:
    """The full model itself, then every model before a merge, the first of all last."""
    bases = [_Base(model=identity, since=())]
    record = read_provenance(full.path) or {}
    if record.get("verb") != "merge-back" or record.get("merged") is None:
        return bases
    where = f"{full.path / PROVENANCE_FILE}: merged"
    merged = load_document(_Merged, record["merged"], where, others=True)
    subsets = tuple(record["merged"]["subsets"])
    for number, one in enumerate(merged.subsets):
        if len(one.ids) != len(identity.layers):
            raise MoesaicError(f"{where}.subsets.{number}.ids: has {len(one.ids)} rows, not {len(identity.layers)}")
    for number in range(len(subsets) - 1, 0, -1):
        if (into := merged.subsets[number].into) is not None:
            bases.append(_Base(model=into, since=subsets[number:]))
    return [*bases, _Base(model=merged.into, since=subsets)]


@dataclass(frozen=True, kw_only=True)
class _PutBack:
    """One subset, in the order in which they were put back."""

    name: str
    ids: tuple[tuple[Count, ...], ...]
    parts: tuple[str, ...]
    into: SourceModel | None = None
    """The model that it was put back into; None in records of earlier versions."""


@dataclass(frozen=True, kw_only=True)
class _Merged:
    """The entry `merged` of moesaic.json."""

    into: SourceModel
    subsets: tuple[_PutBack, ...]


def _place(bases: Sequence[_Base], subset: Checkpoint, model: MoEModel) -> tuple[tuple[Mapping[str, Any], ...], Ids]:
    """What conflicts with the subset, and the ids that its experts have in the full model."""
    lineage = find_lineage(subset)
    if not lineage:
        raise MoesaicError(
            f"{subset.name}: its moesaic.json does not say what it was extracted from; give a folder that "
            "`moesaic extract` wrote, or one trained from it"
        )
    for base in bases:
        for ancestor, ids in lineage:
            if (ancestor.sample_hash, ancestor.layers) == (base.model.sample_hash, base.model.layers):
                if {len(row) for row in ids} != {model.num_experts}:
                    raise MoesaicError(
                        f"{subset.name}: has {model.num_experts} experts per layer, but {len(ids[0])} were extracted; "
                        "only subsets with the experts that were extracted can be put back"
                    )
                return base.since, ids
    parent, root = lineage[0][0], bases[-1].model
    raise MoesaicError(
        f"{subset.name}: was extracted from {parent.name} (hash {parent.sample_hash[:12]}), not from {root.name} "
        f"(hash {root.sample_hash[:12]}); give its own parent"
    )


def _refuse_conflicts(
    recipe: MergeBackRecipe, earlier: Sequence[Mapping[str, Any]], ids: Ids, identity: SourceModel
) -> None:
    if recipe.average is not None:
        return
    for other in earlier:
        both = [
            f"expert {expert} of layer {layer}"
            for layer, ours, theirs in zip(identity.layers, ids, other["ids"], strict=True)
            for expert in sorted(set(ours) & set(theirs))
        ]
        both += [f"the {part} weights" for part in recipe.parts if part != "router" and part in other["parts"]]
        if both:
            more = f" and {len(both) - 3} more" if len(both) > 3 else ""
            raise MoesaicError(
                f"{recipe.subset}: {', '.join(both[:3])}{more} were put back from {other['name']} before; "
                "say with --average how much of this subset to take"
            )


# --- tensors ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Merge:
    """Two checkpoints, and how a value of both becomes one."""

    full: Checkpoint
    subset: Checkpoint
    average: float | None

    def tensor(self, target: TensorInfo, pieces: Sequence[tuple[Lazy, Lazy | None]]) -> Lazy:
        """`target` from consecutive pieces: the full model's, and what replaces each or is averaged with it, if any."""
        return concat([self._piece(target, *piece) for piece in pieces]).reshape(*target.shape)

    def _piece(self, target: TensorInfo, ours: Lazy, theirs: Lazy | None) -> Lazy:
        if theirs is None:
            return ours
        if theirs.size != ours.size:
            raise MoesaicError(
                f"{self.subset.name}: {theirs.sources[0].name} has another shape than {target.name} of "
                f"{self.full.name}; only the number of experts may differ"
            )
        if self.average is None:  # both are read where a cast is needed: so say the records of earlier versions
            return theirs if theirs.dtype == ours.dtype else combine(lambda both: both[1], [ours, theirs], ours.dtype)
        # In float32 (float64 for float64), rounded once. `lerp` is exact at both ends, and the mean of equal values is
        # that value.
        average, wide = self.average, promoted(ours.dtype, theirs.dtype, "F32")
        parts = [ours.cast(wide), theirs.cast(wide)]
        return combine(lambda both: torch.lerp(both[0], both[1], average), parts, ours.dtype)

    def whole(self, target: TensorInfo) -> Lazy:
        """A tensor that both have under one name."""
        theirs = self.subset.tensors.get(target.name)
        if theirs is None or theirs.shape != target.shape:
            state = "is missing" if theirs is None else f"has shape {list(theirs.shape)}, not {list(target.shape)}"
            raise MoesaicError(f"{self.subset.name}: {target.name} {state}; leave it out of --with")
        return self._piece(target, stored(target), stored(theirs))


def merged_tensors(merge: Merge, full: MoEModel, subset: MoEModel, ids: Ids, parts: Sequence[str]) -> dict[str, Lazy]:
    """All tensors of the result, in the order of the full model."""
    made: dict[str, Lazy] = {}
    experts: set[str] = set()
    shared: set[str] = set()
    for layer, cut, kept in zip(full.layers, subset.layers, ids, strict=True):
        shared.update(layer.shared)
        for tensor in layer.expert_tensors:
            experts.update(tensor.names(layer.num_experts))
            if tensor.role not in ROUTER_ROLES or "router" in parts:
                made.update(_expert_tensors(merge, tensor, layer, cut, kept))
    for name, info in merge.full.tensors.items():
        part = "shared" if name in shared else "other"
        stored_only = predicts(merge.full.config, name)
        if name not in experts and part in parts and not stored_only:
            made[name] = merge.whole(info)
    return {name: made[name] if name in made else stored(info) for name, info in merge.full.tensors.items()}


def _expert_tensors(
    merge: Merge, tensor: ExpertTensor, layer: MoELayerTensors, cut: MoELayerTensors, kept: Sequence[int]
) -> dict[str, Lazy]:
    """The tensors of one role in one layer, with the kept experts' slots from the subset."""
    place = {expert: number for number, expert in enumerate(kept)}
    pieces = []
    for expert in range(layer.num_experts):
        ours = expert_part(merge.full, layer, tensor.role, expert)
        theirs = expert_part(merge.subset, cut, tensor.role, place[expert]) if expert in place else None
        assert ours is not None
        if expert in place and theirs is None:
            raise MoesaicError(f"{merge.subset.name}: layer {cut.layer} has no tensor for {tensor.role} of the experts")
        pieces.append((ours, theirs))
    if tensor.axis is not None:
        return {tensor.name: merge.tensor(merge.full.tensors[tensor.name], pieces)}
    names = tensor.names(layer.num_experts)
    return {names[expert]: merge.tensor(merge.full.tensors[names[expert]], [pieces[expert]]) for expert in place}
