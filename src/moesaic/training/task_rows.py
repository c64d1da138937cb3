"""Tasks as training data: their requests, as `eval` asks them, in files of prompts and answers."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from moesaic.common.errors import MoesaicError
from moesaic.data.calibration import in_split
from moesaic.data.recipe import DataRecipe, SourceRecipe

if TYPE_CHECKING:
    from moesaic.evaluation.requests import Request

_SPLIT_SEED = 0
"""The seed that `select --split` and `eval --selection-share` draw by unless they are told another one."""


@contextmanager
def tasks_as_files(recipe: DataRecipe) -> Iterator[DataRecipe]:
    """The recipe with a file in the place of every task, as long as the context lasts.

    Raises: `MoesaicError` for a task that is none, has no such rows, or needs a package or data set that is not there.
    """
    if all(source.task is None for source in (*recipe.sources, *recipe.validation)):
        yield recipe
        return
    with TemporaryDirectory() as folder:

        def written(kind: str, sources: tuple[SourceRecipe, ...]) -> tuple[SourceRecipe, ...]:
            place = Path(folder) / kind
            place.mkdir()
            return tuple(
                source if source.task is None else _as_file(source, f"data.{kind}.{number}", place)
                for number, source in enumerate(sources)
            )

        yield replace(
            recipe,
            sources=written("sources", recipe.sources),
            validation=written("validation", recipe.validation),
        )


def _as_file(source: SourceRecipe, key: str, folder: Path) -> SourceRecipe:
    file = folder / f"{key}.jsonl"
    lines = (json.dumps({"prompt": one.prompt, "answer": one.answer}) + "\n" for one in _rows(source, key))
    file.write_text("".join(lines), encoding="utf-8")
    return replace(
        source, path=str(file), task=None, shots=None, data_dir=None, split=None, prompt="prompt", completion="answer"
    )


def _rows(source: SourceRecipe, key: str) -> "list[Request]":
    from moesaic.evaluation.requests import task_requests

    trained = key.startswith("data.sources")
    try:
        found = task_requests(
            str(source.task),
            data_dir=source.data_dir,
            shots=source.shots,
            training=trained and source.split is None,
        )
    except MoesaicError as error:
        raise MoesaicError(f"{key}: {error}") from error
    if source.split is None:
        return found
    kept = [one for one in found if in_split(one.digest, share=source.split, seed=_SPLIT_SEED) == trained]
    if not kept:
        raise MoesaicError(f"{key}: no row of {source.task} is left by split {source.split:g}; take another share")
    return kept


def refuse_missing_rows(source: SourceRecipe, *, trained: bool) -> None:
    """Refuse a task that is none or whose rows are not there, without reading them; the hub is not asked.

    Raises: `MoesaicError`.
    """
    from moesaic.evaluation.requests import require_rows

    require_rows(str(source.task), data_dir=source.data_dir, training=trained and source.split is None)
