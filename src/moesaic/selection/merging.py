"""The verb `merge-back`: put a subset's (fine-tuned) experts back to where they came from in the full model."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from moesaic.checkpoint.record import model_card, read_provenance
from moesaic.checkpoint.rewrite import Rewrite, RewriteResult, rewrite_unless_dry
from moesaic.checkpoint.source import Checkpoint, open_checkpoint
from moesaic.common.errors import MoesaicError
from moesaic.families.moe import MoEModel, detect_running
from moesaic.selection.lineage import Ids, find_lineage
from moesaic.selection.merge_tensors import Merge, merged_tensors
from moesaic.selection.source import SourceModel, describe, source_from_json

Part = Literal["router", "shared", "other"]
PARTS: tuple[Part, ...] = get_args(Part)

_OF_THE_FULL_MODEL = ("routing", "experts", "lineage")
"""Keys of its moesaic.json that stay true: the training rule, and which experts of which models its experts are."""


@dataclass(frozen=True, kw_only=True)
class MergeBackRecipe:
    """What to put back."""

    full: str
    """The model that the subset was extracted from, or a result of merging other subsets back into it."""
    subset: str
    parts: tuple[str, ...] = ()
    """What to put back besides the experts: router (rows and biases of these experts), shared, other."""
    average: float | None = None
    """Share of the subset in the mean of both; None takes the subset's values."""
    allow_nonfinite: bool = False


@dataclass(frozen=True, kw_only=True)
class MergeBackResult(RewriteResult):
    """What was made."""

    experts: int
    """Experts put back, over all layers."""
    parts: tuple[str, ...]

    def lines(self) -> list[str]:
        """For people."""
        more = f" with {', '.join(self.parts)}" if self.parts else ""
        return [self.line(f"{self.experts} experts put back{more}")]


def merge_back(
    full: str | Path,
    subset: str | Path,
    out: str | Path,
    *,
    parts: Sequence[Part] = (),
    average: float | None = None,
    allow_nonfinite: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    quiet: bool = True,
    workers: int | None = None,
) -> MergeBackResult:
    """Write the full model with the subset's experts in their original places.

    Several subsets of one model are put back one after the other; experts that two of them hold are named and refused,
    unless `average` says how to combine them. Without training in between, the result equals `full` bit for bit.

    Args:
        full: the model that the subset was extracted from, or that with other subsets merged back: folder or hub id.
        subset: what `extract` wrote, trained or not: folder or hub id.
        out: folder to write.
        parts: put back as well: `router` (rows and biases of these experts), `shared` (shared experts), `other` (all
            other weights).
        average: put back (1 - average) * full + average * subset instead of the subset's values.
        allow_nonfinite: accept NaN and infinity in the weights.
        overwrite: replace `out` if it exists.
        dry_run: check everything, write nothing.
        quiet: print no progress.
        workers: threads; the bytes written do not depend on it. Default: one per core, at most 8.

    Raises:
        MoesaicError: the subset is not of this model (by the hash that `extract` recorded) or has another shape; two
            subsets hold the same expert; a full disk; a target that exists.
    """
    started = time.monotonic()
    recipe = MergeBackRecipe(
        full=str(full),
        subset=str(subset),
        parts=tuple(parts),
        average=average,
        allow_nonfinite=allow_nonfinite,
    )
    plan, ids = plan_merge_back(recipe, out)
    written = rewrite_unless_dry(plan, out, dry_run=dry_run, overwrite=overwrite, workers=workers, quiet=quiet)
    return MergeBackResult(
        out=written,
        experts=sum(map(len, ids)),
        parts=recipe.parts,
        nbytes=plan.files.nbytes,
        seconds=time.monotonic() - started,
    )


def plan_merge_back(recipe: MergeBackRecipe, out: str | Path) -> tuple[Rewrite, Ids]:
    """The new checkpoint, resolved from headers, and the ids that the subset's experts have in it."""
    _check(recipe)
    full, subset = open_checkpoint(recipe.full), open_checkpoint(recipe.subset)
    full_model, subset_model = detect_running(full), detect_running(subset)
    identity = describe(full, full_model)
    bases = _bases(full, identity)
    since, ids = _place(bases, subset, subset_model)
    _refuse_conflicts(recipe, since, ids, identity)
    merge = Merge(full=full, subset=subset, average=recipe.average)
    tensors, work = merged_tensors(merge, full_model, subset_model, ids, recipe.parts)
    root = bases[-1]
    mine = {"name": subset.name, "ids": [list(row) for row in ids], "parts": list(recipe.parts)}
    merged = [*root.since, {**mine, "into": identity.to_json()}]
    record = read_provenance(full.path) or {}
    command = ["moesaic", "merge-back", recipe.full, recipe.subset, str(out)]
    plan = Rewrite(
        verb="merge-back",
        sources=(("full", full), ("subset", subset)),
        tensors=tuple(tensors),
        work=tuple(work),
        config=full.config,
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
    return plan, ids


def _check(recipe: MergeBackRecipe) -> None:
    for part in recipe.parts:
        if part not in PARTS:
            raise MoesaicError(f"--with {part}: not one of {', '.join(PARTS)}")
    if recipe.average is not None and not 0.0 <= recipe.average <= 1.0:
        raise MoesaicError(f"--average {recipe.average}: must be from 0 (full) to 1 (subset)")


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
    merged = record.get("merged")
    if record.get("verb") != "merge-back" or not isinstance(merged, dict):
        return bases
    where, subsets = str(full.path / "moesaic.json"), tuple(merged.get("subsets", []))
    for number in range(len(subsets) - 1, 0, -1):
        if "into" in subsets[number]:
            bases.append(_Base(model=source_from_json(subsets[number]["into"], where), since=subsets[number:]))
    return [*bases, _Base(model=source_from_json(merged.get("into"), where), since=subsets)]


def _place(bases: Sequence[_Base], subset: Checkpoint, model: MoEModel) -> tuple[tuple[Mapping[str, Any], ...], Ids]:
    """What conflicts with the subset, and the ids that its experts have in the full model."""
    lineage = find_lineage(subset)
    if lineage is None:
        raise MoesaicError(
            f"{subset.name}: its moesaic.json does not say what it was extracted from; give a folder that "
            "`moesaic extract` wrote, or one trained from it"
        )
    for base in bases:
        for ancestor, ids in lineage.ancestors:
            if (ancestor.sample_hash, ancestor.layers) == (base.model.sample_hash, base.model.layers):
                if {len(row) for row in ids} != {model.num_experts}:
                    raise MoesaicError(
                        f"{subset.name}: has {model.num_experts} experts per layer, but {len(ids[0])} were extracted; "
                        "only subsets with the experts that were extracted can be put back"
                    )
                return base.since, ids
    parent, root = lineage.ancestors[0][0], bases[-1].model
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
