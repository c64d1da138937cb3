"""Put a rule on the routers of a model, and tell them which documents their tokens belong to.

The rows of `families.moe_table` say which classes are routers, and how each turns scores into weights. A router's
`forward` is replaced on the instance, so nothing enters the state dict, hooks (FSDP, output capturing) still run around
it, a deep copy of the model has routers of its own, and `uninstall` leaves no trace.
"""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moesaic.common.errors import MoesaicError
from moesaic.common.recipe import load_recipe
from moesaic.families.family import Decision, MoEFamily
from moesaic.families.moe_table import MOE_FAMILIES, routed
from moesaic.routing.added import AddedGradients
from moesaic.routing.capture import decision_of
from moesaic.routing.config import RULES_WORK_ON, RuleConfig
from moesaic.routing.own_bias import OUR_ROUTER, ROW, bias_tensors, give_own_biases, misfit, own_bias
from moesaic.routing.pools import RoutingContext
from moesaic.routing.restrict import num_experts
from moesaic.routing.rules import OwnChoice, RouterSettings, RoutingDecision, build_rule, decide

_ATTRIBUTE = "_moesaic_router"


class RoutingRecord:
    """The decisions of one forward pass, in the order of the MoE layers."""

    def __init__(self, context: RoutingContext, *, pools: bool | None, added: AddedGradients | None) -> None:
        self.context = context
        self.pools = pools
        self.added = added
        self._by_layer: dict[int, RoutingDecision] = {}

    @property
    def decisions(self) -> list[RoutingDecision]:
        """One decision per MoE layer."""
        return [self._by_layer[layer] for layer in sorted(self._by_layer)]

    def recorded(self, layer: int) -> RoutingDecision | None:
        """Return the layer's decision if this is the second run of activation checkpointing, None in the first."""
        decision = self._by_layer.get(layer)
        if decision is not None and torch._C._current_graph_task_id() == -1:
            raise RuntimeError("one routing_context holds one forward pass: open a new one for the next micro-batch")
        return decision

    def add(self, layer: int, decision: RoutingDecision) -> None:
        """Record the layer's decision."""
        self._by_layer[layer] = decision


class Installation:
    """A rule on all routers of one model. `selection_bias` (layers, experts) is the state of loss-free balancing; where
    it is None, the routers' own biases hold, if they have some."""

    def __init__(self, config: RuleConfig, *, selection_bias: Tensor | None) -> None:
        self.config = config
        self.selection_bias = selection_bias
        self.record: RoutingRecord | None = None
        self.routers: list[nn.Module] = []

    def to_record(self) -> dict[str, Any]:
        """Return what `reinstall` needs, as JSON: the rule and the selection bias, which no checkpoint file holds."""
        bias = None if self.selection_bias is None else self.selection_bias.tolist()
        return {"rule": asdict(self.config), "selection_bias": bias}

    def uninstall(self) -> None:
        """Give every router its own forward back."""
        for router in self.routers:
            del router.__dict__["forward"], router.__dict__[_ATTRIBUTE]
        self.routers = []


class InstalledRouter:
    """One router whose `forward` follows a rule: logits -> allowed experts -> selected experts -> weights."""

    def __init__(self, router: nn.Module, settings: RouterSettings, installation: Installation, layer: int) -> None:
        self.router = router
        self.settings = settings
        self.installation = installation
        self.layer = layer
        self.rule = build_rule(installation.config, settings)

    @property
    def watched(self) -> bool:
        """Whether a `routing_context` is open; our models ask, before they say that nothing balances them."""
        return self.installation.record is not None

    @torch.compiler.disable  # recording is a side effect per layer: traced, every layer would be compiled again
    def forward(self, hidden_states: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        """Return logits_TE, weights_TK and expert_ids_TK, as the routers of transformers do."""
        if self.settings.own is not None:
            return self._around(self.settings.own.decision, hidden_states, *given)
        hidden_TD = hidden_states.reshape(-1, hidden_states.shape[-1])
        # bf16 logits tie and reorder experts that fp32 tells apart, so autocast must not reach this product.
        with torch.autocast(hidden_TD.device.type, enabled=False):
            dtype = torch.promote_types(hidden_TD.dtype, torch.float32)
            weight_ED: Tensor = self.router.weight  # pyright: ignore[reportAssignmentType]
            decision = self._decide(F.linear(hidden_TD.to(dtype), weight_ED.to(dtype)), own_bias(self.router))
        weights_TK = self._tapped(decision.weights_TK, decision)
        if self.settings.cast_weights:
            weights_TK = weights_TK.to(hidden_states.dtype)
        return decision.logits_TE, weights_TK, decision.expert_ids_TK

    def _around(self, rule: Decision, hidden_states: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        """The family's own forward, in the dtype of its weights, and from its logits what the rule decides."""
        dtype = next((one.dtype for one in self.router.parameters()), hidden_states.dtype)
        with torch.autocast(hidden_states.device.type, enabled=False):
            output = type(self.router).forward(self.router, hidden_states.to(dtype), *given)
            logits_TE, weights_TK, ids_TK = decision_of(output, rule.returns)
            logits_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
            number_E = _number(self.router, rule, hidden_states, *given)
            bias_E = None if rule.bias_on == "weights" else number_E
            decision = self._decide(logits_TE, bias_E, itself=(weights_TK, ids_TK))
            first, weights, ids, *more = output
            if decision.expert_ids_TK is ids_TK:
                return first, self._tapped(weights, decision), ids, *more
            weights_TK = decision.weights_TK
            if rule.bias_on == "weights":
                assert number_E is not None
                weights_TK = weights_TK * number_E[decision.expert_ids_TK]
        weights = self._tapped(weights_TK, decision).to(weights.dtype).reshape(weights.shape)
        return first, weights, decision.expert_ids_TK.reshape(ids.shape), *more

    def _tapped(self, weights: Tensor, decision: RoutingDecision) -> Tensor:
        """The same weights; what `AddedGradients` has for this layer's logits joins where backward passes them."""
        record = self.installation.record
        if record is None or record.added is None:
            return weights
        return record.added.tap(self.layer, weights, decision.logits_TE)

    def _decide(
        self, logits_TE: Tensor, bias_E: Tensor | None, itself: tuple[Tensor, Tensor] | None = None
    ) -> RoutingDecision:
        """Decide with the documents of the open `routing_context`, and record it there, if one is open.

        `bias_E` is the router's own, and `itself` what it chose with it.
        """
        training, record, bias_LE = self.router.training, self.installation.record, self.installation.selection_bias
        if bias_LE is not None:
            bias_E, itself = bias_LE[self.layer], None
        bias_E = None if bias_E is None else bias_E.to(logits_TE)
        if record is None:
            if training and self.rule.needs_documents:
                raise RuntimeError("the document pool needs `with routing_context(...)` around forward and backward")
            return decide(self.rule, logits_TE, bias_E=bias_E, itself=itself)
        earlier = record.recorded(self.layer)
        in_graph = earlier is None or earlier.logits_TE.requires_grad or record.added is not None
        if logits_TE.requires_grad and not in_graph:
            raise RuntimeError(
                "activation checkpointing must be non-reentrant (use_reentrant=False): losses had no graph"
            )
        pools = training if record.pools is None else record.pools
        decision = decide(
            self.rule,
            logits_TE,
            bias_E=bias_E,
            context=record.context if pools else None,
            layer=self.layer,
            allowed_TE=None if earlier is None else earlier.allowed_TE,
            itself=itself,
        )
        if earlier is None:
            record.add(self.layer, decision)
        return decision


def install(model: nn.Module, config: RuleConfig, *, selection_bias: Tensor | bool | None = None) -> Installation:
    """Put `config`'s rule on every router of `model`, in place of any rule installed before.

    `topk` and `one_per_group` hold in training and evaluation. `document_pool` holds while the model is in training
    mode, inside `routing_context`; in evaluation mode routing is plain top-k. Logits are fp32 with autocast off, also
    in families whose own routers compute them in bf16; routers that are more than a softmax of plain logits run as they
    are. `selection_bias` switches loss-free balancing on: True starts at the family's own biases, or at zero; a tensor
    (layers, experts) continues. Raises `MoesaicError` for a model without routers that rules work on and for settings
    that do not fit it.
    """
    routers = find_routers(model)
    if selection_bias is not None and selection_bias is not False:
        _refuse_bias_of_groups(routers)
    if isinstance(selection_bias, bool):
        selection_bias = _first_bias(model, routers) if selection_bias else None
    elif selection_bias is not None and selection_bias.shape != (len(routers), routers[0][1].num_experts):
        raise misfit(selection_bias, len(routers), routers[0][1].num_experts)
    installation = Installation(config, selection_bias=selection_bias)
    installed = [
        InstalledRouter(router, settings, installation, layer) for layer, (router, settings) in enumerate(routers)
    ]
    earlier = find_installation(model)
    if earlier is not None:
        earlier.uninstall()
    for state in installed:
        setattr(state.router, _ATTRIBUTE, state)
        state.router.forward = state.forward  # pyright: ignore[reportAttributeAccessIssue]
        installation.routers.append(state.router)
    return installation


def _refuse_bias_of_groups(routers: list[tuple[nn.Module, RouterSettings]]) -> None:
    if any(settings.own is not None and settings.groups is not None for _, settings in routers):
        raise MoesaicError(
            "losses.bias_balancing: this family's routers choose between groups of experts, and follow no bias of "
            "ours; use losses.balance"
        )


def _first_bias(model: nn.Module, routers: list[tuple[nn.Module, RouterSettings]]) -> Tensor:
    """What loss-free balancing starts from: the family's own biases, or zeros."""
    own = [tensor.detach() for _, tensor in bias_tensors(model).values()]
    if own:
        return torch.stack([getattr(one, "full_tensor", one.clone)().reshape(-1).float() for one in own])
    device = next(model.parameters()).device
    return torch.zeros(len(routers), routers[0][1].num_experts, dtype=torch.float32, device=device)


def reinstall(model: nn.Module, record: Mapping[str, Any]) -> Installation:
    """Install what `Installation.to_record` described (the `routing` entry of `moesaic.json`).

    Routers that can hold a bias themselves get it, so that it is saved with the model: files of earlier versions have
    it in the record alone.
    """
    bias = record["selection_bias"]
    tensor = None if bias is None else torch.tensor(bias, dtype=torch.float32)
    if tensor is not None:
        tensor = None if give_own_biases(model, tensor) else tensor.to(next(model.parameters()).device)
    return install(model, load_recipe(RuleConfig, record["rule"]), selection_bias=tensor)


def find_installation(model: nn.Module) -> Installation | None:
    """Return what is installed on the routers of a model, wrapped or not."""
    states = (module.__dict__.get(_ATTRIBUTE) for module in model.modules())
    state = next((state for state in states if state is not None), None)
    return None if state is None else state.installation


@contextmanager
def routing_context(
    model: nn.Module | Installation,
    context: RoutingContext,
    *,
    pools: bool | None = None,
    added: AddedGradients | None = None,
) -> Iterator[RoutingRecord]:
    """Let the routers know the documents of one micro-batch, and collect their decisions.

    Wrap forward, losses and backward: activation checkpointing (non-reentrant) runs the routers again in backward, with
    the pools of the first run and without recording twice. `pools` says whether `document_pool` constrains the tokens;
    None means in training mode only. `added` brings the gradients of losses that are in no graph, and then
    checkpointing may be reentrant.
    """
    installation = model if isinstance(model, Installation) else find_installation(model)
    if installation is None:
        raise RuntimeError("no rule is installed on this model: call install first")
    if installation.record is not None:
        raise RuntimeError("a routing_context is already open on this model")
    installation.record = RoutingRecord(context, pools=pools, added=added)
    try:
        yield installation.record
    finally:
        installation.record = None


# --- which modules are routers ----------------------------------------------------------------------------------------


_FAMILY_OF = {name: row for row in MOE_FAMILIES.values() for name in row.routers}
"""Class of a router -> the family whose routers it is of."""


def _settings(router: Any, name: str) -> RouterSettings:
    """What a router of this class does by itself."""
    if ROW in router.__dict__:
        own = _read_off(router, *router.__dict__[ROW])
    else:
        own = RouterSettings(
            num_experts=router.num_experts, top_k=router.top_k, weighting="selected", cast_weights=True
        )
        if name == OUR_ROUTER:
            own = replace(own, weighting=router.weighting, routed_scaling_factor=router.routed_scaling_factor)
        else:
            own = replace(own, **_as_written(router, _FAMILY_OF[name]))
    members: list[list[int]] | None = getattr(router, "members", None)
    if not members:
        return own
    group_of = {expert: group for group, experts in enumerate(members) for expert in experts if expert >= 0}
    groups = tuple(group_of[expert] for expert in range(own.num_experts))
    return replace(own, groups=groups, group_score=router.group_score)


def _as_written(router: Any, row: MoEFamily) -> dict[str, Any]:
    # The key of the config that decides about the weights is an attribute of the router.
    normalises = row.normalises({row.weighting: getattr(router, row.weighting, None)})
    return {"weighting": "selected" if normalises else "all", "cast_weights": not row.router_weights_in_fp32}


def _read_off(router: Any, row: MoEFamily, config: Mapping[str, Any]) -> RouterSettings:
    """The same of a family that was looked at; `config` says the numbers that a router need not have."""
    settings = RouterSettings(
        num_experts=getattr(router, "num_experts", None) or num_experts(router),
        top_k=getattr(router, "top_k", None) or int(config[row.top_k_key]),
        **_as_written(router, row),
    )
    if row.decision is None:
        return settings
    own = OwnChoice(decision=row.decision)
    if row.group_keys is not None:
        groups, chosen = (int(config.get(key) or 1) for key in row.group_keys)
        own = replace(own, groups=groups, chosen=chosen)
    factor = float(config[row.scaling_key]) if row.decision.scaled and row.scaling_key is not None else 1.0
    return replace(settings, weighting=own.weighting, routed_scaling_factor=factor, own=own)


def _number(router: nn.Module, rule: Decision, *given: Any) -> Tensor | None:
    """The number per expert (`Decision.bias`) of a router, its own or among what its block gives it: (experts,)."""
    if rule.bias_on == "none":
        return None
    if hasattr(router, rule.bias.partition(".")[0]):
        return attrgetter(rule.bias)(router).reshape(-1)
    family = getattr(router, "family", type(router))  # our router of groups hands on what the family's own is given
    names = list(inspect.signature(family.forward).parameters)[1:]
    return given[names.index(rule.bias)].reshape(-1)


def find_routers(model: nn.Module) -> list[tuple[nn.Module, RouterSettings]]:
    """Return the routers of a model in the order of its layers, with what each does by itself.

    A class that no row of `families.moe_table` names is left alone: a wrong guess (sigmoid scores, group-limited
    selection) would change the model silently. `tests/unit/routing/test_install.py` compares each with the family's own
    forward. Looks at the classes a module derives from, because FSDP replaces a module's class with a subclass of it.
    """
    found, seen = [], _row_of(model)
    for module in model.modules():
        names = [base.__name__ for base in type(module).__mro__]
        if seen is not None and any(name in seen[0].routers for name in names):
            module.__dict__[ROW] = seen
        known = ROW in module.__dict__
        name = next((name for name in names if known or name == OUR_ROUTER or name in _FAMILY_OF), None)
        if name is not None:
            found.append((module, _settings(module, name)))
    if not found:
        raise MoesaicError(
            f"{type(model).__name__} has no router that training rules work on; take a model of {RULES_WORK_ON}"
        )
    return found


def _row_of(model: nn.Module) -> tuple[MoEFamily, Mapping[str, Any]] | None:
    """The row read off the class of a model, where it has one that rules work on, and what the model's config says."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        return None
    text = config.get_text_config()
    values = {**text.to_dict(), **{alias: getattr(text, alias, None) for alias in text.attribute_map}}
    row = routed(values)
    return (row, values) if row is not None and row.derived else None
