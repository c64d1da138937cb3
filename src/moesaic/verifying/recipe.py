"""What `verify` is asked, and what it says: plain values for `--json`, lines for people. No torch."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, Literal

from moesaic.common.numbers import finite_only, shown
from moesaic.common.shown import Shown


@dataclass(frozen=True, kw_only=True)
class VerifyRecipe:
    """Which two checkpoints, and how they run."""

    source: str
    """The checkpoint that TARGET was made from: folder, or hub id org/name[@revision]."""
    target: str
    """The mixture-of-experts checkpoint that upcycle or expand wrote."""
    text: str | None = None
    """UTF-8 text to measure logits and perplexity on. Default: docstrings of Python's own library."""
    device: str | None = None
    """Where the model runs, such as cpu, cuda or cuda:1. Default: cuda if there is one, else cpu."""
    batch_size: int = 1
    """Sequences that run at once."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = None
    """Data type that both models run in; auto is the checkpoint's. Default: float32."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One measured figure that a statement promises to be within a limit."""

    name: str
    value: float
    limit: float

    @property
    def ok(self) -> bool:
        """Whether the figure is within the limit (a NaN is not)."""
        return self.value <= self.limit


@dataclass(frozen=True, kw_only=True)
class LayerMeasure:
    """One MoE layer against the dense FFN, on the dense model's own hidden states.

    Attributes:
        layer: zero-based index.
        error: mean over tokens of |y - FFN(x)| / |FFN(x)|.
        norm_ratio: mean over tokens of |y| / |FFN(x)|.
        coverage: share of tokens whose selected experts include every shard; None where FFNs are not cut.
        identity_error: mean relative error of the identity that the statement is about, if it is another one than
            y = FFN(x); None where there is none or it could not be checked.
        rho: mean of rho(x) for statement N2, else None.
        weight_sum_error: largest deviation of a token's routing weights from a sum of 1.
        distinct: share of tokens whose experts belong to different groups; None without groups.
    """

    layer: int
    error: float
    norm_ratio: float
    coverage: float | None
    identity_error: float | None
    rho: float | None
    weight_sum_error: float
    distinct: float | None


@dataclass(frozen=True, kw_only=True, repr=False)
class _Report(Shown):
    """What both reports have.

    Attributes:
        source, target: as given.
        code: the statement that applies (docs/statements.md), or `none`.
        statement: that statement, in words.
        tokens: number of tokens measured.
        text: what the tokens are.
        dtype: data type that both models ran in.
        checks: what decides `ok`.
        max_logit_difference: largest absolute difference of a logit between the two models.
        notes: what to know about these figures.
        not_finite: where a model gave NaN or infinity, so that figures are missing; the statement then does not hold.
    """

    source: str
    target: str
    code: str
    statement: str
    tokens: int
    text: str
    dtype: str
    checks: Sequence[Check]
    max_logit_difference: float
    notes: Sequence[str] = ()
    not_finite: Sequence[str] = ()

    @property
    def ok(self) -> bool:
        """Whether everything that the statement promises holds (where nothing is promised, only NaN can fail)."""
        return not self.not_finite and all(check.ok for check in self.checks)

    def brief(self) -> str:
        """The statement, and whether it holds."""
        holds = f"statement {self.code} {'holds' if self.ok else 'FAILS'}"
        worst = ", ".join(f"{one.name} {shown(one.value, '.2g')}" for one in self.checks)
        what = holds if self.code != "none" else "no statement" + ("" if self.ok else ", NOT FINITE")
        return f"{self.target}: {what}{f' ({worst})' if worst else ''}"

    def _values(self, *names: str) -> dict[str, Any]:
        return {name: finite_only(getattr(self, name)) for name in names}

    def _checks(self) -> list[dict[str, Any]]:
        return [finite_only(asdict(check)) | {"ok": check.ok} for check in self.checks]

    def _end(self) -> list[str]:
        return [
            f"statement {self.code}: {self.statement}" if self.code != "none" else f"no statement: {self.statement}",
            *(
                f"  {'holds' if one.ok else 'FAILS'}: {one.name} {shown(one.value, '.2g')}, limit {one.limit:.2g}"
                for one in self.checks
            ),
            *(f"  NOT FINITE: {place}" for place in self.not_finite),
            *(f"  note: {note}" for note in self.notes),
        ]


@dataclass(frozen=True, kw_only=True, repr=False)
class VerifyReport(_Report):
    """What an upcycled checkpoint preserves of its source.

    Attributes:
        made: how the target was made, one phrase.
        layers: one measure per MoE layer.
        perplexity_source, perplexity_target: on the same tokens.
    """

    made: str
    layers: Sequence[LayerMeasure]
    perplexity_source: float
    perplexity_target: float

    @property
    def coverage(self) -> float | None:
        """Mean over layers of the share of tokens that get every shard; None where FFNs are not cut."""
        values = [layer.coverage for layer in self.layers if layer.coverage is not None]
        return fmean(values) if values else None

    @property
    def norm_ratio(self) -> float:
        """Mean over layers of |y| / |FFN(x)|."""
        return fmean(layer.norm_ratio for layer in self.layers)

    @property
    def error(self) -> float:
        """Relative FFN error of the worst layer."""
        return max((layer.error for layer in self.layers), key=_nan_last)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON-ready plain values."""
        return {
            **self._values("source", "target", "made", "code", "statement", "ok", "tokens", "text", "dtype"),
            "ffn_error": finite_only(self.error),
            **self._values("norm_ratio", "coverage", "max_logit_difference", "perplexity_source", "perplexity_target"),
            "checks": self._checks(),
            "layers": [finite_only(asdict(layer)) for layer in self.layers],
            "notes": list(self.notes),
            "not_finite": list(self.not_finite),
        }

    def lines(self) -> list[str]:
        """Return the report as lines of text."""
        rows = [
            (
                "FFN relative error",
                f"{shown(self.error, '.2g')} in the worst layer, {self._mean('error', '.2g')} on average",
            ),
            ("FFN output norm", f"{shown(self.norm_ratio, '.4g')} times the dense one, mean over layers"),
        ]
        if self.coverage is not None:
            rows.append(("shard coverage", f"{shown(100 * self.coverage, '.4g')}% of the tokens get every shard"))
        if self.layers[0].rho is not None:
            rows.append(("rho", f"{self._mean('rho', '.4g')}, mean over layers"))
        if self.layers[0].identity_error is not None:
            worst = max((layer.identity_error or 0.0 for layer in self.layers), key=_nan_last)
            rows.append(("identity error", f"{shown(worst, '.2g')} in the worst layer"))
        rows += [
            ("largest logit difference", shown(self.max_logit_difference, ".3g")),
            ("perplexity", f"{shown(self.perplexity_source, '.6g')} dense, {shown(self.perplexity_target, '.6g')} MoE"),
        ]
        width = max(len(name) for name, _ in rows)
        return [
            f"{self.target}: {self.made}",
            f"measured against {self.source} on {self.tokens:,} tokens of {self.text}, in {self.dtype}",
            *(f"  {name:<{width}}  {value}" for name, value in rows),
            *self._end(),
        ]

    def rows(self) -> list[dict[str, Any]]:
        """A row per MoE layer."""
        return [asdict(layer) for layer in self.layers]

    def _mean(self, name: str, form: str) -> str:
        return shown(fmean(getattr(layer, name) for layer in self.layers), form)


@dataclass(frozen=True, kw_only=True, repr=False)
class ExpandedReport(_Report):
    """What an expanded checkpoint preserves of its source; the loss jump is measured whatever is promised."""

    error: float
    """Relative error of the logits: |target - source| / |source| over all tokens."""
    loss_source: float
    """In nats per token."""
    loss_target: float

    @property
    def loss_jump(self) -> float:
        """Loss of the target minus loss of the source, in nats per token."""
        return self.loss_target - self.loss_source

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON-ready plain values."""
        return {
            **self._values("source", "target", "code", "statement", "tokens", "text", "dtype", "error"),
            **self._values("max_logit_difference", "loss_source", "loss_target"),
            "checks": self._checks(),
            "notes": list(self.notes),
            "not_finite": list(self.not_finite),
            **self._values("ok", "loss_jump"),
        }

    def lines(self) -> list[str]:
        """Return the report as lines of text."""
        return [
            f"{self.target}: expanded from {self.source}",
            f"measured on {self.tokens:,} tokens of {self.text}, in {self.dtype}",
            f"  logits, relative error    {shown(self.error, '.2g')}",
            f"  largest logit difference  {shown(self.max_logit_difference, '.3g')}",
            f"  loss                      {shown(self.loss_source, '.6g')} before, "
            f"{shown(self.loss_target, '.6g')} after: jump {shown(self.loss_jump, '+.4g')} nats per token",
            *self._end(),
        ]


def _nan_last(value: float) -> tuple[bool, float]:
    return value != value, value
