"""An experiment written down: steps, the recipes they read, and what each run is called in the results. No torch."""

import json
import shlex
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from moesaic.common.errors import MoesaicError
from moesaic.common.files import explained, load_json, write_file
from moesaic.common.recipe import load_document

PLAN_FILE = "plan.json"
COMMANDS_FILE = "commands.sh"
FORMAT = "moesaic-lab/1"
ROWS = "rows"
"""Folder of the rows that tasks write."""
TOKENIZER = "data/tokenizer"
REPORT = "report"
"""Name of the last step."""
ENVIRONMENT = {"MOESAIC_CACHE": "cache", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
"""Of every step: the experiment's own token cache, one thread, no network."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """Some commands that run one after the other in one process, in the experiment's folder."""

    name: str
    commands: tuple[tuple[str, ...], ...]
    """Arguments of `moesaic`."""
    needs: tuple[str, ...] = ()
    """Steps that come before."""
    files: dict[str, str] = field(default_factory=dict)
    """Recipes that the commands read: path below the experiment's folder -> text."""
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Training runs: folder -> the labels of its numbers (seed, model, ...)."""
    tokens: int = 0
    """That its training runs see."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All steps of an experiment, in an order in which they can run."""

    experiment: str
    data: str | None
    """Folder of --data; None is the generated domains."""
    domains: tuple[str, ...]
    seeds: int
    scale: dict[str, Any]
    """Plain values of the scale's parts that the experiment uses."""
    steps: tuple[Step, ...]
    notices: tuple[str, ...] = ()
    """What the plan leaves out or changes of the scale, and why."""

    def __post_init__(self) -> None:
        seen = set[str]()
        for step in self.steps:
            assert step.name not in seen, f"two steps are called {step.name}"
            assert seen.issuperset(step.needs), f"{step.name} needs {set(step.needs) - seen}, which don't come before"
            seen.add(step.name)


def write_plan(plan: Plan, out: Path) -> None:
    """Write plan, recipes and commands into OUT.

    Steps of an earlier plan in OUT must be the same here; new ones (more seeds) may come on top. The plan comes first,
    so that the folder is known for what it is wherever the rest stops, and the same plan writes all of it again.

    Raises:
        MoesaicError: OUT holds something else, or an experiment with other settings.
    """
    check_folder(plan, out)
    with explained(out):
        write_file(out / PLAN_FILE, json.dumps({"format": FORMAT, **asdict(plan)}, indent=1))
        for unfinished in _unfinished(out):
            unfinished.unlink()
        (out / "steps").mkdir(exist_ok=True)
        for step in plan.steps:
            for name, text in step.files.items():
                (out / name).parent.mkdir(parents=True, exist_ok=True)
                (out / name).write_text(text, encoding="utf-8")
        (out / COMMANDS_FILE).write_text(_script(plan.steps), encoding="utf-8")


def _unfinished(out: Path) -> list[Path]:
    """What `write_file` leaves of a plan where it is killed."""
    return list(out.glob(f".{PLAN_FILE}.moesaic-*-tmp"))


def read_plan(out: Path) -> Plan:
    """The plan in OUT.

    Raises: `MoesaicError` where there is none.
    """
    if not (out / PLAN_FILE).is_file():
        raise MoesaicError(f"{out}: holds no experiment; `moesaic lab run NAME {out}` makes one")
    values = load_json(out / PLAN_FILE)
    if values.pop("format", None) != FORMAT:
        raise MoesaicError(f"{out / PLAN_FILE}: not the plan of an experiment of this version")
    return load_document(Plan, values, str(out / PLAN_FILE), way_out="run `moesaic lab run` in another folder")


def check_folder(plan: Plan, out: Path) -> None:
    """Refuse an OUT that holds something else, or steps that the plan would run differently."""
    if not out.exists():
        return
    if not out.is_dir():
        raise MoesaicError(f"{out}: is a file, choose another folder")
    if set(out.iterdir()) <= {*_unfinished(out)}:
        return
    before = read_plan(out)
    if before.experiment != plan.experiment:
        raise MoesaicError(f"{out}: holds the experiment {before.experiment}, choose another OUT for {plan.experiment}")
    now = {step.name: step for step in plan.steps}
    for step in before.steps:
        if step.name == REPORT:
            continue  # it needs all others, so it changes with the number of seeds
        if step != now.get(step.name):
            raise MoesaicError(
                f"{out}: was started with other settings (step {step.name}); use the same --data and --scale and at "
                "least as many --seeds, or another OUT"
            )


def _script(steps: Iterable[Step]) -> str:
    """What `moesaic lab run` runs, for people who want to run a part of it by hand."""
    lines = ["#!/bin/sh", "# Every command of this experiment, to be run in this folder.", "set -e"]
    lines += [f"export {name}={value}" for name, value in ENVIRONMENT.items()]
    for step in steps:
        lines += ["", f"# {step.name}", *(f"moesaic {shlex.join(command)}" for command in step.commands)]
    return "\n".join(lines) + "\n"


def train_file(domain: str) -> str:
    """Training documents, below the experiment's folder."""
    return f"data/{domain}.train.jsonl"


def valid_file(domain: str) -> str:
    """Held-out documents that losses are measured on."""
    return f"data/{domain}.valid.jsonl"


def selection_file(folder: str, domain: str, documents: int, share: float) -> str:
    """Where the selection by `router` is kept, for `extract`."""
    return f"{folder}/{domain}-{documents}-{100 * share:g}.json"
