"""Let a loaded model use some of its experts only: `restrict`; and the training rules of routers that are cut.

A restricted router is the model's own router code run on its kept rows, with the ids mapped back: exactly what the
router of the extracted checkpoint computes, whatever its kind (softmax or sigmoid, groups, biases). Nothing is copied
for good, and weights that change in the meantime are seen.
"""

import copy
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import MethodType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from moesaic.checkpoint.record import read_provenance
from moesaic.common.errors import MoesaicError
from moesaic.common.recipe import load_recipe
from moesaic.families.shrink import TOP_K_KEYS
from moesaic.modeling.modeling_moesaic import group_members
from moesaic.routing.capture import MoEBlock, find_blocks
from moesaic.routing.config import RuleConfig
from moesaic.routing.subset import Selection, check_counts, cut_rule

INSTALLED = "_moesaic_router"
"""The attribute of a router on which `moesaic.routing.install` put a rule."""

_ATTRIBUTE = "_moesaic_restriction"
_UNRESTRICTED = "_moesaic_unrestricted"
_OWN = ("forward", _ATTRIBUTE, _UNRESTRICTED, INSTALLED)

_State = tuple[Sequence[Sequence[int]], int]
"""Kept ids per MoE layer, and the number of active experts."""


class Restriction:
    """A selection in force on a model; as a context manager, what held before is put back at the end of the block."""

    def __init__(self, model: nn.Module, before: _State | None) -> None:
        self._model = model
        self._before = before

    def __enter__(self) -> "Restriction":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()

    def undo(self) -> None:
        """Put back what held before: another selection, or all experts."""
        _set(find_blocks(self._model), self._before)


def restrict(model: nn.Module, selection: Selection | None, *, top_k: int | None = None) -> Restriction:
    """Let a loaded model use the selected experts only, without writing anything; the weights stay as they are.

    Calling it again switches to another selection; None allows all experts again. The model computes what the
    checkpoint of `extract` computes; layers may keep different numbers of experts.

    Args:
        model: a model of transformers or our own, not sharded.
        selection: the experts to keep, of this model (its layers and number of experts are checked).
        top_k: lower the number of active experts to this. Default: what the selection was made for, else the model's.

    Returns:
        A `Restriction`: `with restrict(model, selection): ...` ends it, and so does `undo()`.

    Raises:
        MoesaicError: the selection has other layers or experts than the model, or keeps less than the router needs.
    """
    blocks = find_blocks(model)
    before = getattr(blocks[0].router, _ATTRIBUTE, (None, None))[0]
    if selection is None:
        _set(blocks, None)
        return Restriction(model, before)
    _check(model, blocks, selection)
    config: Any = model.config
    top_k = selection.top_k if top_k is None else top_k
    values = config.get_text_config().to_dict()
    active = check_counts(selection.source, values, selection.kept, top_k=top_k, where="selection")
    _set(blocks, (selection.kept, active))
    return Restriction(model, before)


def _check(model: nn.Module, blocks: Sequence[MoEBlock], selection: Selection) -> None:
    counts = [block.num_experts for block in blocks]
    expected = [selection.source.num_experts] * len(selection.layers)
    if counts != expected:
        raise MoesaicError(
            f"selection: was made for {selection.source.name} with {expected[0]} experts in {len(expected)} MoE "
            f"layers, but {type(model).__name__} has {counts[0]} in {len(counts)}; select again on this model"
        )


def _set(blocks: Sequence[MoEBlock], state: _State | None) -> None:
    for layer, block in enumerate(blocks):
        own = block.router.__dict__
        if _ATTRIBUTE in own:
            del own[_ATTRIBUTE], own["forward"]
            if (before := own.pop(_UNRESTRICTED)) is not None:
                own["forward"] = before
        if state is not None:
            own[_UNRESTRICTED] = own.get("forward")  # there where a training rule is installed
            own[_ATTRIBUTE] = (state, layer)
            own["forward"] = MethodType(_restricted_forward, block.router)


def _restricted_forward(router: Any, hidden_states: Tensor, *given: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    (kept, top_k), layer = getattr(router, _ATTRIBUTE)
    return forward_cut(router, hidden_states, *given, kept=kept[layer], top_k=top_k)


def forward_cut(
    router: Any, hidden_states: Tensor, *given: Tensor, kept: Sequence[int], top_k: int
) -> tuple[Tensor, Tensor, Tensor]:
    """A router's own forward with the rows of the kept experts: logits (-inf for the others), weights and ids.

    `given` is what its block gives it beside hidden states: a number per expert, which is cut too.
    """
    kept_C = torch.tensor(kept, device=hidden_states.device)
    total = num_experts(router)
    cut = _cut_router(router, kept_C, top_k, total)
    given = tuple(_kept_slots(tensor, kept_C, total) for tensor in given)
    if INSTALLED in router.__dict__:
        install_cut(router, cut, kept)
        logits_TC, weights_TK, places_TK = cut.forward(hidden_states, *given)
    else:
        logits_TC, weights_TK, places_TK = type(router).forward(cut, hidden_states, *given)
    logits_TE = logits_TC.new_full((logits_TC.shape[0], total), float("-inf"))
    return logits_TE.index_copy(1, kept_C, logits_TC), weights_TK, kept_C[places_TK]


def num_experts(router: Any) -> int:
    """E: the rows of the largest matrix of a router."""
    return max((tensor for tensor in router.parameters() if tensor.ndim == 2), key=torch.Tensor.numel).shape[0]


def _kept_slots(tensor: Tensor, kept_C: Tensor, num_experts: int) -> Tensor:
    """The slots of the kept experts of a tensor that has one each; any other as it is (hidden sizes are larger)."""
    axis = next((axis for axis, length in enumerate(tensor.shape) if length == num_experts), None)
    return tensor if axis is None else tensor.index_select(axis, kept_C)


def _cut_module(module: Any, kept_C: Tensor, num_experts: int) -> Any:
    """A module like this one whose parameters and buffers have only the kept slots; shares nothing that it changes."""
    cut = copy.copy(module)
    cut.__dict__ = {name: value for name, value in module.__dict__.items() if name not in _OWN}
    stored = {**module._parameters, **module._buffers}
    cut._parameters, cut._buffers = {}, {}
    for name, tensor in stored.items():
        cut.__dict__[name] = None if tensor is None else _kept_slots(tensor, kept_C, num_experts)
    cut._modules = {name: one and _cut_module(one, kept_C, num_experts) for name, one in module._modules.items()}
    return cut


def _cut_router(router: Any, kept_C: Tensor, top_k: int, num_experts: int) -> Any:
    """A router like this one for the kept experts, `top_k` of them active."""
    cut = _cut_module(router, kept_C, num_experts)
    cut.num_experts, cut.top_k = len(kept_C), top_k
    if getattr(router, "config", None) is not None:  # some ask it at every call
        cut.config = copy.copy(router.config)
        for key in TOP_K_KEYS:
            if hasattr(cut.config, key):
                setattr(cut.config, key, top_k)
    if getattr(router, "members", None):
        # Our one_per_group: the groups that are left, with the members that are left.
        group_of = {expert: group for group, members in enumerate(router.members) for expert in members}
        cut.members = group_members([group_of[expert] for expert in kept_C.tolist()])
        cut._members_on = {}
    return cut


# --- training rules (a selection bias, one_per_group, pools) on models that are cut ----------------------------------


def install_recorded(model: nn.Module, folder: Path) -> None:
    """Install the rule of a checkpoint folder's moesaic.json, if there is one, on a model without weights."""
    record = (read_provenance(folder) or {}).get("routing")
    if record is not None:
        from moesaic.routing.install import install

        bias = record["selection_bias"]
        tensor = None if bias is None else torch.tensor(bias, dtype=torch.float32)
        install(model, load_recipe(RuleConfig, record["rule"]), selection_bias=tensor)


def install_cut(router: Any, cut: nn.Module, kept: Sequence[int]) -> None:
    """Put the rule of `router` on `cut`, a router with the rows of some of its experts."""
    from moesaic.routing.install import install

    state = router.__dict__[INSTALLED]
    bias_LE = state.installation.selection_bias
    bias_1C = None if bias_LE is None else bias_LE[state.layer : state.layer + 1, list(kept)]
    rule = cut_rule(asdict(state.installation.config), [kept])
    install(nn.ModuleList([cut]), load_recipe(RuleConfig, rule), selection_bias=bias_1C)
