"""What `export` reports."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class LogitCheck:
    """Source and result compared on the same tokens, both in fp32."""

    tokens: str
    """Which tokens."""
    count: int
    largest_difference: float
    """Absolute, over all logits."""
    largest_logit: float
    same_choice: float
    """Share of positions where both prefer the same next token."""
    tolerance: float

    @property
    def ok(self) -> bool:
        """Whether the difference is rounding."""
        return self.largest_difference <= self.tolerance

    def line(self) -> str:
        """One line for people."""
        verdict = "equal within rounding" if self.ok else "NOT EQUAL"
        return (
            f"{self.count} {self.tokens}: largest difference of logits {self.largest_difference:.2g} (of "
            f"{self.largest_logit:.3g}; tolerance {self.tolerance:.2g}), same next token at {self.same_choice:.2%}: "
            f"{verdict}"
        )


@dataclass(frozen=True, kw_only=True)
class ExportResult:
    """What was made."""

    out: Path | None
    """None after a dry run."""
    family: str
    why: str
    layout: str
    nbytes: int
    """Of the weight files."""
    seconds: float
    checks: tuple[LogitCheck, ...] = ()
    notices: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every check passed."""
        return all(check.ok for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for `--json`."""
        return {
            **vars(self),
            "out": None if self.out is None else str(self.out),
            "seconds": round(self.seconds, 3),
            "checks": [vars(check) | {"ok": check.ok} for check in self.checks],
            "notices": list(self.notices),
            "ok": self.ok,
        }

    def lines(self) -> list[str]:
        """The same for people."""
        where = "would be" if self.out is None else f"{self.out}:"
        first = f"{where} {self.family}, {self.nbytes / 1e6:,.1f} MB, in {self.seconds:.1f} s ({self.why})"
        return [first, *(check.line() for check in self.checks)]
