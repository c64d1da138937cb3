"""What `moesaic eval` says at the end. Torch-free."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class EvalResult:
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

    def score(self, task: str) -> float:
        """The score of a task, as a share (or bits per byte)."""
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


def _task_line(name: str, task: Mapping[str, Any]) -> str:
    if "text" in task:
        return "\n".join(_text_lines(name, task["text"]))
    parts = f" ({len(task['parts'])} parts, {len(task['missing_parts'])} missing)" if task["missing_parts"] else ""
    shots = f"{task['shots']} shots, {task['samples']} rows"
    return f"{name}{parts}: {_share(task['score'], task['standard_error'])} {task['metric']}, {shots}"


def _text_lines(name: str, text: Mapping[str, Any]) -> list[str]:
    rows = {"all": text["all"], **text["domains"]}
    return [
        f"{name} of {domain}: {_number(row['perplexity'], 3)}, {_number(row['bits_per_byte'], 4)} bits per byte, "
        f"loss {_number(row['loss'], 4)}, {row['documents']} documents, {row['tokens']:,} tokens"
        for domain, row in rows.items()
    ]


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _average_line(average: Mapping[str, Any]) -> str:
    over = f"over {', '.join(average['over']) or 'nothing'}"
    lacking = [*average["missing"], *(f"parts of {name}" for name in average["partial"])]
    incomplete = f"; not the paper's: without {', '.join(lacking)}" if lacking else ""
    return f"{average['name']}: {_share(average['score'], average['standard_error'])} {over}{incomplete}"


def _share(score: float | None, error: float | None) -> str:
    if score is None:
        return "-"
    return f"{100 * score:.2f}" if error is None else f"{100 * score:.2f} ± {100 * error:.2f}"
