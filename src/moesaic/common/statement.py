"""What is promised about every MoE layer of a result, by its code in docs/statements.md."""

from dataclasses import dataclass
from typing import Literal

Code = Literal["N1", "N2", "D1", "D2", "D3", "S1", "E1", "E2", "E3", "none"]

_EXACT = frozenset({"N1", "D2", "S1", "E1", "E2", "E3"})


@dataclass(frozen=True, kw_only=True)
class Statement:
    """One statement about every MoE layer, in exact arithmetic: its code in docs/statements.md, and a sentence."""

    code: Code
    text: str

    @property
    def preserves(self) -> bool:
        """Whether every layer computes what the source's FFN or MoE layer does, but for added noise and rounding."""
        return self.code in _EXACT
