"""The verb `merge-back`: put a subset's (fine-tuned) experts back to where they came from in the full model."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moesaic.checkpoint.card import model_card
from moesaic.checkpoint.provenance import read_provenance
from moesaic.checkpoint.rewrite import Rewrite, RewriteResult, rewrite_unless_dry
from moesaic.checkpoint.source import Checkpoint, open_checkpoint
from moesaic.common.errors import MoesaicError
from moesaic.common.verbs import verb
from moesaic.families.identity import Ids, SourceModel, describe, find_lineage, source_from_json
from moesaic.families.moe import MoEModel, detect_running
from moesaic.selection.merge_tensors import Merge, merged_tensors
from moesaic.selection.recipe import MergeBackRecipe

_OF_THE_FULL_MODEL = ("routing", "experts", "lineage")
"""Keys of its moesaic.json that stay true: the training rule, and which experts of which models its experts are."""


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


@verb(MergeBackRecipe, positional=("full", "subset"), out=True)
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
