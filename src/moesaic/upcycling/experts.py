"""Whole experts as values. D hidden, I intermediate of one expert, E experts, M shards.

Operations take whole experts, never one matrix alone, so gate, up and down cannot be cut or permuted differently.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class ExpertWeights:
    """The matrices of one gated FFN `down(act(gate x + b) * (up x + b)) + b`, or of E of them stacked in front."""

    gate_ID: Float[Tensor, "*E I D"]
    up_ID: Float[Tensor, "*E I D"]
    down_DI: Float[Tensor, "*E D I"]
    gate_bias_I: Float[Tensor, "*E I"] | None = None
    up_bias_I: Float[Tensor, "*E I"] | None = None
    down_bias_D: Float[Tensor, "*E D"] | None = None

    @property
    def intermediate(self) -> int:
        """I, the number of intermediate neurons."""
        return self.gate_ID.shape[-2]

    def slice(self, shard: int, shards: int) -> Self:
        """Shard `shard` of `shards` equal contiguous ones: the same neurons of gate, up and down.

        The shards' outputs add up to the whole FFN's, so each takes its part `1 / shards` of the output bias.
        """
        width, rest = divmod(self.intermediate, shards)
        assert rest == 0, (self.intermediate, shards)
        assert 0 <= shard < shards, (shard, shards)
        rows = slice(shard * width, (shard + 1) * width)
        bias = self.down_bias_D
        if bias is not None:
            bias = bias.to(torch.promote_types(bias.dtype, torch.float32)) / shards  # a third of it rounds in bf16
        return type(self)(
            gate_ID=self.gate_ID[..., rows, :],
            up_ID=self.up_ID[..., rows, :],
            down_DI=self.down_DI[..., rows],
            gate_bias_I=None if self.gate_bias_I is None else self.gate_bias_I[..., rows],
            up_bias_I=None if self.up_bias_I is None else self.up_bias_I[..., rows],
            down_bias_D=bias,
        )

    def scale(self, *, gate_up: float, down: float) -> Self:
        """Each linear map, its bias included, times a factor: `gate_up` for gate and up, `down` for down.

        `gate_up=1` scales the output exactly; any other value does not, because SiLU and GELU are not homogeneous.
        """
        factors = {"down_DI": down, "down_bias_D": down}

        def scaled(name: str, value: Tensor) -> Tensor:
            factor = factors.get(name, gate_up)
            return value if factor == 1.0 else value * factor

        return self.map(scaled)

    def map(self, function: Callable[[str, Tensor], Tensor]) -> Self:
        """The expert with `function(field name, tensor)` in place of each tensor that it has."""
        present = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: function(name, value) for name, value in present.items() if value is not None})

    @classmethod
    def stack(cls, experts: Sequence[Self]) -> Self:
        """E experts of one shape as one value with a leading dimension E."""
        assert experts
        return experts[0].map(lambda name, _: torch.stack([getattr(expert, name) for expert in experts]))

    @classmethod
    def concatenate(cls, experts: Sequence[Self]) -> Self:
        """One FFN as wide as all of `experts` together, whose output is the sum of theirs."""
        assert experts
        axis = {"down_DI": -1}

        def join(name: str, _: Tensor) -> Tensor:
            parts = [getattr(expert, name) for expert in experts]
            if name == "down_bias_D":
                return torch.stack(parts).sum(0)
            return torch.cat(parts, dim=axis.get(name, 0))

        return experts[0].map(join)


@dataclass(frozen=True, kw_only=True)
class MoELayer:
    """One mixture-of-experts layer in memory: `y = sum_k w_k expert_k(x) + shared(x)`."""

    router_ED: Float[Tensor, "E D"]
    experts: ExpertWeights
    """Routed experts, stacked."""
    shared: ExpertWeights | None
    """Shared experts, concatenated to one FFN of width S*F."""
    groups: tuple[int, ...] | None
    """Group of each expert for `one_per_group` routing; None for plain top-k."""
