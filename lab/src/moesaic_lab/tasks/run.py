"""Run a task by its name."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from moesaic.common.recipe import load_recipe
from moesaic_lab.rows import write_rows
from moesaic_lab.tasks import accuracy, inspected, measure, pools, premise, prepare, subsets

_TASKS: Mapping[str, tuple[type, Callable[[Any], Any]]] = {
    "prepare": (prepare.Prepare, prepare.run),
    "subsets": (subsets.Subsets, subsets.run),
    "accuracy": (accuracy.Accuracy, accuracy.run),
    "inspected": (inspected.Inspected, inspected.run),
    "measure": (measure.Measure, measure.run),
    "pools": (pools.Pools, pools.run),
    "premise": (premise.Premise, premise.run),
}
"""Name -> settings, and what to do with them: rows come back, or None."""

TASKS = tuple(_TASKS)


def run_task(name: str, settings: Path) -> None:
    """Do the task and write the rows that it gives."""
    kind, do = _TASKS[name]
    loaded: Any = load_recipe(kind, settings)
    rows = do(loaded)
    if rows is not None:
        write_rows(Path(loaded.rows), rows)
