"""Which modules are routers, and how each family turns scores into weights: the only place that knows their classes.

A router returns `(logits_TE, weights_TK, ids_TK)` in transformers and in our architecture. The table has one row per
router class; a class that is not in it is left alone, because a wrong guess (sigmoid scores, group-limited selection)
would change the model silently. `tests/unit/routing/test_install.py` compares each row with the family's own forward.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn

from moesaic.common.errors import MoesaicError
from moesaic.routing.config import GroupScore

Weighting = Literal["selected", "all", "sigmoid"]


@dataclass(frozen=True, kw_only=True)
class RouterSettings:
    """What a router does by itself."""

    num_experts: int
    top_k: int
    weighting: Weighting
    """Softmax over the selected experts, over all without renormalisation, or sigmoids over the sum of the selected."""
    cast_weights: bool
    """Whether weights come in the hidden states' dtype, or stay in fp32."""
    groups: tuple[int, ...] | None = None
    """Group of each expert where the model's own rule is `one_per_group`."""
    group_score: GroupScore = "max"


def _selected(router: Any) -> RouterSettings:
    return RouterSettings(num_experts=router.num_experts, top_k=router.top_k, weighting="selected", cast_weights=True)


def _selected_fp32(router: Any) -> RouterSettings:
    return replace(_selected(router), cast_weights=False)


def _by_flag(router: Any) -> RouterSettings:
    return replace(_selected(router), weighting="selected" if router.norm_topk_prob else "all")


def _moesaic(router: Any) -> RouterSettings:
    members: list[list[int]] = router.members or []
    group_of = {expert: group for group, experts in enumerate(members) for expert in experts if expert >= 0}
    return replace(
        _selected(router),
        weighting=router.weighting,
        groups=tuple(group_of[expert] for expert in range(router.num_experts)) if members else None,
        group_score=router.group_score,
    )


_ROUTERS: dict[str, Callable[[Any], RouterSettings]] = {
    "MoesaicRouter": _moesaic,
    "OlmoeTopKRouter": _by_flag,
    "FlexOlmoTopKRouter": _by_flag,
    "Qwen2MoeTopKRouter": _by_flag,
    "Qwen3MoeTopKRouter": _by_flag,
    "Qwen3NextTopKRouter": _by_flag,
    "MixtralTopKRouter": _selected_fp32,
    "GraniteMoeTopKRouter": _selected,
    "GraniteMoeSharedTopKRouter": _selected,
}


def find_routers(model: nn.Module) -> list[tuple[nn.Module, RouterSettings]]:
    """Return the routers of a model in the order of its layers, with what each does by itself.

    Looks at the classes a module derives from, because FSDP replaces a module's class with a subclass of it.
    """
    found = []
    for module in model.modules():
        names = (base.__name__ for base in type(module).__mro__)
        read = next((_ROUTERS[name] for name in names if name in _ROUTERS), None)
        if read is not None:
            found.append((module, read(module)))
    if not found:
        raise MoesaicError(
            f"{type(model).__name__} has no router that training rules work on; they work on our own architecture, "
            "OLMoE, FlexOlmo, Qwen2-MoE, Qwen3-MoE, Qwen3-Next, Mixtral and Granite-MoE"
        )
    return found
