"""Which layer of a model gives NaN or infinity first: what every verb that runs a model asks before it reports numbers.

While all is well this costs one look at the logits of a call. Only where they are not finite the call is repeated, with
a look at what every module gives.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moesaic.common.numbers import NotFiniteError

_LAYER = re.compile(r"(?:^|\.)layers\.(?P<layer>\d+)(?:\.(?P<module>.+))?$")
_MASKED = ("gate", "router")
"""Modules that give -inf on purpose, for experts that are not allowed."""


@dataclass(frozen=True, kw_only=True)
class NotFinite:
    """The first module, in the order in which they end, that gives a value that is not finite."""

    place: str
    """Layer and module, such as `layer 3, mlp.experts`."""
    what: str
    """NaN or infinity."""
    damaged: tuple[str, ...]
    """Weights of the module itself that are not finite."""
    reach: float | None
    """Largest absolute value that the module was given; None where that is not finite or no number."""
    dtype: str

    def __str__(self) -> str:
        """One sentence, and the way out."""
        if self.damaged:
            return (
                f"{self.place} gives {self.what}, and its own {', '.join(self.damaged)} is not finite: the weights are "
                "damaged; make or fetch the checkpoint again"
            )
        given = "" if self.reach is None else f" for values up to {self.reach:.4g}"
        return f"{self.place} gives {self.what} in {self.dtype}{given}; --dtype float32 has more range"


@dataclass(kw_only=True)
class Seen:
    """What a watched model gave so far."""

    not_finite: NotFinite | None = None


@contextmanager
def watched(model: nn.Module, *, refuse: str | None = None) -> Iterator[Seen]:
    """Look at the logits of every call of a causal language model; the first that are not finite are traced back.

    Args:
        model: is called with `input_ids`, by name or first.
        refuse: what the model is called; with it the call itself fails.

    Raises:
        NotFiniteError: with `refuse`, from within the call.
    """
    seen = Seen()

    def look(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        if seen.not_finite is not None or is_finite(output.logits):
            return
        seen.not_finite = NotFinite(place="", what="", damaged=(), reach=None, dtype="")  # the repeat is not watched
        again = _without_cache(arguments, keywords)
        seen.not_finite = first_not_finite(model, lambda: module(**again)) or _only_now(output.logits)
        if refuse is not None:
            raise NotFiniteError(f"{refuse}: {seen.not_finite}")

    handle = model.register_forward_hook(look, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


def is_finite(values: Tensor, *, masked: bool = False) -> bool:
    """Whether all values are finite (`masked`: or -inf), in one pass over them and one answer from the device."""
    if not values.is_floating_point() or not values.numel():
        return True
    low, high = values.detach().aminmax()  # a NaN anywhere makes both one
    return bool(high < torch.inf) and (masked or bool(low > -torch.inf))


@torch.no_grad()
def first_not_finite(model: nn.Module, call: Callable[[], object], *, within: str = "") -> NotFinite | None:
    """Make a call of a model, and find the first module that gives a value that is not finite; None where none does.

    Args:
        model: whose modules are looked at.
        call: runs it.
        within: what names of modules begin with, where `model` is a part of one.
    """
    found: list[NotFinite] = []

    def look(name: str) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        masked = name.rpartition(".")[2] in _MASKED

        def hook(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
            bad = [values for values in _tensors(output) if not is_finite(values, masked=masked)]
            if bad and not found:
                found.append(_describe(name, module, arguments, bad[0]))

        return hook

    with ExitStack() as stack:
        for name, module in model.named_modules(prefix=within):
            stack.callback(module.register_forward_hook(look(name)).remove)
        call()
    return found[0] if found else None


def _describe(name: str, module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> NotFinite:
    match = _LAYER.search(name)
    parts = [] if match is None else [f"layer {match['layer']}", match["module"] or ""]
    given = [one.abs().max().item() for one in _tensors(arguments) if one.is_floating_point() and is_finite(one)]
    return NotFinite(
        place=", ".join(filter(None, parts)) or name or "the model",
        what="NaN" if output.isnan().any() else "infinity",
        damaged=tuple(own for own, weights in module.named_parameters(recurse=False) if not is_finite(weights)),
        reach=max(given) if given else None,
        dtype=str(output.dtype).removeprefix("torch."),
    )


def _only_now(logits: Tensor) -> NotFinite:
    """The repeated call was finite: what the cache held made the difference."""
    dtype = str(logits.dtype).removeprefix("torch.")
    return NotFinite(
        place="the model, with what it had cached,", what="NaN or infinity", damaged=(), reach=None, dtype=dtype
    )


def _without_cache(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, Any]:
    """The same call without a cache; of a call that goes on with one, its new tokens alone."""
    ids = arguments[0] if arguments else keywords["input_ids"]
    cache = keywords.get("past_key_values")
    kept: tuple[str, ...] = ("attention_mask", "position_ids")
    if cache is not None and cache.get_seq_length() > ids.shape[-1]:
        kept = ()
    return {"input_ids": ids, "use_cache": False, **{key: keywords[key] for key in kept if key in keywords}}


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _tensors(one)
    elif isinstance(value, dict):  # also a ModelOutput
        yield from _tensors(list(value.values()))
