"""How a router decides, found out by asking it: random logits in float64, compared with reference routers.

Letters: T tokens, D hidden, E experts, K active, G groups. Needs torch.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from moesaic.families.family import Decision

TOKENS = 64

_SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits_TE: logits_TE.softmax(dim=-1),
    "sigmoid": torch.sigmoid,
}

_INVERSES: dict[str, Callable[[Tensor], Tensor]] = {
    "logits": lambda values_TE: values_TE,
    "softmax": torch.log,
    "sigmoid": torch.logit,
}
"""What a router returns first -> logits that give the same scores."""

_GROUP_RANKS: dict[str, Callable[[Tensor], Tensor]] = {
    "best": lambda scores_TGM: scores_TGM.amax(dim=-1),
    "two best": lambda scores_TGM: scores_TGM.topk(2, dim=-1).values.sum(dim=-1),
}
"""What a group counts in group-limited selection (DeepSeek-V2, DeepSeek-V3)."""

_WEIGHTINGS = ("selected", "all", "one after the other")

_NEARLY = 0.02
"""Relative distance from the best logit within which Phi-3.5-MoE shares an expert's weight (twice its jitter, 0.01)."""

_TOLERANCE = 1e-5
"""Relative: routers compute in fp32 whatever the model's dtype. Different rules differ by tenths."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Asked:
    """A router with random weights, and what it was given beside hidden states."""

    router: nn.Module
    biases: dict[str, Tensor]
    """Tensors with one number per expert, by name: of the router, or of the block around it."""
    arguments: tuple[Tensor, ...]
    """Those of them that the block hands to the router."""

    def __call__(self, hidden_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits (or scores) TE, weights TK and ids TK in float64; experts in rising order."""
        hidden_TD = hidden_TD.to(next(self.router.parameters()).dtype)
        try:
            values_TE, weights_TK, ids_TK = self.router(hidden_TD, *self.arguments)[:3]
        except ValueError:  # of unpacking the shape: it flattens the sequences itself
            values_TE, weights_TK, ids_TK = self.router(hidden_TD[None], *self.arguments)[:3]
        ids_TK, order_TK = ids_TK.reshape(len(hidden_TD), -1).sort(dim=-1)
        weights_TK = weights_TK.reshape(len(hidden_TD), -1).gather(1, order_TK)
        return values_TE.reshape(len(hidden_TD), -1).double(), weights_TK.double(), ids_TK

    def in_dtype(self, dtype: torch.dtype, hidden: int) -> tuple[Tensor, ...]:
        """What the router returns for one token, all in one dtype."""
        before = next(self.router.parameters()).dtype
        self.router.to(dtype)
        try:
            token_TD = torch.ones(1, hidden, dtype=dtype)
            arguments = [one.to(dtype) for one in self.arguments]
            try:
                return self.router(token_TD, *arguments)
            except ValueError:
                return self.router(token_TD[None], *arguments)
        finally:
            self.router.to(before)


def ask(block: nn.Module, router: nn.Module, num_experts: int) -> Asked:
    """Draw everything random in a router and its biases, and find what the block hands to it.

    Raises:
        LookupError: the router needs something that is no number per expert (the tokens' ids, a state).
    """
    stream = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in [*router.parameters(), *router.buffers(), *_own(block).values()]:
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=stream, dtype=torch.float64) * 0.3)
    named = {**dict(router.named_parameters()), **dict(router.named_buffers()), **_own(block)}
    biases = {name: tensor for name, tensor in named.items() if tensor.numel() == num_experts}
    arguments = []
    for parameter in list(inspect.signature(type(router).forward).parameters.values())[2:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.name not in biases:
            raise LookupError(f"its router is given {parameter.name} beside hidden states")
        arguments.append(biases[parameter.name])
    return Asked(router=router, biases=biases, arguments=tuple(arguments))


def _own(block: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of a module itself."""
    return {
        name: tensor for name, tensor in (*block._parameters.items(), *block._buffers.items()) if tensor is not None
    }


@torch.no_grad()
def decision_of(asked: Asked, *, hidden: int, groups: int, chosen: int) -> Decision | None:
    """The rule whose choice is the router's for every token, and whose weights are, up to one factor; None: none is.

    Args:
        asked: the router, in float64.
        hidden: D.
        groups: G of the config; 1 for a family without.
        chosen: groups that a token may use.
    """
    stream = torch.Generator().manual_seed(1)
    values_TE, weights_TK, ids_TK = asked(torch.randn(TOKENS, hidden, generator=stream, dtype=torch.float64))
    for rule in _rules(values_TE, asked.biases, groups):
        ids, weights = _reference(rule, values_TE, asked.biases, ids_TK.shape[1], groups, chosen)
        if torch.equal(ids, ids_TK) and _is_multiple(weights, weights_TK):
            return replace(rule, scaled=not _is_one(weights_TK.sum() / weights.sum()))
    return None


def _rules(values_TE: Tensor, biases: dict[str, Tensor], groups: int) -> Iterator[Decision]:
    between = bool((values_TE >= 0).all() and (values_TE <= 1).all())
    sums = between and torch.allclose(values_TE.sum(-1), torch.ones(len(values_TE), dtype=values_TE.dtype), atol=1e-4)
    returns: Any = "softmax" if sums else "sigmoid" if between else "logits"
    ranks = ["none", *(_GROUP_RANKS if groups > 1 else ())]
    places = ["none", *(("scores", "logits", "weights") if biases else ())]
    scorings = _SCORES if returns == "logits" else [returns]
    for scoring, weighting, bias_on, rank in product(scorings, _WEIGHTINGS, places, ranks):
        values: dict[str, Any] = {"scoring": scoring, "weighting": weighting, "bias_on": bias_on, "group_rank": rank}
        yield Decision(**values, returns=returns, bias=next(iter(biases), ""))


def _reference(
    rule: Decision, values_TE: Tensor, biases: dict[str, Tensor], top_k: int, groups: int, chosen: int
) -> tuple[Tensor, Tensor]:
    """Ids and weights by one rule, experts in rising order."""
    logits_TE = _INVERSES[rule.returns](values_TE)
    scores_TE = _SCORES[rule.scoring](logits_TE)
    bias_E = next(iter(biases.values())).double().reshape(-1) if biases else torch.zeros(1)
    choices = {"scores": scores_TE + bias_E, "logits": logits_TE + bias_E}
    choice_TE = choices.get(rule.bias_on, scores_TE)
    if rule.group_rank != "none":
        choice_TGM = choice_TE.unflatten(-1, (groups, -1))
        best_TG = _GROUP_RANKS[rule.group_rank](choice_TGM).topk(chosen, dim=-1).indices
        out_TG = torch.ones(len(choice_TE), groups, dtype=torch.bool).scatter(1, best_TG, False)
        choice_TE = choice_TGM.masked_fill(out_TG[..., None], float("-inf")).flatten(1)
    ids_TK = choice_TE.topk(top_k, dim=-1).indices.sort(dim=-1).values
    weights_TK = scores_TE.gather(1, ids_TK)
    if rule.weighting == "one after the other":
        return _one_after_the_other(logits_TE, top_k)
    if rule.weighting == "selected":
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
    return ids_TK, weights_TK * bias_E[ids_TK] if rule.bias_on == "weights" else weights_TK


def _one_after_the_other(logits_TE: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    left_TE, chosen = logits_TE.clone(), []
    for _ in range(top_k):
        best_T1, id_T1 = left_TE.max(dim=-1, keepdim=True)
        far_TE = (best_T1 - logits_TE) / logits_TE.abs().maximum(best_T1) > _NEARLY
        chosen.append((id_T1, left_TE.masked_fill(far_TE, float("-inf")).softmax(dim=-1).gather(1, id_T1)))
        left_TE = left_TE.scatter(1, id_T1, float("-inf"))
    ids_TK, order_TK = torch.cat([one for one, _ in chosen], dim=1).sort(dim=-1)
    return ids_TK, torch.cat([weight for _, weight in chosen], dim=1).gather(1, order_TK)


def _is_one(factor: Tensor) -> bool:
    return abs(float(factor) - 1) < 1e-4


def _is_multiple(expected_TK: Tensor, found_TK: Tensor) -> bool:
    factor = found_TK.sum() / expected_TK.sum()
    return torch.allclose(found_TK, expected_TK * factor, rtol=_TOLERANCE, atol=0.0)
