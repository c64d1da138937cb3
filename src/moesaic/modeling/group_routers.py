"""Whether a family's router can be asked about groups of experts, as `MoesaicGroupRouter` does: found out by asking.

Letters: T tokens, D hidden, E experts, K active. Needs torch and transformers.
"""

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from moesaic.common.errors import MoesaicError
from moesaic.families.decide import TOKENS, Asked
from moesaic.families.derive import TinyRouter, flags_of, tiny_router
from moesaic.modeling.modeling_moesaic import group_members, group_router


def check_router(config: Mapping[str, Any], name: str) -> None:
    """Refuse a family whose router chooses otherwise when copies of its experts are groups.

    Some experts of a tiny router with random weights are copied, and both are given the same hidden states.

    Raises:
        MoesaicError: the choice or the weights are others, or such a router cannot be run.
    """
    tiny = tiny_router(str(config["model_type"]), flags_of(config))
    stream = torch.Generator().manual_seed(2)
    hidden_TD = torch.randn(TOKENS, tiny.hidden, generator=stream, dtype=torch.float64)
    sources = [expert for expert in range(tiny.experts) for _ in range(1 + expert % 3)]
    with torch.no_grad():
        alone_TE = _weights(tiny.asked, hidden_TD, list(range(tiny.experts)))
        try:
            grouped_TE = _weights(_with_copies(tiny, sources), hidden_TD, sources)
        except (RuntimeError, IndexError):  # of shapes: it does something else first with hidden states
            grouped_TE = torch.zeros_like(alone_TE)
    if not torch.allclose(grouped_TE, alone_TE, rtol=1e-6, atol=0.0):
        raise MoesaicError(
            f"--routing one_per_copy_group: {name}: the router of {config['model_type']} does more than multiply "
            "hidden states with a matrix and choose by the result, so it cannot choose between groups; use --routing "
            "plain"
        )


def _weights(asked: Asked, hidden_TD: Tensor, sources: list[int]) -> Tensor:
    """The weight of each source, 0 where it is not chosen."""
    _, weights_TK, ids_TK = asked(hidden_TD)
    weights_TE = weights_TK.new_zeros(len(hidden_TD), max(sources) + 1)
    return weights_TE.scatter_add(1, torch.tensor(sources)[ids_TK], weights_TK)


def _with_copies(tiny: TinyRouter, sources: list[int]) -> Asked:
    """The router that chooses between groups, each a copy or several of one expert."""
    router: Any = copy.deepcopy(tiny.asked.router)

    def grown(tensor: Tensor) -> Tensor:
        axis = next((axis for axis, size in enumerate(tensor.shape) if size == tiny.experts), None)
        return tensor if axis is None else tensor.index_select(axis, torch.tensor(sources))

    for module in router.modules():
        for name, parameter in module._parameters.items():
            module._parameters[name] = (
                None if parameter is None else nn.Parameter(grown(parameter), requires_grad=False)
            )
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else grown(buffer)
    router.__class__ = group_router(type(router))
    router.members, router.group_score = group_members(sources), "log_mean_exp"
    return replace(tiny.asked, router=router, arguments=tuple(map(grown, tiny.asked.arguments)))
