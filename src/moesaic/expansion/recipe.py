"""What a user asks `expand` for: one field per flag, no torch."""

import math
from dataclasses import dataclass, fields
from typing import Any, Literal

from moesaic.common.errors import MoesaicError
from moesaic.expansion.allocation import Allocation

UtilityName = Literal[
    "gradient_norm", "gradient_squared", "saliency", "weight_norm", "approx_fisher", "second_moments", "uniform"
]
UtilityLayers = Literal["fc1", "fc2", "both"]
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

MOMENT_UTILITIES = ("approx_fisher", "second_moments")
"""Utilities that need the optimizer's second moments."""


@dataclass(frozen=True, kw_only=True)
class Growth:
    """What an expansion chooses, offline or in mid-training."""

    experts: int
    """Routed experts per layer of the result, any number."""
    utility_batches: int = 10
    """Batches that gradients are averaged over; in mid-training those of the last steps."""
    utility_layers: UtilityLayers = "fc1"
    """Matrices that count: fc1 (gate and up), fc2 (down), or both as one."""
    allocation: Allocation = "greedy"
    """The best to their cap first; by share; drawn by softmax(utility / temperature), or by share."""
    temperature: float = 1.0
    """Of `allocation: sample`: high draws evenly, low the best experts."""
    cap: int = 3
    """Most copies added of one expert."""
    routing: Routing = "plain"
    """The family's top-k, or at most one of an expert's copies per token, which changes nothing at first."""
    top_k: int | None = None
    """Experts that each token uses. Default: as before."""
    expert_op: ExpertOp = "copy"
    """What a duplicate's weights start from."""
    router_op: RouterOp = "copy"
    """What a duplicate's router row starts from."""
    delta: float = 1e-3
    """Noise that tells copies apart, on the selection bias or on router rows: its standard deviation."""

    def __post_init__(self) -> None:
        """Refuse values that are wrong whatever the model is; the message starts with the field's name."""
        for name in ("experts", "utility_batches", "cap", "top_k"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise MoesaicError(f"{name} must be at least 1, got {value}")
        if not (self.temperature > 0 and math.isfinite(self.temperature)):
            raise MoesaicError(f"temperature must be a finite number greater than 0, got {self.temperature}")
        if not (self.delta >= 0 and math.isfinite(self.delta)):
            raise MoesaicError(f"delta must be a finite number that is not negative, got {self.delta}")

    @property
    def choices(self) -> dict[str, Any]:
        """These fields alone, by name."""
        return {field.name: getattr(self, field.name) for field in fields(Growth)}


@dataclass(frozen=True, kw_only=True)
class ExpandRecipe(Growth):
    """Everything that decides the bytes of the result; `None` means a default that `resolve` fills in."""

    checkpoint: str
    """MoE checkpoint: folder, or hub id org/name[@revision]."""
    utility: UtilityName | None = None
    """What decides the copies. Default: gradient_norm with calibration text, else uniform."""
    utility_from: str | None = None
    """A utility.json that an earlier run left in its OUT."""
    calibration: tuple[str, ...] = ()
    """Text for gradients: a .txt, .jsonl or .parquet file, a folder, hf://org/name, or a task by name or .yaml file, as
    eval asks it, with the answers; repeatable, each with the same share."""
    shots: int | None = None
    """--calibration TASK: demonstrations before each question. Default: the task file's own, else 0."""
    data_dir: str | None = None
    """--calibration TASK: folder with local rows. Default: the hub's data sets."""
    batch_size: int = 8
    """Sequences per calibration batch."""
    sequence_length: int = 512
    """Tokens per calibration sequence."""
    shard_size: str = "5GB"
    """Largest weight file: 500MB, 5GB, 2GiB, or a number of bytes."""
    seed: int = 0
    """Seed of every random number."""
    allow_nonfinite: bool = False
    """Accept NaN and Inf in the checkpoint."""

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
        if self.utility in MOMENT_UTILITIES:
            raise MoesaicError(
                f"--utility {self.utility} needs the optimizer's second moments, which a checkpoint does not have; use "
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
