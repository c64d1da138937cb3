"""Inputs of a report that no training and no evaluation was needed for."""

import json
from pathlib import Path
from typing import Any


def write_run(folder: Path, *, steps: int = 40, domains: tuple[str, ...] = ("math", "code"), moe: bool = True) -> Path:
    """A training run whose loss falls from 3 by 0.01 a step, validated at the start and every 20 steps."""
    folder.mkdir(parents=True)
    lines = [_validation(0, domains)]
    for step in range(1, steps + 1):
        loss = 3 - 0.01 * step
        line: dict[str, Any] = {
            "kind": "step",
            "step": step,
            "tokens": 100 * step,
            "loss": loss,
            "domain_loss": dict.fromkeys(domains, loss),
            "grad_norm": 1.0,
            "lr": 1e-3,
            "step_tokens": 100,
        }
        if moe:
            line |= {"balance_loss": 1.1, "router_z_loss": 2.0}
            line |= {"load_entropy": 0.9, "largest_share": 0.3, "dead_experts": max(0, 3 - step)}
        lines.append(line | {"timing": {"seconds": 0.5, "tokens_per_second": 200.0, "flops_per_second": 1e9}})
        if step % 20 == 0:
            lines.append(_validation(step, domains))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "recipe.yaml").write_text(
        "model: {family: llama, moe: {experts: 8}}\nrouting: null\ndata:\n  sources:\n    - {path: a, domain: math}\n"
    )
    return folder


def _validation(step: int, domains: tuple[str, ...]) -> dict[str, Any]:
    measured = {"loss": 3 - 0.01 * step, "standard_error": None, "documents": 1, "tokens": 50}
    return {"kind": "validation", "step": step, "tokens": 100 * step, "validation": dict.fromkeys(domains, measured)}


def results_document(
    *, name: str = "./moe", score: float = 0.5, kept: int = 8, weights: str = "w" * 32
) -> dict[str, Any]:
    """What `moesaic eval` writes: two tasks and held-out text, one task missing, an average over what is there."""

    def task(value: float) -> dict[str, Any]:
        return {
            "title": "A task",
            "metric": "acc",
            "higher_is_better": True,
            "shots": 5,
            "selection": None,
            "identity": {"rows": "hash"},
            "samples": 100,
            "score": value,
            "standard_error": 0.02,
            "chance": 0.25,
            "metrics": {"acc": {"value": value, "standard_error": 0.02}},
            "parts": {},
            "missing_parts": [],
            "seconds": 1.0,
        }

    text = {
        "loss": 3.0,
        "standard_error": 0.1,
        "perplexity": 20.1,
        "bits_per_byte": 1.25,
        "bits_per_byte_error": 0.01,
        "documents": 4,
        "tokens": 400,
        "bytes": 2000,
    }
    held_out = task(1.25) | {
        "title": "bits per byte",
        "metric": "bits_per_byte",
        "higher_is_better": False,
        "text": {"all": text, "domains": {"math": text, "code": text}, "sources": {}},
    }
    return {
        "format": "moesaic-results/1",
        "checkpoint": {
            "name": name,
            "revision": None,
            "model_type": "moesaic_llama",
            "weights_hash": weights,
            "sample_hash": "s" * 32,
            "verb": "extract" if kept < 8 else "train",
            "made_from": [],
            "full_model": "s" * 32,
            "experts": {"kept": kept, "of": 8},
        },
        "settings": {"limit": None, "seed": 1234},
        "versions": {"moesaic": "0.1.0"},
        "suites": {
            "small": {"about": "Two tasks.", "version": 1, "tasks": ["arc_easy", "piqa", "boolq", "perplexity"]}
        },
        "tasks": {"arc_easy": task(score), "piqa": task(score + 0.1), "perplexity": held_out},
        "missing": {"boolq": "boolq.jsonl is not there"},
        "averages": [
            {
                "suite": "small",
                "name": "small average",
                "score": score + 0.05,
                "standard_error": 0.014,
                "over": ["arc_easy", "piqa"],
                "missing": ["boolq"],
                "partial": [],
                "complete": False,
            }
        ],
    }


def write_results(file: Path, **settings: Any) -> Path:
    """Write a results file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(results_document(**settings)))
    return file
