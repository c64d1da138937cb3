"""From a recipe to an `ExpandPlan`: opens the headers and refuses everything that cannot work. No torch."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from moesaic.checkpoint.record import read_provenance
from moesaic.checkpoint.source import Checkpoint, open_checkpoint
from moesaic.checkpoint.writer import parse_size
from moesaic.common import seeds
from moesaic.common.errors import MoesaicError
from moesaic.expansion.allocation import allocate, evenly, sources_of
from moesaic.expansion.recipe import ExpandRecipe
from moesaic.families.family import base_of, our_base
from moesaic.families.identity import group_count
from moesaic.families.moe import REORDERED, MoEModel, detect_moe, prediction_notices

Utilities = Mapping[int, tuple[float, ...]]
"""Layer -> utility of each expert."""


@dataclass(frozen=True, kw_only=True)
class ExpandPlan:
    """An expansion whose every choice is made, but for the copies that utilities decide."""

    recipe: ExpandRecipe
    """Nothing left to defaults."""
    checkpoint: Checkpoint
    model: MoEModel
    top_k: int
    groups: int
    """Groups of the family's group-limited selection, before; 1 without."""
    whole_groups: bool
    """The groups are duplicated as a whole, and their number grows (E1 with group-limited selection)."""
    recorded: Mapping[str, Any] | None
    """The routing rule and the selection bias that training recorded in the checkpoint's moesaic.json."""
    notices: tuple[str, ...]

    @property
    def experts(self) -> int:
        """E of the result."""
        return self.recipe.experts

    @property
    def added(self) -> int:
        """Copies per layer."""
        return self.recipe.experts - self.model.num_experts

    @property
    def exclusive(self) -> bool:
        """A token uses at most one of the copies of an expert: by the routing asked for."""
        return self.recipe.routing == "one_per_copy_group"

    @property
    def gets_our_routers(self) -> bool:
        """The family cannot say that copies are one group: the result is `moesaic_<family>`."""
        return self.exclusive and base_of(self.checkpoint.config.get("model_type")) is None

    @property
    def grouped(self) -> bool:
        """The checkpoint is ours and routes to one expert per group already: copies join their source's group."""
        return self.checkpoint.config.get("routing_rule") == "one_per_group"

    @property
    def recorded_bias(self) -> list[list[float]] | None:
        """The selection bias of loss-free balancing per MoE layer, which no file of weights holds."""
        return None if self.recorded is None else self.recorded["selection_bias"]

    @property
    def bias_takes_noise(self) -> bool:
        """The noise of `delta` goes on selection biases, and not on router rows: not within groups of copies, where the
        copies with the smaller biases would never win."""
        biased = self.model.family.selection_bias or self.own_bias or self.recorded_bias is not None
        return not self.exclusive and biased

    @property
    def own_bias(self) -> bool:
        """The checkpoint is ours and its routers have a selection bias, which is added to probabilities."""
        return our_base(self.checkpoint.config.get("model_type")) is not None and bool(
            self.checkpoint.config.get("selection_bias")
        )

    @property
    def multiple(self) -> int | None:
        """m, where every expert gets m - 1 copies by `uniform`; None for uneven copies."""
        times, rest = divmod(self.experts, self.model.num_experts)
        return times if not rest and self.recipe.utility == "uniform" else None

    @property
    def multiplied(self) -> bool:
        """K' = m * K for an m-fold duplication: what E1 of docs/statements.md needs."""
        return self.multiple is not None and self.top_k == self.multiple * self.model.top_k

    @property
    def normalised(self) -> bool:
        """The weights of the selected experts sum to a constant."""
        return self.model.family.normalises(self.checkpoint.config)

    @property
    def divides_scaling(self) -> bool:
        """m times as many sigmoid weights that are not normalised need a scaling factor of 1/m."""
        family = self.model.family
        unbounded = family.scoring == "sigmoid" and not self.normalised and family.scaling_key is not None
        return unbounded and self.multiplied

    def copies(self, utilities: Utilities) -> dict[int, list[int]]:
        """Added copies of each expert, per MoE layer; a layer that has no utilities gets them evenly.

        Raises:
            MoesaicError: utilities that are all zero in some layer.
        """
        return {layer.layer: self._copies(layer.layer, utilities.get(layer.layer)) for layer in self.model.layers}

    def sources(self, copies: list[int]) -> list[int]:
        """The source of every expert of a layer of the result, in the order that they have there."""
        if self.whole_groups:
            assert self.multiple is not None
            return list(range(self.model.num_experts)) * self.multiple
        return sources_of(copies, groups=self.groups)

    def _copies(self, layer: int, utilities: tuple[float, ...] | None) -> list[int]:
        groups = 1 if self.whole_groups else self.groups
        if utilities is None:
            return evenly(self.model.num_experts, self.added, groups)
        if not any(utilities):
            raise MoesaicError(
                f"{self.checkpoint.name}: the utilities of all experts of layer {layer} are 0 "
                f"({self.recipe.utility or self.recipe.utility_from}); use other calibration text, or --utility uniform"
            )
        rng = random.Random(seeds.key(self.recipe.seed, "expand", layer, "allocation"))
        recipe = self.recipe
        return allocate(
            utilities,
            self.added,
            cap=recipe.cap,
            rule=recipe.allocation,
            rng=rng,
            groups=groups,
            temperature=recipe.temperature,
        )


def _opened(recipe: ExpandRecipe) -> Checkpoint:
    """The checkpoint; a quantised one as it is stored where experts are only copied and nothing asks for numbers."""
    copied = recipe.expert_op == "copy" and recipe.routing == "plain" and _utility(recipe) != "weight_norm"
    return open_checkpoint(recipe.checkpoint, as_stored=copied)


def resolve(recipe: ExpandRecipe, opener: Callable[[ExpandRecipe], Checkpoint] = _opened) -> ExpandPlan:
    """Open the checkpoint's headers, fill in every default and check that everything fits together.

    Raises:
        MoesaicError: anything that the expansion could stumble over, except the values of weights and gradients.
    """
    parse_size(recipe.shard_size)
    checkpoint = opener(recipe)
    model = detect_moe(checkpoint)
    count = model.num_experts
    if recipe.experts <= count:
        raise MoesaicError(
            f"--experts {recipe.experts}: {checkpoint.name} has {count} experts already; give a larger number "
            "(`moesaic extract` makes a smaller model)"
        )
    top_k = model.top_k if recipe.top_k is None else recipe.top_k
    filled = replace(recipe, checkpoint=_pinned(recipe.checkpoint, checkpoint), utility=_utility(recipe), top_k=top_k)
    plan = ExpandPlan(
        recipe=filled,
        checkpoint=checkpoint,
        model=model,
        top_k=top_k,
        groups=group_count(checkpoint.config, model),
        whole_groups=False,
        recorded=(read_provenance(checkpoint.path) or {}).get("routing"),
        notices=(),
    )
    plan = replace(plan, whole_groups=plan.groups > 1 and plan.multiplied)
    _check_exclusive(plan)
    _check_allocation(plan)
    _check_top_k(plan)
    _check_router_op(plan)
    _check_expert_op(plan)
    check_recorded_rule(plan)
    return replace(plan, notices=tuple(_notices(plan)))


def _utility(recipe: ExpandRecipe) -> Any:
    if recipe.utility is not None or recipe.utility_from is not None:
        return recipe.utility
    return "gradient_norm" if recipe.calibration else "uniform"


def _check_allocation(plan: ExpandPlan) -> None:
    """Whether the number of copies is possible does not depend on the utilities."""
    groups = 1 if plan.whole_groups else plan.groups
    ones = [1.0] * plan.model.num_experts
    allocate(ones, plan.added, cap=plan.recipe.cap, rule="greedy", rng=random.Random(0), groups=groups)


def _check_exclusive(plan: ExpandPlan) -> None:
    if not plan.exclusive:
        return
    name = plan.checkpoint.name
    if plan.grouped:
        raise MoesaicError(
            f"--routing one_per_copy_group: {name} routes to one expert per group already; with --routing plain the "
            "copies join the group of their source"
        )
    if plan.gets_our_routers:
        from moesaic.modeling.group_routers import check_router

        check_router(plan.checkpoint.config, name)


def _check_top_k(plan: ExpandPlan) -> None:
    config, model = plan.checkpoint.config, plan.model
    limit, what = plan.experts, f"there are {plan.experts} experts"
    if plan.exclusive:
        limit, what = model.num_experts, f"one_per_copy_group uses at most one copy of each of {model.num_experts}"
    elif plan.grouped:
        groups = config["expert_groups"]
        limit = min(len(set(ids)) for ids in (groups if isinstance(groups[0], list) else [groups]))
        what = f"the model uses at most one expert of each of its {limit} groups"
    elif plan.groups > 1:
        assert model.family.group_keys is not None
        chosen = int(config[model.family.group_keys[1]])
        times = plan.multiple if plan.whole_groups else 1
        assert times is not None
        limit = chosen * times * (plan.experts // (plan.groups * times))
        what = f"a token uses experts of {chosen * times} groups only, which have {limit}"
    if plan.top_k > limit:
        raise MoesaicError(f"--top-k {plan.top_k}: {what}; give at most {limit}")


def check_recorded_rule(plan: ExpandPlan) -> None:
    """Refuse what a routing rule that training recorded would contradict.

    Raises: `MoesaicError`.
    """
    if plan.recorded is None:
        return
    rule, name = plan.recorded["rule"], plan.checkpoint.name
    if rule["expert_groups"] is not None:
        raise MoesaicError(
            f"{name}: was trained with routing.expert_groups, which one list for all layers holds, so the groups of "
            "copies cannot be said; put the groups into its config.json"
        )
    if plan.exclusive and rule["rule"] is not None:
        raise MoesaicError(
            f"--routing one_per_copy_group: {name} was trained with routing.rule {rule['rule']}, which would go on; "
            "use --routing plain"
        )


def _check_router_op(plan: ExpandPlan) -> None:
    if plan.recipe.router_op == "bias_only" and not plan.bias_takes_noise:
        raise MoesaicError(
            f"--router-op bias_only: {plan.checkpoint.name} has no selection bias; use copy, which puts the noise of "
            "--delta on router rows"
        )


def _check_expert_op(plan: ExpandPlan) -> None:
    """Duplicates that are computed need the three matrices of an expert, in an order that is known."""
    roles = {tensor.role for layer in plan.model.layers for tensor in layer.expert_tensors}
    known = plan.model.family.gated and not any(role.endswith(REORDERED) for role in roles)
    if plan.recipe.expert_op != "copy" and not known:
        raise MoesaicError(
            f"--expert-op {plan.recipe.expert_op}: experts of {plan.model.family.model_type} are not stored as gate, "
            "up and down matrices; use copy"
        )


_PASS_OPTIONS = ("utility_batches", "batch_size", "sequence_length")
"""Settings of the pass over calibration text."""


def _notices(plan: ExpandPlan) -> list[str]:
    notices = [*plan.checkpoint.dequantised]
    if plan.recipe.utility == "uniform" and plan.recipe.allocation != "greedy":
        notices.append(f"--allocation {plan.recipe.allocation} has no effect: uniform utilities go round robin")
    defaults = {field.name: field.default for field in fields(ExpandRecipe)}
    unused = [name for name in _PASS_OPTIONS if getattr(plan.recipe, name) != defaults[name]]
    if unused and plan.recipe.utility in ("uniform", "weight_norm", None):
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in unused)
        notices.append(f"{flags}: without effect, no text is read; --calibration gives utilities from gradients")
    if plan.recipe.temperature != defaults["temperature"] and plan.recipe.allocation != "sample":
        notices.append(f"--temperature: without effect, allocation {plan.recipe.allocation} is not drawn by a softmax")
    if plan.recipe.utility_layers != defaults["utility_layers"] and plan.recipe.utility in ("uniform", None):
        notices.append("--utility-layers: without effect, no utility is computed here")
    evenly = "" if plan.recipe.utility in ("uniform", "weight_norm") else ", by even copies, as it has no gradients"
    notices += prediction_notices(plan.checkpoint, f"its experts grow as well{evenly}")
    if plan.gets_our_routers:
        native = plan.checkpoint.config["model_type"]
        notices.append(
            f"{native} cannot say one_per_copy_group: the result is moesaic_{native}, whose code comes with it"
        )
    return notices


def _pinned(reference: str, checkpoint: Checkpoint) -> str:
    if checkpoint.revision is None:
        return reference
    return f"{reference.split('@')[0]}@{checkpoint.revision}"
