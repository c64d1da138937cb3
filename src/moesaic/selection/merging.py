"""The verb `merge-back`: put a subset's (fine-tuned) experts back to where they came from in the full model."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from moesaic.checkpoint.card import model_card
from moesaic.checkpoint.headers import TensorInfo
from moesaic.checkpoint.layout import OutputTensor
from moesaic.checkpoint.pieces import ComputedTensor, CopiedTensor, NewTensor, whole
from moesaic.checkpoint.provenance import read_provenance
from moesaic.checkpoint.rewrite import Rewrite, check_space, rewrite
from moesaic.checkpoint.source import Checkpoint, open_checkpoint
from moesaic.errors import MoesaicError
from moesaic.families.moe import ROUTER_ROLES, ExpertTensor, MoELayerTensors, MoEModel, detect_moe
from moesaic.selection.lineage import Ids, find_lineage
from moesaic.selection.slots import Slot, expert_slots, whole_slot
from moesaic.selection.source import SourceModel, describe, source_from_json

Part = Literal["router", "shared", "other"]
PARTS: tuple[Part, ...] = get_args(Part)


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
class MergeBackResult:
    """What was made."""

    out: Path | None
    """None after a dry run."""
    experts: int
    """Experts put back, over all layers."""
    parts: tuple[str, ...]
    nbytes: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for `--json`."""
        return {
            **vars(self),
            "out": None if self.out is None else str(self.out),
            "parts": list(self.parts),
            "seconds": round(self.seconds, 3),
        }

    def lines(self) -> list[str]:
        """The same for people."""
        where = "would be" if self.out is None else f"{self.out}:"
        more = f" with {', '.join(self.parts)}" if self.parts else ""
        return [f"{where} {self.experts} experts put back{more}, {self.nbytes / 1e6:,.1f} MB, in {self.seconds:.1f} s"]


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
    check_space(plan, out)
    if not dry_run:
        rewrite(plan, out, overwrite=overwrite, workers=workers, quiet=quiet)
    return MergeBackResult(
        out=None if dry_run else Path(out),
        experts=sum(map(len, ids)),
        parts=recipe.parts,
        nbytes=plan.files.nbytes,
        seconds=time.monotonic() - started,
    )


def plan_merge_back(recipe: MergeBackRecipe, out: str | Path) -> tuple[Rewrite, Ids]:
    """The new checkpoint, resolved from headers, and the ids that the subset's experts have in it."""
    _check(recipe)
    full, subset = open_checkpoint(recipe.full), open_checkpoint(recipe.subset)
    full_model, subset_model = detect_moe(full), detect_moe(subset)
    identity = describe(full, full_model)
    root, earlier = _earlier_merges(full, identity)
    ids = _ids_in(root, subset, subset_model)
    _refuse_conflicts(recipe, earlier, ids, identity)
    merge = _Merge(full=full, subset=subset, average=recipe.average)
    merged = [*earlier, {"name": subset.name, "ids": [list(row) for row in ids], "parts": list(recipe.parts)}]
    routing = (read_provenance(full.path) or {}).get("routing")
    command = ["moesaic", "merge-back", recipe.full, recipe.subset, str(out)]
    plan = Rewrite(
        verb="merge-back",
        sources=(("full", full), ("subset", subset)),
        tensors=tuple(_tensors(merge, full_model, subset_model, ids, recipe.parts)),
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
            "merged": {"into": root.to_json(), "subsets": merged},
            **({"routing": routing} if routing else {}),
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


def _earlier_merges(full: Checkpoint, identity: SourceModel) -> tuple[SourceModel, list[dict[str, Any]]]:
    """The model that subsets name as their parent, and what was merged back into it before."""
    record = read_provenance(full.path) or {}
    merged = record.get("merged")
    if record.get("verb") != "merge-back" or not isinstance(merged, dict):
        return identity, []
    return source_from_json(merged.get("into"), str(full.path / "moesaic.json")), list(merged.get("subsets", []))


def _ids_in(root: SourceModel, subset: Checkpoint, model: MoEModel) -> Ids:
    """The ids that the subset's experts have in the full model."""
    lineage = find_lineage(subset)
    if lineage is None:
        raise MoesaicError(
            f"{subset.name}: its moesaic.json does not say what it was extracted from; give a folder that "
            "`moesaic extract` wrote, or one trained from it"
        )
    for ancestor, ids in lineage.ancestors:
        if (ancestor.sample_hash, ancestor.layers) == (root.sample_hash, root.layers):
            if {len(row) for row in ids} != {model.num_experts}:
                raise MoesaicError(
                    f"{subset.name}: has {model.num_experts} experts per layer, but {len(ids[0])} were extracted; only "
                    "subsets with the experts that were extracted can be put back"
                )
            return ids
    parent = lineage.ancestors[0][0]
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


@dataclass(frozen=True, kw_only=True)
class _Merge:
    """Two checkpoints, and how a value of both becomes one."""

    full: Checkpoint
    subset: Checkpoint
    average: float | None

    def tensor(self, target: TensorInfo, pieces: Sequence[tuple[Sequence[Slot], Sequence[Slot] | None]]) -> NewTensor:
        """`target` from consecutive pieces: the slots of the full model, and those of the subset that replace them."""
        output = OutputTensor(name=target.name, dtype=target.dtype, shape=target.shape)
        for ours, theirs in pieces:
            if theirs is not None and _elements(ours) != _elements(theirs):
                raise MoesaicError(
                    f"{self.subset.name}: {theirs[0].source.name} has another shape than {target.name} of "
                    f"{self.full.name}; only the number of experts may differ"
                )
        same_dtype = all(slot.source.dtype == target.dtype for _, theirs in pieces for slot in theirs or ())
        if self.average is None and same_dtype:
            runs = [slot.run for ours, theirs in pieces for slot in (ours if theirs is None else theirs)]
            return CopiedTensor(output=output, runs=tuple(runs))
        sources = [slot.source for ours, theirs in pieces for slot in (*ours, *(theirs or ()))]
        return ComputedTensor(
            output=output,
            sources=tuple({(one.file, one.name): one for one in sources}.values()),
            compute=_computing(output, pieces, self.average),
        )

    def whole(self, target: TensorInfo) -> NewTensor:
        """A tensor that both have under one name."""
        theirs = self.subset.tensors.get(target.name)
        if theirs is None or theirs.shape != target.shape:
            state = "is missing" if theirs is None else f"has shape {list(theirs.shape)}, not {list(target.shape)}"
            raise MoesaicError(f"{self.subset.name}: {target.name} {state}; leave it out of --with")
        return self.tensor(target, [([whole_slot(target)], [whole_slot(theirs)])])


def _elements(slots: Sequence[Slot]) -> int:
    return sum(slot.info.shape[0] for slot in slots)


def _computing(
    output: OutputTensor, pieces: Sequence[tuple[Sequence[Slot], Sequence[Slot] | None]], average: float | None
) -> Callable[[], Any]:
    """The function that computes a tensor: in float32 (float64 for float64), rounded once.

    full + average * (subset - full), so that the mean of equal values is that value.
    """

    def compute() -> Any:
        import torch

        from moesaic.checkpoint.reader import TORCH_DTYPES, read_tensor

        dtype = TORCH_DTYPES[output.dtype]
        wide = torch.promote_types(dtype, torch.float32)
        made = []
        for ours, theirs in pieces:
            read_full = theirs is None or average is not None
            full = torch.cat([read_tensor(slot.info) for slot in ours]) if read_full else None
            if theirs is None:
                made.append(full)
                continue
            values = torch.cat([read_tensor(slot.info) for slot in theirs])
            if full is not None and average is not None:
                values = full.to(wide) + average * (values.to(wide) - full.to(wide))
            made.append(values.to(dtype))
        return torch.cat(made).view(output.shape)

    return compute


def _tensors(merge: _Merge, full: MoEModel, subset: MoEModel, ids: Ids, parts: Sequence[str]) -> list[NewTensor]:
    """All tensors of the result, in the order of the full model."""
    made: dict[str, NewTensor] = {}
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
        if name not in experts and part in parts:
            made[name] = merge.whole(info)
    return [made.get(name) or whole(info) for name, info in merge.full.tensors.items()]


def _expert_tensors(
    merge: _Merge, tensor: ExpertTensor, layer: MoELayerTensors, cut: MoELayerTensors, kept: Sequence[int]
) -> dict[str, NewTensor]:
    """The tensors of one role in one layer, with the kept experts' slots from the subset."""
    place = {expert: number for number, expert in enumerate(kept)}
    pieces = []
    for expert in range(layer.num_experts):
        ours = expert_slots(merge.full, layer, tensor.role, expert)
        theirs = expert_slots(merge.subset, cut, tensor.role, place[expert]) if expert in place else None
        assert ours is not None
        if expert in place and theirs is None:
            raise MoesaicError(f"{merge.subset.name}: layer {cut.layer} has no tensor for {tensor.role} of the experts")
        pieces.append((ours, theirs))
    if tensor.axis is not None:
        return {tensor.name: merge.tensor(merge.full.tensors[tensor.name], pieces)}
    names = tensor.names(layer.num_experts)
    return {names[expert]: merge.tensor(merge.full.tensors[names[expert]], [pieces[expert]]) for expert in place}
