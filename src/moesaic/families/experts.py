"""Whole experts as values. D hidden, I intermediate of one expert, E experts, M shards.

An expert is tensors in memory, or expressions of stored ones (`checkpoint.lazy`); the same equations hold for both.
Operations take whole experts, never one matrix alone, so gate, up and down cannot be cut or permuted differently.
Importing this imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from moesaic.checkpoint import lazy
from moesaic.checkpoint.lazy import Lazy
from moesaic.checkpoint.streaming import torch_dtype
from moesaic.common import seeds

if TYPE_CHECKING:
    import torch
    from torch import Tensor

T = TypeVar("T", "Tensor", Lazy)


@dataclass(frozen=True, kw_only=True)
class ExpertWeights(Generic[T]):
    """The matrices of one gated FFN `down(act(gate x + b) * (up x + b)) + b`, or of E of them stacked in front.

    Shapes: gate and up (I, D), down (D, I), biases (I), (I) and (D), or the same with E in front.
    """

    gate_ID: T
    up_ID: T
    down_DI: T
    gate_bias_I: T | None = None
    up_bias_I: T | None = None
    down_bias_D: T | None = None

    @property
    def intermediate(self) -> int:
        """I, the number of intermediate neurons."""
        return self.gate_ID.shape[-2]

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the down matrix, which stands for all."""
        down = self.down_DI
        return torch_dtype(down.dtype) if isinstance(down, Lazy) else down.dtype

    def parts(self) -> dict[str, T]:
        """The tensors that it has, by field name."""
        present = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in present.items() if value is not None}

    def map(self, function: Callable[[str, Any], Any]) -> Self:
        """The expert with `function(field name, tensor)` in place of each tensor that it has."""
        return replace(self, **{name: function(name, value) for name, value in self.parts().items()})

    def shard(self, number: int, shards: int) -> Self:
        """Shard `number` of `shards` equal contiguous ones: the same neurons of gate, up and down.

        The shards' outputs add up to the whole FFN's, so each takes its part `1 / shards` of the output bias.
        """
        width, rest = divmod(self.intermediate, shards)
        assert rest == 0, (self.intermediate, shards)
        assert 0 <= number < shards, (number, shards)

        def part(name: str, value: Any) -> Any:
            if name == "down_bias_D":
                return _in_float32(value) / shards  # a third of it rounds in bf16
            return value.narrow(-2 if name in ("gate_ID", "up_ID") else -1, number * width, width)

        return self.map(part)

    def scale(self, *, gate_up: float, down: float) -> Self:
        """Each linear map, its bias included, times a factor: `gate_up` for gate and up, `down` for down.

        `gate_up=1` scales the output exactly; any other value does not, because SiLU and GELU are not homogeneous.
        """
        factors = {"down_DI": down, "down_bias_D": down}

        def scaled(name: str, value: Any) -> Any:
            factor = factors.get(name, gate_up)
            return value if factor == 1.0 else value * factor

        return self.map(scaled)

    def made(
        self, function: Callable[[], ExpertWeights[Tensor]], reads: Sequence[ExpertWeights[T]] = ()
    ) -> ExpertWeights[T]:
        """The expert of these shapes that `function` computes, from this one's numbers or without them.

        For tensors it is computed now; for expressions when it is written: one expert at a time is in memory. `reads`
        are the other experts that the function reads: what is read is checked and recorded.
        """
        if not isinstance(self.gate_ID, Lazy):
            return function()  # pyright: ignore[reportReturnType]  # T is Tensor
        own: dict[str, Any] = self.parts()
        outputs = {name: (value.shape, value.dtype) for name, value in own.items()}
        read: list[Any] = [part for one in (self, *reads) for part in one.parts().values()]
        made: Any = lazy.together(outputs, lambda: function().parts(), read)
        return replace(self, **made)

    def read(self) -> ExpertWeights[Tensor]:
        """The numbers in memory of their own, which may be changed in place."""
        made: Any = self.map(lambda _, value: value.read() if isinstance(value, Lazy) else value.clone())
        return made

    @classmethod
    def stack(cls, experts: Sequence[Self]) -> Self:
        """E experts of one shape as one value with a leading dimension E."""
        assert experts
        return experts[0].map(lambda name, _: _stack([getattr(expert, name) for expert in experts]))

    @classmethod
    def concatenate(cls, experts: Sequence[Self]) -> Self:
        """One FFN as wide as all of `experts` together, whose output is the sum of theirs."""
        assert experts

        def join(name: str, _: Any) -> Any:
            parts = [getattr(expert, name) for expert in experts]
            return _sum(parts) if name == "down_bias_D" else _concat(parts, -1 if name == "down_DI" else 0)

        return experts[0].map(join)


def widened(expert: ExpertWeights[Lazy], dtype: str) -> ExpertWeights[Lazy]:
    """Each tensor in the narrowest dtype (safetensors codes) that holds its numbers and those of `dtype`."""
    return expert.map(lambda _, value: value.cast(lazy.promoted(value.dtype, dtype)))


def redraw(weights: Tensor, chosen: Tensor, axis: int, generator: torch.Generator) -> None:
    """Draw the `chosen` rows (axis 0) or columns (axis 1) of `weights` anew, in place, from their own N(mean, std)."""
    block = weights.index_select(axis, chosen)
    wide = block.float() if block.element_size() < 4 else block
    mean, std = wide.mean().item(), wide.std(correction=0).item()
    del wide
    weights.index_copy_(axis, chosen, seeds.normal(block.shape, std, generator, mean=mean, dtype=block.dtype))


def _in_float32(value: Any) -> Any:
    """The numbers in float32, or in float64 where they are."""
    if isinstance(value, Lazy):
        return value.cast(lazy.promoted(value.dtype, "F32"))
    import torch

    return value.to(torch.promote_types(value.dtype, torch.float32))


def _stack(parts: list[Any]) -> Any:
    if isinstance(parts[0], Lazy):
        return lazy.stack(parts)
    import torch

    return torch.stack(parts)


def _concat(parts: list[Any], axis: int) -> Any:
    if isinstance(parts[0], Lazy):
        return lazy.concat(parts, axis)
    import torch

    return torch.cat(parts, dim=axis)


def _sum(parts: list[Any]) -> Any:
    if isinstance(parts[0], Lazy):
        return lazy.combine(_sum, parts, parts[0].dtype)
    import torch

    return torch.stack(parts).sum(0)
