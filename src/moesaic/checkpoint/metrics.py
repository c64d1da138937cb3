"""metrics.jsonl, which `moesaic train` writes as it goes: how others read it, line by line. Torch-free."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moesaic.common.errors import MoesaicError
from moesaic.common.files import explained
from moesaic.common.intervals import Interval
from moesaic.common.plain import refuse_unwritable
from moesaic.common.recipe import Count, Measured, load_document

METRICS_FILE = "metrics.jsonl"
_MOST_BYTES = 1 << 26
"""Of a line: thousands of domains need a megabyte."""


_NOT_OURS = "`moesaic train` does not write this"


@dataclass(frozen=True, kw_only=True)
class _Line:
    """Any line."""

    kind: str


@dataclass(frozen=True, kw_only=True)
class Timing:
    """How long a step took; the one part that differs between two runs of a recipe."""

    seconds: Measured
    tokens_per_second: Measured


@dataclass(frozen=True, kw_only=True)
class Step:
    """One optimizer step; a loss that a run does not have is not there."""

    step: Count
    tokens: Count
    """Of the run so far."""
    loss: Measured | None
    """None where nothing was predicted."""
    domain_loss: dict[str, Measured]
    grad_norm: Measured
    lr: Measured
    timing: Timing
    balance_loss: Measured | None = None
    router_z_loss: Measured | None = None
    lm_z_loss: Measured | None = None
    load_entropy: Measured | None = None
    largest_share: Measured | None = None
    dead_experts: Count | None = None


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Loss of one held-out set in nats per token."""

    loss: Measured
    standard_error: Measured | None
    documents: Count
    tokens: Count


@dataclass(frozen=True, kw_only=True)
class Validation:
    """The held-out sets after a step, by domain."""

    step: Count
    tokens: Count
    validation: dict[str, HeldOut]


@dataclass(frozen=True, kw_only=True)
class Losses:
    """One held-out set just before an expansion and right after it."""

    before: HeldOut
    after: HeldOut
    jump: Interval


@dataclass(frozen=True, kw_only=True)
class Expansion:
    """The model grew after a step."""

    step: Count
    tokens: Count
    experts_before: Count
    experts: Count
    losses: dict[str, Losses]


_KINDS: Mapping[str, type[Step] | type[Validation] | type[Expansion]] = {
    "step": Step,
    "validation": Validation,
    "expansion": Expansion,
}


def read_metrics(file: Path) -> Iterator[Step | Validation | Expansion]:
    """The lines of the kinds above. A last one without an end is what a killed run left, and is not read.

    Raises:
        MoesaicError: a line that `moesaic train` did not write; names file, line and key.
    """
    with explained(file), file.open("rb") as stream:
        number = 0
        while line := stream.readline(_MOST_BYTES):
            number += 1
            if line.endswith(b"\n"):
                where = f"{file}:{number}"
                values = _parse(line, where)
                kind = load_document(_Line, values, where, others=True, way_out=_NOT_OURS).kind
                if kind in _KINDS:
                    yield load_document(_KINDS[kind], values, where, others=True, way_out=_NOT_OURS)
            elif len(line) == _MOST_BYTES:
                raise MoesaicError(f"{file}:{number}: is longer than any line that `moesaic train` writes")


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise MoesaicError(f"{where}: not JSON ({error}); {_NOT_OURS}") from error
    if not isinstance(values, dict):
        raise MoesaicError(f"{where}: not a line of `moesaic train`")
    refuse_unwritable(values, where)
    return values
