"""What a user asks `expand` for: one field per flag, no torch."""

import math
from dataclasses import dataclass, fields
from typing import Any, Literal

from moesaic.common.errors import MoesaicError
from moesaic.expansion.allocation import Allocation

UtilityName = Literal["gradient_norm", "gradient_squared", "saliency", "weight_norm", "approx_fisher", "uniform"]
Routing = Literal["plain", "one_per_copy_group"]
ExpertOp = Literal[
    "copy", "random", "copy_noise", "drop", "shuffle", "interpolate", "orthogonal", "scaled_copy", "svd_perturb",
    "svd_mix", "sparse_code_mix",
]  # fmt: skip
RouterOp = Literal[
    "copy", "copy_noise", "interpolate", "bias_only", "scaled_copy", "perturb_new_only", "orthogonal", "adversarial",
    "temperature_scaled", "svd_perturb",
]  # fmt: skip

GRADIENT_UTILITIES = ("gradient_norm", "gradient_squared", "saliency")
"""Utilities that need calibration text."""


@dataclass(frozen=True, kw_only=True)
class Growth:
    """What an expansion chooses, offline or in mid-training."""

    experts: int
    """Routed experts per MoE layer of the result."""
    utility_batches: int = 10
    """Batches that gradients are averaged over; in mid-training those of the last steps."""
    allocation: Allocation = "greedy"
    """How copies are given out by utility. `uniform` utilities go round robin whatever this says."""
    cap: int = 3
    """Most copies that are added of one expert."""
    routing: Routing = "plain"
    """`plain`: the family's own top-k. `one_per_copy_group`: a token uses at most one of the copies of an expert."""
    top_k: int | None = None
    """Experts that each token uses in the result. Default: as before."""
    expert_op: ExpertOp = "copy"
    """What a duplicate's weights start from."""
    router_op: RouterOp = "copy"
    """What a duplicate's router row starts from."""
    delta: float = 1e-3
    """Standard deviation of the noise that tells copies apart, absolute: on the duplicates' selection bias, else on
    router rows."""

    def __post_init__(self) -> None:
        """Refuse values that are wrong whatever the model is; the message starts with the field's name."""
        for name in ("experts", "utility_batches", "cap", "top_k"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise MoesaicError(f"{name} must be at least 1, got {value}")
        if not (self.delta >= 0 and math.isfinite(self.delta)):
            raise MoesaicError(f"delta must be a finite number that is not negative, got {self.delta}")

    @property
    def choices(self) -> dict[str, Any]:
        """These fields alone, by name."""
        return {field.name: getattr(self, field.name) for field in fields(Growth)}


@dataclass(frozen=True, kw_only=True)
class ExpandRecipe(Growth):
    """Everything that decides the bytes of the result.

    Workers, progress and overwriting are arguments of `run.expand`. `None` means a default that `resolve` fills in.
    """

    checkpoint: str
    """The MoE to grow: folder, or hub id `org/name[@revision]`."""
    utility: UtilityName | None = None
    """What decides which experts are copied. Default: gradient_norm with calibration text, else uniform."""
    utility_from: str | None = None
    """A utility.json that an earlier run wrote, instead of computing utilities."""
    calibration: tuple[str, ...] = ()
    """Files or folders of text (.txt, .jsonl, .parquet), or hub data sets `hf://org/name`, for gradient utilities."""
    batch_size: int = 8
    """Sequences per calibration batch."""
    sequence_length: int = 512
    """Tokens per calibration sequence."""
    shard_size: str = "5GB"
    """Largest file of weights, with a unit (`500MB`, `5GB`, `2GiB`) or a number of bytes."""
    seed: int = 0
    """Seed of every random number; not negative."""
    allow_nonfinite: bool = False
    """Accept NaN and Inf in the checkpoint instead of refusing them."""

    def __post_init__(self) -> None:
        """Refuse values that are wrong whatever the checkpoint is; the message starts with the field's name."""
        super().__post_init__()
        if self.batch_size < 1:
            raise MoesaicError(f"batch_size must be at least 1, got {self.batch_size}")
        if self.sequence_length < 2:
            raise MoesaicError(f"sequence_length must be at least 2 tokens, got {self.sequence_length}")
        if self.seed < 0:
            raise MoesaicError(f"seed must not be negative, got {self.seed}")

    def check_utility(self) -> None:
        """Refuse a utility that a checkpoint alone cannot give; in mid-training the run has its own text and moments.

        Raises: `MoesaicError`.
        """
        if self.utility == "approx_fisher":
            raise MoesaicError(
                "--utility approx_fisher needs the optimizer's second moments, which a checkpoint does not have; use "
                "gradient_norm with calibration text, or `expand:` in a training recipe"
            )
        if self.utility_from is not None and (self.utility is not None or self.calibration):
            given = "utility" if self.utility is not None else "calibration"
            raise MoesaicError(
                f"--utility-from {self.utility_from}: cannot be given together with {given}; leave one out"
            )
        if self.utility in GRADIENT_UTILITIES and not self.calibration:
            raise MoesaicError(
                f"--utility {self.utility} needs text: give calibration data, or use weight_norm or uniform"
            )
        if self.utility in ("weight_norm", "uniform") and self.calibration:
            raise MoesaicError(f"--utility {self.utility} uses no calibration data; leave one of the two out")
