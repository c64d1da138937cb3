"""What `select` calibrates on: files of text, and the requests of tasks; every one a domain. Torch-free."""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moesaic.common import seeds
from moesaic.common.errors import MoesaicError
from moesaic.data.calibration import Calibration, domain_of, draw, in_split
from moesaic.evaluation.own import SUFFIXES, task_name
from moesaic.selection.recipe import SelectRecipe

LITTLE = 0.01
"""A domain with less than this share of the largest one's tokens says next to nothing; that is said."""


@dataclass(frozen=True, kw_only=True)
class CalibrationSet:
    """The texts of one domain."""

    domain: str
    path: str | None
    """Where the data or the task file lies, which tells domains of one name apart; None where the domain was named."""
    texts: list[str]
    rows: list[str]
    """Digests of the rows that must not be evaluated on."""


def calibration_sets(recipe: SelectRecipe, *, quiet: bool = True) -> list[CalibrationSet]:
    """The texts of all data and tasks.

    Raises:
        MoesaicError: as `draw`, and `task_requests`.
    """
    files = [_of_file(path, recipe, quiet=quiet) for path in recipe.data]
    return [*files, *(_of_task(task, recipe) for task in recipe.task)]


def refuse_wrong_settings(recipe: SelectRecipe) -> None:
    """Refuse numbers that no data could be drawn by, before the checkpoint is looked at."""
    for path in recipe.data or recipe.task:
        calibration_of(path, recipe)


def calibration_of(path: str, recipe: SelectRecipe) -> Calibration:
    """The settings of one set of data."""
    return Calibration(
        path=path,
        template=recipe.template,
        examples=recipe.examples,
        shots=recipe.shots or 0,
        split=recipe.split,
        only=recipe.only,
        seed=recipe.seed,
    )


def _of_file(path: str, recipe: SelectRecipe, *, quiet: bool) -> CalibrationSet:
    drawn = draw(calibration_of(path, recipe), quiet=quiet)
    named = recipe.domain is not None
    return CalibrationSet(
        domain=recipe.domain if recipe.domain is not None else domain_of(path),
        path=None if named else str(Path(path).expanduser().resolve()),
        texts=drawn.texts,
        rows=drawn.rows,
    )


def _of_task(task: str, recipe: SelectRecipe) -> CalibrationSet:
    """Requests as `eval` asks them, of the share and number that are asked for."""
    from moesaic.evaluation.requests import task_requests

    asked = task_requests(task, data_dir=recipe.data_dir, shots=recipe.shots)
    if recipe.split is not None:
        asked = [one for one in asked if in_split(one.digest, share=recipe.split, seed=recipe.seed)]
    placed = [(seeds.order("sample", recipe.seed, place), one) for place, one in enumerate(asked)]
    if recipe.examples is not None:
        placed = heapq.nsmallest(recipe.examples, placed, key=lambda one: one[0])
    if not placed:
        raise MoesaicError(f"--task {task}: no row is in the share of --split {recipe.split:g}")
    return CalibrationSet(
        domain=recipe.domain or task_name(task),
        path=str(Path(task).expanduser().resolve())
        if recipe.domain is None and Path(task).suffix in SUFFIXES
        else None,
        texts=[one.text for _, one in placed],
        rows=[one.digest for one in asked] if recipe.split is not None else [one.digest for _, one in placed],
    )


def data_details(recipe: SelectRecipe, sets: Sequence[CalibrationSet]) -> dict[str, Any]:
    """What a selection says of its data: the settings, and the rows by their content."""
    data: dict[str, Any] = {"seed": recipe.seed, "shots": recipe.shots or 0}
    if recipe.data:
        data["path"] = recipe.data[0] if len(recipe.data) == 1 else list(recipe.data)
    if recipe.task:
        data["task"] = recipe.task[0] if len(recipe.task) == 1 else list(recipe.task)
    for key in ("template", "examples", "split", "data_dir"):
        if getattr(recipe, key) is not None:
            data[key] = getattr(recipe, key)
    if recipe.only is not None:
        data["only"] = list(recipe.only)
    return data | {"rows": "".join(digest for one in sets for digest in one.rows)}


def little_said(tokens: Mapping[str, int]) -> list[str]:
    """A line for each domain that has next to no text beside the largest."""
    largest = max(tokens.values(), default=0)
    return [
        f"{domain}: only {number:,} tokens, the largest domain has {largest:,}; domains are weighted alike, so its "
        "scores count as much and rest on little text"
        for domain, number in tokens.items()
        if number < LITTLE * largest
    ]
