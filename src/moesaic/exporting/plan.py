"""From a recipe to everything that is written: the target family, why, and the new tensors. Headers only."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from moesaic.checkpoint.pieces import NewTensor
from moesaic.checkpoint.record import model_card, original_experts, read_provenance
from moesaic.checkpoint.rewrite import Rewrite
from moesaic.checkpoint.source import Checkpoint, open_checkpoint
from moesaic.checkpoint.writer import parse_size
from moesaic.common.errors import MoesaicError
from moesaic.common.recipe import load_recipe
from moesaic.exporting.assemble import choose, input_layout, native_tensors, our_tensors, refusal, relaid_tensors
from moesaic.exporting.dtypes import CODES, cast_all
from moesaic.exporting.natives import native_config
from moesaic.exporting.parts import layer_parts
from moesaic.exporting.recipe import TARGETS, ExportRecipe
from moesaic.exporting.rows import Rows, read
from moesaic.exporting.rules import ONE_PER_GROUP, PLAIN_TOP_K, config_routing, facts_of
from moesaic.exporting.view import OURS, View, view_of
from moesaic.families.moe import MoEModel, detect_moe
from moesaic.families.moe_table import MOE_FAMILIES
from moesaic.routing.config import RuleConfig

_FAMILIES = (*MOE_FAMILIES,)


@dataclass(frozen=True, kw_only=True)
class ExportPlan:
    """One export, resolved: `rewrite` writes it."""

    recipe: ExportRecipe
    checkpoint: Checkpoint
    family: str
    """Model type of the result."""
    why: str
    """Why this family, in words."""
    tensors: tuple[NewTensor, ...]
    config: Mapping[str, Any]
    routers: tuple[Rows, ...]
    num_experts: int
    layers: int
    notices: tuple[str, ...]
    routing: Mapping[str, Any] | None
    """The rule that training recorded, where the family stays."""

    def rewrite(self, out: str) -> Rewrite:
        """What `checkpoint.rewrite` needs."""
        tensors, work = list(self.tensors), []
        if self.recipe.dtype is not None:
            tensors, work = cast_all(tensors, CODES[self.recipe.dtype])
        command = ["moesaic", "export", self.recipe.checkpoint, out, "--to", self.recipe.to]
        card = model_card(
            title=out.rstrip("/").rpartition("/")[2],
            bases=[self.checkpoint.name],
            tags=["export", self.family],
            command=[*command, "--layout", self.recipe.layout],
            facts={"Family": self.family, "Because": self.why, "Layout": self.recipe.layout},
        )
        experts = {"original": original_experts(self.checkpoint, self.num_experts, self.layers)}
        lineage = (read_provenance(self.checkpoint.path) or {}).get("lineage")
        return Rewrite(
            verb="export",
            sources=(("source", self.checkpoint),),
            tensors=tuple(tensors),
            work=tuple(work),
            config=self.config,
            recipe=self.recipe,
            seed=None,
            card=card,
            record={
                "family": self.family,
                "why": self.why,
                "experts": experts,
                **({"lineage": lineage} if lineage else {}),
                **({"routing": dict(self.routing)} if self.routing else {}),
            },
            shard_size=parse_size(self.recipe.shard_size),
            allow_nonfinite=self.recipe.allow_nonfinite,
        )


def plan_export(recipe: ExportRecipe) -> ExportPlan:
    """Open the checkpoint and decide everything; `recipe.to` is not `gguf`.

    Raises:
        MoesaicError: the model is not exactly the family (every rule that fails is named), or has no such layout.
    """
    parse_size(recipe.shard_size)
    if recipe.to not in (*TARGETS, *_FAMILIES):
        raise MoesaicError(f"--to {recipe.to}: not one of {', '.join(dict.fromkeys((*TARGETS, *_FAMILIES)))}")
    checkpoint = open_checkpoint(recipe.checkpoint)
    model_type = str(checkpoint.config.get("model_type"))
    routing = (read_provenance(checkpoint.path) or {}).get("routing")
    if model_type in MOE_FAMILIES and recipe.to in ("auto", model_type):
        return _relaid(recipe, checkpoint, "it is that family already", routing)
    if model_type.startswith(OURS) and recipe.to == "moesaic":
        return _relaid(recipe, checkpoint, "it is our architecture already", routing)
    plan = _converted(recipe, checkpoint, routing)
    return replace(plan, notices=(*plan.notices, *_ties(plan)))


def _relaid(recipe: ExportRecipe, checkpoint: Checkpoint, why: str, routing: Mapping[str, Any] | None) -> ExportPlan:
    model = detect_moe(checkpoint)
    layout = recipe.layout
    if layout == "input":
        layout = input_layout(model, list(checkpoint.tensors))
    notices = () if routing is None else (_recorded(checkpoint, routing),)
    return ExportPlan(
        recipe=recipe,
        checkpoint=checkpoint,
        family=str(checkpoint.config["model_type"]),
        why=why,
        tensors=tuple(relaid_tensors(checkpoint, model, layout)),
        config=with_dtype(checkpoint.config, recipe.dtype),
        routers=tuple(_routers(checkpoint, model)),
        num_experts=model.num_experts,
        layers=len(model.layers),
        notices=tuple(notice for notice in notices if notice),
        routing=routing,
    )


def _converted(recipe: ExportRecipe, checkpoint: Checkpoint, routing: Mapping[str, Any] | None) -> ExportPlan:
    view = view_of(checkpoint)
    facts = facts_of(view) | recorded_routing(routing)
    notices: list[str] = []
    if recipe.to == "moesaic":
        family, why = str(view.config["model_type"]), "our architecture on the dense model that its layers are made of"
        if facts["routing"] != config_routing(view.config):
            raise refusal(checkpoint.name, facts, {"moesaic": {"routing": config_routing(view.config)}})
        tensors, config = our_tensors(view), view.config
        if recipe.layout == "per-expert":
            raise MoesaicError("--layout per-expert: our architecture stores stacked experts only; use family")
    else:
        choice = choose(facts) if recipe.to == "auto" else choose(facts, [recipe.to])
        if choice.row is None:
            raise refusal(checkpoint.name, facts, choice.failures)
        family, why = choice.row.model_type, choice.row.why
        layout = "family" if recipe.layout == "input" else recipe.layout
        written = CODES[recipe.dtype] if recipe.dtype else None
        tensors, config = native_tensors(view, choice.row, layout, written), native_config(choice.row, view.config)
    return ExportPlan(
        recipe=recipe,
        checkpoint=checkpoint,
        family=family,
        why=why,
        tensors=tuple(tensors),
        config=with_dtype(config, recipe.dtype),
        routers=tuple(layer.router for layer in view.layers),
        num_experts=int(view.config["num_experts"]),
        layers=len(view.layers),
        notices=tuple(notices),
        routing=None,
    )


def facts_for(checkpoint: Checkpoint) -> dict[str, str]:
    """The facts that the rules look at, with the rule that training recorded."""
    view: View = view_of(checkpoint)
    return facts_of(view) | recorded_routing((read_provenance(checkpoint.path) or {}).get("routing"))


def with_dtype(config: Mapping[str, Any], dtype: str | None) -> dict[str, Any]:
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


def _recorded(checkpoint: Checkpoint, routing: Mapping[str, Any]) -> str:
    own = config_routing(checkpoint.config)
    what = recorded_routing(routing).get("routing", own)
    given = {key: routing["rule"].get(key) for key in ("expert_groups", "group_score")}
    same = all(value in (None, checkpoint.config.get(key)) for key, value in given.items())
    if what == own and same:
        return ""
    return (
        f"{checkpoint.name}: {what}: the rule is in moesaic.json, where only moesaic reads it; other engines would "
        f"route by config.json ({own})"
    )


def _routers(checkpoint: Checkpoint, model: MoEModel) -> list[Rows]:
    return [layer_parts(checkpoint.tensors, layer).router for layer in model.layers if not model.family.interleaved]


def _ties(plan: ExportPlan) -> list[str]:
    """Native families compute router logits in the weights' dtype; equal rows may then differ in the last bit."""
    if plan.family.startswith(OURS) or plan.checkpoint.download_bytes:
        return []
    code = CODES.get(str(plan.recipe.dtype)) or plan.routers[0].dtype
    tied = [number for number, rows in enumerate(plan.routers) if _has_equal_rows(rows)]
    if not tied or code in ("F32", "F64"):
        return []
    return [
        f"{plan.checkpoint.name}: routers of {len(tied)} layers have equal rows, and {plan.family} computes router "
        f"logits in the model's dtype ({code}), where other logits can tie with them: a group of equal rows is then "
        "split for a few tokens in a thousand; export with --dtype float32, or run it so, for exact claims"
    ]


def _has_equal_rows(rows: Rows) -> bool:
    values_ED = read(rows).float()
    return len(torch.unique(values_ED, dim=0)) < len(values_ED)
