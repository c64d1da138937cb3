"""results.json: what was measured, on what, with which settings. Torch-free.

Finished tasks are kept by a second call with the same settings; one with others is refused, so no file mixes them.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from moesaic.checkpoint.record import fingerprint, read_provenance, versions
from moesaic.checkpoint.results import FORMAT, mean_error, read_results
from moesaic.checkpoint.source import Checkpoint, open_checkpoint
from moesaic.common.errors import MoesaicError
from moesaic.common.files import write_file
from moesaic.common.numbers import shown
from moesaic.common.shown import Shown
from moesaic.evaluation.recipe import Average, EvalRecipe, Suite
from moesaic.families.identity import sample_hash
from moesaic.families.moe import detect_moe


def new_document(opened: Checkpoint, recipe: EvalRecipe) -> dict[str, Any]:
    """A results file without results; reads all of the checkpoint for its hash."""
    record = read_provenance(opened.path) or {}
    sample, lineage = sample_hash(opened), record.get("lineage")
    full_model = lineage[-1]["model"]["sample_hash"] if lineage else sample  # of which this is a subset, or itself
    return {
        "format": FORMAT,
        "checkpoint": {
            "name": opened.name,
            "revision": opened.revision,
            "model_type": opened.config.get("model_type"),
            "weights_hash": fingerprint(opened),
            "sample_hash": sample,
            "verb": record.get("verb"),
            "made_from": _made_from(record),
            "full_model": full_model,
            "experts": _experts(opened, record),
        },
        "settings": {
            "limit": recipe.limit,
            "seed": recipe.seed,
            "batch_size": recipe.batch_size,
            "device": recipe.device or "auto",
            "dtype": recipe.dtype,
            "chat_template": False,
        },
        "versions": versions() | {"lm_eval": version("lm_eval")},
        "suites": {},
        "tasks": {},
        "missing": {},
        "averages": [],
    }


def _made_from(record: Mapping[str, Any]) -> list[str]:
    """Hashes of the checkpoints that one was made from, of the weights or of a sample of them, as far as known."""
    found = [one["model"]["sample_hash"] for one in record.get("lineage") or []]
    for source in record.get("sources") or []:
        if source.get("weights_hash"):
            found.append(source["weights_hash"])
        elif Path(str(source.get("path"))).is_dir():
            with contextlib.suppress(MoesaicError):
                found.append(sample_hash(open_checkpoint(source["path"])))
    return found


def _experts(opened: Checkpoint, record: Mapping[str, Any]) -> dict[str, int] | None:
    """Routed experts per layer, and of how many where the checkpoint is an extracted subset; None of a dense model."""
    try:
        number = detect_moe(opened).num_experts
    except MoesaicError:
        return None
    lineage = record.get("lineage") or []
    return {"kept": number, "of": lineage[-1]["model"]["num_experts"] if lineage else number}


def average(rule: Average, suite: Suite, tasks: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The unweighted mean of a suite's tasks that have a score, for the results file; says which have none.

    Without all of its tasks, whole, it is not the paper's average, and `complete` is false. The standard error is that
    of independent tasks: root of the sum of squared errors, over their number; None where one is unknown.
    """
    names = [task.name for task in suite.tasks if task.name not in rule.without]
    over = [name for name in names if name in tasks and tasks[name]["score"] is not None]
    missing = [name for name in names if name not in over]
    partial = [name for name in over if tasks[name].get("missing_parts")]
    return {
        "name": rule.name,
        "score": sum(tasks[name]["score"] for name in over) / len(over) if over else None,
        "standard_error": mean_error([tasks[name]["standard_error"] for name in over]),
        "over": over,
        "missing": missing,
        "partial": partial,
        "complete": not missing and not partial,
    }


def write_results(path: Path, document: Mapping[str, Any]) -> None:
    """Write a results file in one step: a reader sees the old one or the new one."""
    write_file(path, json.dumps(document, indent=1, allow_nan=False) + "\n")


def continued(path: Path, new: Mapping[str, Any], identities: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The results file that is there, to add to.

    Args:
        path: of the file.
        new: what would be begun in its place.
        identities: task -> what identifies its numbers: data, shots, metric.

    Raises:
        MoesaicError: it is of another model, other settings or other versions, or has a task of another identity.
    """
    old = read_results(path)
    theirs, ours = old["checkpoint"], new["checkpoint"]
    if theirs["weights_hash"] != ours["weights_hash"]:
        raise MoesaicError(
            f"{path}: has results of {theirs['name']} with other weights (hash {theirs['weights_hash'][:12]}) than "
            f"{ours['name']} has (hash {ours['weights_hash'][:12]}); use another --out, or --overwrite to begin anew"
        )
    for group in ("settings", "versions"):
        for key, before, now in _differences(old[group], new[group]):
            raise MoesaicError(
                f"{path}: was measured with {key} {before}, this call has {now}; use another --out, or --overwrite "
                "to begin anew"
            )
    for name, identity in identities.items():
        if name not in old["tasks"]:
            continue
        entry = old["tasks"][name]
        for key, before, now in _differences({**entry["identity"], "metric": entry["metric"]}, identity):
            raise MoesaicError(
                f"{path}: {name} was measured with {key} {_short(before)}, this call has {_short(now)}; use another "
                "--out, or --overwrite to begin anew"
            )
    return old


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for key in sorted({*before, *now}):
        if before.get(key) != now.get(key):
            yield key, before.get(key), now.get(key)


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def record_suite(document: dict[str, Any], suite: Suite, missing: Mapping[str, str]) -> None:
    """Put the suite, what is missing of it and its averages into the document."""
    tasks = document["tasks"]
    document["suites"][suite.name] = {
        "about": suite.about,
        "version": suite.version,
        "tasks": [task.name for task in suite.tasks],
    }
    kept = {name: reason for name, reason in document["missing"].items() if name not in tasks}
    document["missing"] = kept | {name: reason for name, reason in missing.items() if name not in tasks}
    others = [one for one in document["averages"] if one["suite"] != suite.name]
    own = [{"suite": suite.name} | average(rule, suite, tasks) for rule in suite.averages]
    document["averages"] = others + own


# --- what `moesaic eval` says at the end ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, repr=False)
class EvalResult(Shown):
    """The results of a call, with those of earlier calls into the same file."""

    out: Path | None
    suite: str
    document: Mapping[str, Any]
    """What the results file holds."""
    missing: Mapping[str, str]
    """Task of the suite -> why it was not measured."""
    ran: tuple[str, ...]
    """Tasks that this call measured, or, in a dry run, would look at."""
    dry_run: bool

    def score(self, task: str) -> float | None:
        """The score of a task, as a share (or bits per byte); None where the model did not give finite logits."""
        return self.document["tasks"][task]["score"]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for `--json`."""
        return {
            "out": None if self.out is None else str(self.out),
            "suite": self.suite,
            "ran": list(self.ran),
            "missing": dict(self.missing),
            "dry_run": self.dry_run,
            "results": dict(self.document),
        }

    def lines(self) -> list[str]:
        """The same for people."""
        tasks = self.document["tasks"]
        names = self.document["suites"].get(self.suite, {}).get("tasks", [])
        lines = [_task_line(name, tasks[name]) for name in names if name in tasks]
        if self.dry_run:
            lines += [f"{name}: would be measured" for name in self.ran if name not in tasks]
        lines += [f"{name}: missing: {reason}" for name, reason in self.missing.items()]
        lines += [_average_line(one) for one in self.document["averages"] if one["suite"] == self.suite]
        if self.out is not None and not self.dry_run:
            lines.append(f"written to {self.out}")
        return lines

    def brief(self) -> str:
        """What was measured."""
        done = f"{len(self.ran)} task{'' if len(self.ran) == 1 else 's'} {'to measure' if self.dry_run else 'measured'}"
        known = len(self.document["tasks"])
        return f"{self.suite}: {done}, {known} in {self.out or 'the results'}, {len(self.missing)} missing"

    def rows(self) -> list[dict[str, Any]]:
        """A row per task and per part of it (subject, domain); the whole task's part is empty."""
        rows = []
        for name, task in self.document["tasks"].items():
            domains = {
                domain: {"score": one["bits_per_byte"], "standard_error": one["bits_per_byte_error"]}
                | {"samples": one["documents"]}
                for domain, one in task.get("text", {}).get("domains", {}).items()
            }
            for part, one in {"": task, **task.get("parts", {}), **domains}.items():
                figures = {key: one[key] for key in ("score", "standard_error", "samples")}
                rows.append({"task": name, "part": part, "metric": task["metric"], **figures})
        return rows


def _task_line(name: str, task: Mapping[str, Any]) -> str:
    if "text" in task:
        return "\n".join(_text_lines(name, task["text"], task.get("not_finite")))
    why = f" ({task['not_finite']})" if task.get("not_finite") else ""
    parts = f" ({len(task['parts'])} parts, {len(task['missing_parts'])} missing)" if task["missing_parts"] else ""
    shots = f"{task['shots']} shots, {task['samples']} rows"
    return f"{name}{parts}: {_share(task['score'], task['standard_error'])} {task['metric']}, {shots}{why}"


def _text_lines(name: str, text: Mapping[str, Any], not_finite: str | None) -> list[str]:
    rows = {"all": text["all"], **text["domains"]}
    return [
        f"{name} of {domain}: {shown(row['perplexity'], '.3f')}, {shown(row['bits_per_byte'], '.4f')} bits per byte, "
        f"loss {shown(row['loss'], '.4f')}, {row['documents']} documents, {row['tokens']:,} tokens"
        for domain, row in rows.items()
    ] + ([] if not_finite is None else [f"{name}: {not_finite}"])


def _average_line(average: Mapping[str, Any]) -> str:
    over = f"over {', '.join(average['over']) or 'nothing'}"
    lacking = [*average["missing"], *(f"parts of {name}" for name in average["partial"])]
    incomplete = f"; not the paper's: without {', '.join(lacking)}" if lacking else ""
    return f"{average['name']}: {_share(average['score'], average['standard_error'])} {over}{incomplete}"


def _share(score: float | None, error: float | None) -> str:
    if score is None:
        return "-"
    return f"{100 * score:.2f}" if error is None else f"{100 * score:.2f} ± {100 * error:.2f}"
