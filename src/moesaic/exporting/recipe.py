"""What `export` is told, as data, and what it reports. Torch-free."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from moesaic.common.errors import MoesaicError
from moesaic.common.shown import Shown
from moesaic.families.moe_table import TARGETS

DtypeName = Literal["float32", "bfloat16", "float16"]

DENSE = "dense"
DESTINATIONS = ("auto", "moesaic", *TARGETS, "gguf", DENSE)
"""What `to` may be, besides the family that a checkpoint is of."""


@dataclass(frozen=True, kw_only=True)
class ExportRecipe:
    """The settings of one export."""

    checkpoint: str
    """A mixture of experts: folder, or hub id org/name[@revision]."""
    to: str = "auto"
    """auto (the family itself, else the best one that is exactly the model), moesaic (our architecture), mixtral,
    qwen3_moe, qwen2_moe, olmoe, flex_olmo, granitemoeshared, gguf, or dense (with --specialist)."""
    specialist: str | None = None
    """With --to dense: the name of the specialist, as CHECKPOINT's moesaic.json has it, to write as a dense model."""
    layout: Literal["input", "family", "per-expert", "fused"] = "family"
    """How experts are stored: family (as on the hub), input (as in CHECKPOINT), per-expert or fused."""
    dtype: DtypeName | None = None
    """Of all weights. Default: the checkpoint's."""
    shard_size: str = "5GB"
    """Largest size of a weight file."""
    allow_nonfinite: bool = False
    """Accept NaN and infinity in the weights."""

    def __post_init__(self) -> None:
        if (self.to == DENSE) != (self.specialist is not None):
            raise MoesaicError("--to dense and --specialist NAME: one needs the other")
        if self.to == DENSE and self.layout != "family":
            raise MoesaicError(f"--layout {self.layout}: a dense model has no experts to lay out; leave it out")
        if self.to == "gguf" and self.layout != "family":
            raise MoesaicError(f"--layout {self.layout}: GGUF files have one layout; leave it out")


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


@dataclass(frozen=True, kw_only=True, repr=False)
class ExportResult(Shown):
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
