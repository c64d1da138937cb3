"""What a conversion made (or would make), for people and for programs. No torch."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moesaic.common.progress import amount
from moesaic.families.counting import count_shapes
from moesaic.upcycling.layout import UpcyclePlan
from moesaic.upcycling.statement import Statement

UNREAD = "nothing was read: where the specialists turn out to have equal weights, more is preserved than said here"
"""What a dry run adds to its statement."""


@dataclass(frozen=True, kw_only=True)
class UpcycleResult:
    """The outcome of `upcycle`."""

    out: Path | None
    """The folder that was written; None for a dry run."""
    plan: UpcyclePlan
    statement: Statement
    notices: tuple[str, ...]
    seconds: float

    @staticmethod
    def count(plan: UpcyclePlan) -> tuple[int, int]:
        """Total and active parameters."""
        counted = count_shapes({tensor.name: tensor.shape for tensor in plan.files.tensors}, plan.config)
        return counted.total, counted.active

    @property
    def summary(self) -> dict[str, Any]:
        """Everything worth knowing as plain values, for `--json`."""
        layer = self.plan.layer
        total, active = self.count(self.plan)
        return {
            "out": None if self.out is None else str(self.out),
            "method": layer.method.name,
            "experts": layer.experts,
            "top_k": layer.top_k,
            "shards": layer.shards,
            "shared_experts": layer.shared_experts,
            "routing": layer.routing,
            "weighting": layer.weighting,
            "router_init": layer.router_init,
            "moe_layers": list(self.plan.moe_layers),
            "dtype": self.plan.dtype,
            "parameters": total,
            "active_parameters": active,
            "bytes": self.plan.files.nbytes,
            "files": [file.name for file in self.plan.files.files],
            "statement": {"code": self.statement.code, "text": self.statement.text},
            "notices": list(self.notices),
            "seconds": round(self.seconds, 3),
        }

    @property
    def lines(self) -> list[str]:
        """The same for people."""
        layer, plan = self.plan.layer, self.plan
        total, active = self.count(plan)
        done = "would write" if self.out is None else f"{self.out}: wrote"
        took = "" if self.out is None else f" in {self.seconds:.1f} s"
        shared = f" and {layer.shared_experts} shared" if layer.shared_experts else ""
        return [
            f"{done} {amount(plan.files.nbytes)} in {len(plan.files.files)} file(s){took}",
            f"{layer.method.name}: {layer.experts} experts{shared}, {layer.top_k} active, "
            f"{len(plan.moe_layers)} of {plan.base.num_layers} layers, routing {layer.routing}, "
            f"router {layer.router_init}",
            f"{total:,} parameters, {active:,} active per token",
            f"{self.statement.code}{' or better' if UNREAD in self.notices else ''}: {self.statement.text}",
        ]


def config_text(plan: UpcyclePlan) -> str:
    """config.json as text."""
    return json.dumps(plan.config, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
