"""Results files and training runs written by hand."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def task(score: float, error: float | None = 0.01, **more: Any) -> dict[str, Any]:
    return {
        "title": "ARC-e",
        "metric": "acc,none",
        "higher_is_better": True,
        "shots": 5,
        "samples": 100,
        "score": score,
        "standard_error": error,
        "selection": None,
        "identity": {"shots": 5, "data": {"a.jsonl": "0"}, "selection": None},
    } | more


def results(
    path: Path,
    tasks: Mapping[str, dict[str, Any]],
    *,
    weights: str = "w",
    settings: Mapping[str, Any] | None = None,
    **more: Any,
) -> Path:
    checkpoint = {
        "name": "m",
        "revision": None,
        "model_type": "moesaic_llama",
        "full_model": f"s{weights}",
        "weights_hash": weights,
        "sample_hash": f"s{weights}",
        "made_from": [],
        "verb": None,
        "experts": None,
    }
    for key in ("made_from", "verb", "experts"):
        checkpoint[key] = more.pop(key, checkpoint[key])
    document = {
        "format": "moesaic-results/1",
        "checkpoint": checkpoint,
        "settings": {"limit": None, "seed": 1234} | dict(settings or {}),
        "versions": {},
        "suites": {},
        "tasks": tasks,
        "missing": more.pop("missing", {}),
        "averages": more.pop("averages", []),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document))
    return path


def average(name: str, over: list[str], missing: tuple[str, ...] = ()) -> dict[str, Any]:
    numbers = {"score": 0.5, "standard_error": None}
    return {"suite": "s", "name": name, **numbers, "over": over, "missing": list(missing), "partial": []}


STEP = {
    "kind": "step",
    "step": 1,
    "tokens": 100,
    "loss": 8.0,
    "domain_loss": {},
    "grad_norm": 1.0,
    "lr": 0.1,
    "timing": {"seconds": 1.0, "tokens_per_second": 100.0},
}


def training(
    folder: Path,
    losses: Mapping[str, float],
    *,
    lines: tuple[dict[str, Any], ...] = (),
    tokens: Mapping[str, int] | None = None,
) -> Path:
    """A run with held-out losses by domain, over 100 tokens each or as many as `tokens` says."""
    folder.mkdir(parents=True)
    counts = dict.fromkeys(losses, 100) | dict(tokens or {})
    validation = {
        domain: {"loss": loss, "standard_error": 0.1, "documents": 10, "tokens": counts[domain]}
        for domain, loss in losses.items()
    }
    first = {
        "kind": "validation",
        "step": 0,
        "tokens": 0,
        "validation": {name: value | {"loss": 9.0} for name, value in validation.items()},
    }
    last = {"kind": "validation", "step": 8, "tokens": 800, "validation": validation}
    every = [first, STEP, *lines, last]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in every))
    return folder
