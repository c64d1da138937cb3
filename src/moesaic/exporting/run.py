"""The verb `export`: from a recipe to everything that is written, decided from headers alone, and the writing of it."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from moesaic.checkpoint.lazy import Lazy
from moesaic.checkpoint.output import scratch_folder
from moesaic.checkpoint.push import pushed
from moesaic.checkpoint.record import model_card, original_experts, read_provenance
from moesaic.checkpoint.source import Checkpoint, open_checkpoint
from moesaic.checkpoint.write import NewCheckpoint, check_output, write
from moesaic.checkpoint.writer import parse_size
from moesaic.common.errors import MoesaicError
from moesaic.common.progress import warn
from moesaic.common.recipe import load_recipe
from moesaic.common.verbs import verb
from moesaic.exporting.back import back_to_family
from moesaic.exporting.dense import specialist_of
from moesaic.exporting.recipe import DENSE, DESTINATIONS, ExportRecipe, ExportResult, LogitCheck
from moesaic.exporting.rules import config_routing, facts_of, failures_of, refusal
from moesaic.exporting.tensors import (
    CODES,
    cast_all,
    input_layout,
    native_config,
    native_tensors,
    our_tensors,
    relaid_tensors,
    scaling_factor,
)
from moesaic.exporting.view import View, view_of
from moesaic.families.family import ONE_PER_GROUP, PLAIN_TOP_K, base_of, native_type, our_base
from moesaic.families.moe import detect_moe, prediction_notices
from moesaic.families.moe_table import MOE_FAMILIES, TARGETS
from moesaic.modeling.names import code_files
from moesaic.routing.config import RuleConfig


@verb(ExportRecipe, positional=("checkpoint",), out="folder", convert={"checkpoint": str})
@pushed
def export(
    recipe: ExportRecipe,
    out: str | Path,
    *,
    check: bool = False,
    text: str | Path | None = None,
    device: str | None = None,
    llama_cpp: str | Path | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    quiet: bool = True,
    workers: int | None = None,
) -> ExportResult:
    """Write the same model as a native family, as our architecture, in another layout or dtype, or as GGUF.

    Args:
        check: run source and result on random and real tokens and compare the logits, in fp32.
        text: UTF-8 text for the check. Default: docstrings of Python's own library.
        device: where the check runs. Default: cuda if there is one, else cpu.
        llama_cpp: folder of llama.cpp, with its converter (`gguf` only). Default: $MOESAIC_LLAMA_CPP.

    Raises:
        MoesaicError: the model is not exactly the family (every rule that fails is named), a NaN in the source, a full
            disk, a target that exists.
    """
    started = time.monotonic()
    if check and dry_run:
        raise MoesaicError("--check needs the result: leave out --dry-run")
    if check and recipe.to == DENSE:
        raise MoesaicError("--check: one specialist is another model than all of them; leave it out")
    if check:
        from moesaic.exporting.check import refuse_settings

        refuse_settings(text, device)
    if recipe.to == "gguf":
        from moesaic.exporting.gguf import export_gguf

        return export_gguf(
            recipe, Path(out), llama_cpp=llama_cpp, check=check, text=text, device=device, overwrite=overwrite,
            dry_run=dry_run, quiet=quiet, workers=workers,
        )  # fmt: skip
    plan = plan_export(recipe)
    new = plan.new_checkpoint(str(out))
    check_output(out, new.files, [plan.checkpoint], overwrite=overwrite)
    if not quiet:
        for notice in plan.notices:
            warn(notice)
    checks: tuple[LogitCheck, ...] = ()
    if not dry_run:
        write(new, out, overwrite=overwrite, workers=workers, quiet=quiet)
        checks = _checked(plan, Path(out), text=text, device=device, quiet=quiet) if check else ()
    return ExportResult(
        out=None if dry_run else Path(out),
        family=plan.family,
        why=plan.why,
        layout=recipe.layout,
        nbytes=new.files.nbytes,
        seconds=time.monotonic() - started,
        checks=checks,
        notices=plan.notices,
    )


def _checked(
    plan: "ExportPlan", out: Path, *, text: str | Path | None, device: str | None, quiet: bool
) -> tuple[LogitCheck, ...]:
    """Compare source and result; a source that transformers cannot run is compared as our architecture."""
    from moesaic.exporting.check import compare_models

    source = plan.checkpoint.path
    if plan.family != plan.checkpoint.config.get("model_type") and not view_of(plan.checkpoint).loads:
        with scratch_folder(out) as folder:
            ours = plan_export(replace(plan.recipe, to="moesaic", layout="family", dtype=None))
            write(ours.new_checkpoint("ours"), folder / "ours", quiet=quiet)
            return tuple(compare_models(folder / "ours", out, text=text, device=device, quiet=quiet))
    return tuple(compare_models(source, out, text=text, device=device, quiet=quiet))


# --- what is written, decided from headers ----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ExportPlan:
    """One export, resolved."""

    recipe: ExportRecipe
    checkpoint: Checkpoint
    family: str
    """Model type of the result."""
    why: str
    """Why this family, in words."""
    tensors: Mapping[str, Lazy] = field(repr=False)
    """Before the change of dtype."""
    config: Mapping[str, Any]
    num_experts: int
    layers: int
    notices: tuple[str, ...] = ()
    routing: Mapping[str, Any] | None = None
    """The rule that training recorded, where the family stays."""

    def new_checkpoint(self, out: str) -> NewCheckpoint:
        """What `checkpoint.write` needs."""
        recipe, checkpoint = self.recipe, self.checkpoint
        record: dict[str, Any] = {
            "family": self.family,
            "why": self.why,
        }
        if recipe.specialist is not None:
            record["specialist"] = recipe.specialist
        else:
            record["experts"] = {"original": original_experts(checkpoint, self.num_experts, self.layers)}
        if lineage := (read_provenance(checkpoint.path) or {}).get("lineage"):
            record["lineage"] = lineage
        if self.routing:
            record["routing"] = dict(self.routing)
        return NewCheckpoint(
            verb="export",
            sources=(("source", checkpoint),),
            tensors=self.tensors if recipe.dtype is None else cast_all(self.tensors, CODES[recipe.dtype]),
            config=self.config,
            recipe=recipe,
            seed=None,
            card=model_card(
                title=out.rstrip("/").rpartition("/")[2],
                bases=[checkpoint.name],
                tags=["export", self.family],
                command=["moesaic", "export", recipe.checkpoint, out, *_words(recipe)],
                facts={"Family": self.family, "Because": self.why, "Layout": recipe.layout},
            ),
            record=record,
            texts=code_files(self.config),
            shard_size=parse_size(recipe.shard_size),
            allow_nonfinite=recipe.allow_nonfinite,
        )


def _words(recipe: ExportRecipe) -> list[str]:
    """The options that repeat an export."""
    more = ["--layout", recipe.layout] if recipe.specialist is None else ["--specialist", recipe.specialist]
    return ["--to", recipe.to, *more]


def plan_export(recipe: ExportRecipe) -> ExportPlan:
    """Open the checkpoint and decide everything; `recipe.to` is not `gguf`.

    Raises:
        MoesaicError: the model is not exactly the family (every rule that fails is named), or has no such layout.
    """
    parse_size(recipe.shard_size)
    checkpoint = open_checkpoint(recipe.checkpoint)
    model_type = str(checkpoint.config.get("model_type"))
    native = native_type(model_type)
    known = dict.fromkeys((*DESTINATIONS, *MOE_FAMILIES))
    if recipe.to not in (*known, native):
        raise MoesaicError(f"--to {recipe.to}: not one of {', '.join(known)}")
    routing = (read_provenance(checkpoint.path) or {}).get("routing")
    if recipe.specialist is not None:
        return _extracted(recipe, checkpoint, recipe.specialist)
    if model_type in MOE_FAMILIES and recipe.to in ("auto", model_type):
        return _relaid(recipe, checkpoint, "it is that family already", routing)
    if native != model_type and recipe.to in ("auto", native):
        return _back(recipe, checkpoint, native, routing)
    if base_of(model_type) is not None and recipe.to == "moesaic":
        return _relaid(recipe, checkpoint, "it is our architecture already", routing)
    return _converted(recipe, checkpoint, routing)


def _relaid(recipe: ExportRecipe, checkpoint: Checkpoint, why: str, routing: Mapping[str, Any] | None) -> ExportPlan:
    model = detect_moe(checkpoint)
    layout = recipe.layout if recipe.layout != "input" else input_layout(model, list(checkpoint.tensors))
    return ExportPlan(
        recipe=recipe,
        checkpoint=checkpoint,
        family=str(checkpoint.config["model_type"]),
        why=why,
        tensors=relaid_tensors(checkpoint, model, layout),
        config=_with_dtype(checkpoint.config, recipe.dtype),
        num_experts=model.num_experts,
        layers=len(model.layers),
        notices=(
            *(() if routing is None else _recorded(checkpoint, routing)),
            *prediction_notices(checkpoint, "it is written in this layout as well"),
        ),
        routing=routing,
    )


def _back(recipe: ExportRecipe, checkpoint: Checkpoint, native: str, routing: Mapping[str, Any] | None) -> ExportPlan:
    if recipe.layout not in ("input", "family"):
        raise MoesaicError(f"--layout {recipe.layout}: export to {native} first, and that in this layout")
    if routing is not None:
        raise MoesaicError(
            f"{checkpoint.name}: moesaic.json records a routing rule of training, which {native} does not follow"
        )
    model = detect_moe(checkpoint)
    tensors, config = back_to_family(checkpoint, model)
    return ExportPlan(
        recipe=recipe,
        checkpoint=checkpoint,
        family=native,
        why=f"{config[model.family.top_k_key]} experts are active, all copies of those that were chosen",
        tensors=tensors,
        config=_with_dtype(config, recipe.dtype),
        num_experts=model.num_experts,
        layers=len(model.layers),
    )


def _extracted(recipe: ExportRecipe, checkpoint: Checkpoint, specialist: str) -> ExportPlan:
    found = specialist_of(checkpoint, specialist)
    return ExportPlan(
        recipe=recipe,
        checkpoint=checkpoint,
        family=found.base,
        why=found.why,
        tensors=found.tensors,
        config=_with_dtype(found.config, recipe.dtype),
        num_experts=0,
        layers=0,
        notices=found.notices,
    )


def _converted(recipe: ExportRecipe, checkpoint: Checkpoint, routing: Mapping[str, Any] | None) -> ExportPlan:
    view, notices = view_of(checkpoint), ()
    facts = facts_of(view) | recorded_routing(routing)
    if recipe.to == "moesaic":
        family, why = str(view.config["model_type"]), "our architecture on the dense model that its layers are made of"
        if facts["routing"] != config_routing(view.config):
            raise refusal(checkpoint.name, facts, {"moesaic": {"routing": config_routing(view.config)}})
        tensors, config = our_tensors(view), view.config
        if recipe.layout == "per-expert":
            raise MoesaicError("--layout per-expert: our architecture stores stacked experts only; use family")
    else:
        if recipe.to not in ("auto", *TARGETS):
            raise MoesaicError(
                f"--to {recipe.to}: only checkpoints of that family are written as it; {checkpoint.name} is none"
            )
        failures = failures_of(facts) if recipe.to == "auto" else failures_of(facts, [recipe.to])
        family = next((name for name, failed in failures.items() if not failed), None)
        if family is None:
            raise refusal(checkpoint.name, facts, failures)
        why, layout = TARGETS[family].why, "family" if recipe.layout == "input" else recipe.layout
        tensors = native_tensors(view, family, layout, CODES[recipe.dtype] if recipe.dtype else None)
        config = native_config(family, view.config)
        notices = _folded(view, family)
    return ExportPlan(
        recipe=recipe,
        checkpoint=checkpoint,
        family=family,
        why=why,
        tensors=tensors,
        config=_with_dtype(config, recipe.dtype),
        num_experts=int(view.config["num_experts"]),
        layers=len(view.layers),
        notices=(*notices, *_ties(recipe, view, family)),
    )


def facts_for(checkpoint: Checkpoint) -> dict[str, str]:
    """The facts that the rules look at, with the rule that training recorded."""
    return facts_of(view_of(checkpoint)) | recorded_routing((read_provenance(checkpoint.path) or {}).get("routing"))


def _with_dtype(config: Mapping[str, Any], dtype: str | None) -> dict[str, Any]:
    """The config with the dtype of the weights that are written."""
    if dtype is None:
        return dict(config)
    return {key: value for key, value in config.items() if key != "torch_dtype"} | {"dtype": dtype}


_AT_INFERENCE = {"topk": PLAIN_TOP_K, "document_pool": PLAIN_TOP_K, "one_per_group": ONE_PER_GROUP}
"""What a rule that training recorded computes outside of training: it goes before the config; pools are gone."""


def recorded_routing(routing: Mapping[str, Any] | None) -> dict[str, str]:
    """The fact "routing" by the entry of moesaic.json; empty where the model's own rule, that of the config, holds."""
    if routing is None:
        return {}
    if routing.get("selection_bias") is not None:
        return {"routing": "top-k with the selection bias that moesaic.json records"}
    rule = load_recipe(RuleConfig, routing["rule"]).rule
    return {} if rule is None else {"routing": _AT_INFERENCE[rule]}


def _recorded(checkpoint: Checkpoint, routing: Mapping[str, Any]) -> tuple[str, ...]:
    own = config_routing(checkpoint.config)
    what = recorded_routing(routing).get("routing", own)
    given = {key: routing["rule"].get(key) for key in ("expert_groups", "group_score")}
    if what == own and all(value in (None, checkpoint.config.get(key)) for key, value in given.items()):
        return ()
    return (
        f"{checkpoint.name}: {what}: the rule is in moesaic.json, where only moesaic reads it; other engines would "
        f"route by config.json ({own})",
    )


def _folded(view: View, family: str) -> tuple[str, ...]:
    """A native family has no factor on its routing weights: it is in the experts then."""
    factor = scaling_factor(view)
    if factor == 1.0:
        return ()
    return (
        f"{view.checkpoint.name}: {family} has no factor on routing weights, so the factor {factor:g} is on down_proj "
        f"(rounded once): an expert puts out {factor:g} times as much before its weight, which may leave float16 "
        "where the source does not; run it in bfloat16 or float32, or export --to moesaic for float16",
    )


def _ties(recipe: ExportRecipe, view: View, family: str) -> tuple[str, ...]:
    """Native families compute router logits in the weights' dtype; equal rows may then differ in the last bit."""
    if our_base(family) is not None or view.checkpoint.download_bytes:
        return ()
    code = CODES.get(str(recipe.dtype)) or view.layers[0].router.dtype
    tied = [layer for layer in view.layers if _has_equal_rows(layer.router)]
    if not tied or code in ("F32", "F64"):
        return ()
    return (
        f"{view.checkpoint.name}: routers of {len(tied)} layers have equal rows, and {family} computes router "
        f"logits in the model's dtype ({code}), where other logits can tie with them: a group of equal rows is then "
        "split for a few tokens in a thousand; export with --dtype float32, or run it so, for exact claims",
    )


def _has_equal_rows(router: Lazy) -> bool:
    values_ED = router.read().float()
    return len(torch.unique(values_ED, dim=0)) < len(values_ED)
