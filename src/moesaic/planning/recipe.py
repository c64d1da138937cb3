"""What `plan` is asked, and what it says: plain numbers for `--json`, lines for people. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from moesaic.common.errors import MoesaicError
from moesaic.common.shown import Shown
from moesaic.families.costs import FLOPS_FORMULA, number, size
from moesaic.families.counting import ParameterCount
from moesaic.planning.serving import Device, Gpu, Serving
from moesaic.training.planning import UTILISATION


@dataclass(frozen=True, kw_only=True)
class PlanRecipe:
    """What to plan, and for which length of a sequence."""

    source: Any
    """A recipe (.yaml, or a name of moesaic recipes list), a checkpoint folder, a hub id org/name[@revision], or a
    config.json alone."""
    context: int | None = None
    """Sequence length in tokens that FLOPs and the key/value cache are stated for. Default: 4096."""
    gpu: Gpu = "H100"
    """Device that serving is stated for."""
    mfu: float = UTILISATION
    """Share of the device's dense bf16 peak that reading a prompt reaches."""
    price: float = 2.0
    """Price of a device for an hour, in any currency; the default is an assumption, not an offer."""

    def __post_init__(self) -> None:
        """Refuse a share or a price that is none."""
        if not 0 < self.mfu <= 1:
            raise MoesaicError(f"mfu must be above 0 and at most 1, got {self.mfu}")
        if not 0 <= self.price < float("inf"):
            raise MoesaicError(f"price must be a number of at least 0, got {self.price}")


@dataclass(frozen=True, kw_only=True, repr=False)
class PlanReport(Shown):
    """Sizes and costs of a checkpoint or of what a recipe makes.

    Attributes:
        subject: what was given, for example a folder or a recipe file.
        kind: `dense checkpoint`, `MoE checkpoint`, `upcycle recipe`, ...
        model_type: of the model that is counted.
        parameters: of the language model; see `ParameterCount`.
        weight_bytes: bytes of the weights (for a recipe: of the result).
        flops_per_token, flops_formula: forward, and what is counted; attention at `context` tokens.
        context: sequence length in tokens for FLOPs and cache.
        kv_cache_bytes: of one sequence of `context` tokens in the weights' data type.
        kv_cache_bytes_per_token: what one token adds to it, and `per_further_token` once sliding windows are full.
        serving: devices that hold the weights and that cache, and what reading a prompt costs on them.
        memory_to_run_bytes: weights plus that cache; activations come on top.
        memory_to_convert_bytes: estimated peak resident memory of `upcycle`; None where there is nothing to convert.
        download_bytes: weights that are not on this machine yet.
        disk_bytes: free disk that a recipe needs (0 for a checkpoint).
        minutes: expected minutes of a recipe without the download, None for a checkpoint.
        details: further figures of one kind of recipe, by name.
        notes: sentences about what is not in the figures, and what the recipe resolved to.
    """

    subject: str
    kind: str
    model_type: str
    parameters: ParameterCount
    weight_bytes: int
    flops_per_token: int
    flops_formula: str = FLOPS_FORMULA
    context: int
    kv_cache_bytes: int
    kv_cache_bytes_per_token: int
    kv_cache_bytes_per_further_token: int
    memory_to_run_bytes: int
    memory_to_convert_bytes: int | None = None
    download_bytes: int = 0
    disk_bytes: int = 0
    minutes: float | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()
    serving: Serving | None = None

    def served_by(self, device: Device) -> PlanReport:
        """The report with what serving on such devices takes."""
        return replace(self, serving=device.serve(self.memory_to_run_bytes, self.flops_per_token))

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON-ready plain values; bytes, FLOPs and counts are integers."""
        return {
            **vars(self),
            "parameters": self.parameters.to_dict(),
            "serving": None if self.serving is None else asdict(self.serving),
            "details": dict(self.details),
            "notes": list(self.notes),
        }

    def lines(self) -> list[str]:
        """Return the report as lines of text."""
        count = self.parameters
        rows = [
            ("", f"{self.subject}: {self.kind}, {self.model_type}"),
            ("total parameters", _with_without(count.total, count.total_without_embeddings)),
            ("active parameters", _with_without(count.active, count.active_without_embeddings)),
        ]
        if count.moe_layers:
            rows.append(("experts", _experts(count)))
        if count.not_run:
            rows.append(
                ("not run", f"{number(count.not_run)} parameters for multi-token prediction, not counted above")
            )
        if count.other_modalities:
            rows.append(
                ("other parts", f"{number(count.other_modalities)} vision or audio parameters, not counted above")
            )
        rows += [
            ("weights", size(self.weight_bytes)),
            (
                "forward FLOPs per token",
                f"{self.flops_per_token / 1e9:.2f} GFLOP (mean over a sequence of {self.context:,} tokens)",
            ),
            (
                "memory to run",
                f"{size(self.memory_to_run_bytes)} (weights + {size(self.kv_cache_bytes)} cache of one sequence of "
                f"{self.context:,} tokens; activations on top)",
            ),
        ]
        further = self.kv_cache_bytes_per_further_token
        beyond = "" if further == self.kv_cache_bytes_per_token else f", {size(further)} once windows are full"
        rows.append(("cache per token", f"{size(self.kv_cache_bytes_per_token)}{beyond}"))
        if self.serving is not None:
            rows += self.serving.rows()
        if self.memory_to_convert_bytes is not None:
            rows.append(("memory to convert", f"about {size(self.memory_to_convert_bytes)}"))
        if self.disk_bytes:
            rows.append(("free disk needed", size(self.disk_bytes)))
        if self.download_bytes:
            rows.append(("download", size(self.download_bytes)))
        if self.minutes is not None:
            rows.append(("expected time", duration(self.minutes)))
        rows += [(name.replace("_", " "), str(value)) for name, value in self.details.items()]
        width = max(len(name) for name, _ in rows)
        text = [f"  {name:<{width}}  {value}" if name else value for name, value in rows]
        return text + [f"  note: {note}" for note in self.notes]


def duration(minutes: float) -> str:
    """Return minutes as text: `under a minute`, `about 7 minutes`, `about 3.5 hours`."""
    if minutes < 1:
        return f"about {max(1, round(minutes * 60))} s"
    return f"about {minutes:.0f} minutes" if minutes < 90 else f"about {minutes / 60:.1f} hours"


def _with_without(count: int, without: int) -> str:
    return f"{number(count)} ({count:,}); {number(without)} without embeddings"


def _experts(count: ParameterCount) -> str:
    share = 100 * count.active_routed / count.routed
    return (
        f"{count.top_k} of {count.num_experts} per token in {count.moe_layers} layers: {number(count.routed)} routed "
        f"({share:.3g}% active), {number(count.shared)} shared, {number(count.router)} in routers"
    )
