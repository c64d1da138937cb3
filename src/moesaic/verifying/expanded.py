"""`verify` for what `expand` made: the statement of its record, and how far the model is from its source."""

import gc
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moesaic.checkpoint.record import read_provenance
from moesaic.checkpoint.source import Checkpoint
from moesaic.common.errors import MoesaicError
from moesaic.common.progress import progress
from moesaic.loading import load
from moesaic.verifying.claim import other_weights
from moesaic.verifying.measure import run_logits
from moesaic.verifying.report import Check
from moesaic.verifying.text import tokens_for

_PROMISES = "E1", "E2", "E3"
_LIMITS = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}
"""Relative error of all logits together, by the type that the models run in: rounding, and tokens near a tie."""


@dataclass(frozen=True, kw_only=True)
class ExpandedReport:
    """What an expanded checkpoint preserves of its source; the loss jump is measured whatever is promised."""

    source: str
    target: str
    code: str
    statement: str
    tokens: int
    text: str
    dtype: str
    error: float
    """Relative error of the logits: |target - source| / |source| over all tokens."""
    max_logit_difference: float
    loss_source: float
    """In nats per token."""
    loss_target: float
    checks: Sequence[Check]
    notes: Sequence[str]

    @property
    def ok(self) -> bool:
        """Whether what the statement promises holds (where nothing is promised, nothing can fail)."""
        return all(check.ok for check in self.checks)

    @property
    def loss_jump(self) -> float:
        """Loss of the target minus loss of the source, in nats per token."""
        return self.loss_target - self.loss_source

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON-ready plain values."""
        checks = [asdict(check) | {"ok": check.ok} for check in self.checks]
        return {**vars(self), "ok": self.ok, "loss_jump": self.loss_jump, "checks": checks, "notes": list(self.notes)}

    def lines(self) -> list[str]:
        """Return the report as lines of text."""
        return [
            f"{self.target}: expanded from {self.source}",
            f"measured on {self.tokens:,} tokens of {self.text}, in {self.dtype}",
            f"  logits, relative error    {self.error:.2g}",
            f"  largest logit difference  {self.max_logit_difference:.3g}",
            f"  loss                      {self.loss_source:.6g} before, {self.loss_target:.6g} after: "
            f"jump {self.loss_jump:+.4g} nats per token",
            f"statement {self.code}: {self.statement}" if self.code != "none" else f"no statement: {self.statement}",
            *(
                f"  {'holds' if check.ok else 'FAILS'}: {check.name} {check.value:.2g}, limit {check.limit:.2g}"
                for check in self.checks
            ),
            *(f"  note: {note}" for note in self.notes),
        ]


def is_expanded(target: Checkpoint) -> bool:
    """Whether `expand` made a checkpoint."""
    record = read_provenance(target.path)
    return record is not None and record.get("verb") == "expand"


def verify_expanded(
    before: Checkpoint,
    after: Checkpoint,
    *,
    text: str | Path | None = None,
    device: str | None = None,
    batch_size: int = 1,
    dtype: str | None = None,
    quiet: bool = False,
) -> ExpandedReport:
    """Run an expanded model and its source on the same tokens; the other arguments are those of `verify`.

    A statement that is exact but for noise (`--delta`) is not checked against a limit: the noise's effect is measured.

    Raises:
        MoesaicError: models of other vocabularies, a text that cannot be read.
    """
    if before.config.get("vocab_size") != after.config.get("vocab_size"):
        raise MoesaicError(
            f"{after.name}: has another vocabulary than {before.name}; give the checkpoint that was expanded"
        )
    record = read_provenance(after.path)
    assert record is not None
    notes = other_weights(before, record["sources"][0].get("weights_hash"), quiet=quiet)
    tokens_BL, described = tokens_for(before, after, text, vocab=int(before.config["vocab_size"]))
    with progress(2 * tokens_BL.numel(), unit="tokens", label="verifying", quiet=quiet) as tick:
        model = load(before.path, device=device, dtype=dtype or "float32")
        run_dtype = model.dtype
        logits_BLV = torch.cat(list(run_logits(model, tokens_BL, batch_size, tick)))
        del model
        gc.collect()
        model = load(after.path, device=device, dtype=run_dtype)
        other_BLV = torch.cat(list(run_logits(model, tokens_BL, batch_size, tick)))
    error = ((other_BLV - logits_BLV).norm() / logits_BLV.norm()).item()
    name = str(run_dtype).removeprefix("torch.")
    statement = record.get("statement", {})
    exact = statement.get("code") in _PROMISES and not record.get("recipe", {}).get("delta")
    limit = _LIMITS.get(name, _LIMITS["float32"])
    return ExpandedReport(
        source=before.name,
        target=after.name,
        code=str(statement.get("code")),
        statement=str(statement.get("text")),
        tokens=tokens_BL.numel(),
        text=described,
        dtype=name,
        error=error,
        max_logit_difference=(other_BLV - logits_BLV).abs().max().item(),
        loss_source=_loss(logits_BLV, tokens_BL),
        loss_target=_loss(other_BLV, tokens_BL),
        checks=[Check(name="relative error of the logits", value=_worst(error), limit=limit)] if exact else [],
        notes=notes,
    )


def _loss(logits_BLV: Tensor, tokens_BL: Tensor) -> float:
    return nn.functional.cross_entropy(logits_BLV[:, :-1].flatten(0, 1), tokens_BL[:, 1:].flatten()).item()


def _worst(error: float) -> float:
    return error if math.isfinite(error) else math.inf
