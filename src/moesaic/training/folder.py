"""Before a run: may OUT be written, what states are in it, are the data there, does the recipe still say the same.

No torch: `--dry-run` asks these too.
"""

import fcntl
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moesaic.common.errors import MoesaicError
from moesaic.common.files import explained
from moesaic.common.place import check_place
from moesaic.common.recipe import recipe_values
from moesaic.data.files import PREFIX, find_files
from moesaic.training.recipe import TrainRecipe
from moesaic.training.task_rows import refuse_missing_rows

RECIPE_FILE = "recipe.yaml"
RUN_FILE = "run.json"
"""Of a state; it comes last."""
UNFINISHED = ".tmp"
"""At the end of the name of a state that is being written."""
_LOCK = "lock"
_EARLY = {RECIPE_FILE, "metrics.jsonl", "state"}
"""What a run leaves that was stopped before its first state."""

MAY_CHANGE = (
    "budget", "checkpoint", "validation.every_steps", "trackers", "parallel", "batch.micro_sequences", "compile",
    "expand",
)  # fmt: skip
"""Keys that may differ on `--resume`: they say how long, how often and on what, not what a step computes.

Of `expand`, what lies ahead may change; `refuse_changed_expansions` looks at what was done.

`parallel` and `batch.micro_sequences` shape the global micro-batch, which the balancing loss (and nothing else) sees.
"""


@contextmanager
def locked_folder(out: Path, *, resume: bool, overwrite: bool) -> Iterator[None]:
    """Make OUT a folder that this run alone writes, or refuse; a new one that nothing came into goes again.

    What it may hold: see `refuse_content`.
    """
    refuse_content(out, resume=resume, overwrite=overwrite)
    with explained(out):
        (out / "state").mkdir(parents=True, exist_ok=True)
        lock = (out / "state" / _LOCK).open("a")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise MoesaicError(f"{out}: another run is writing it") from error
        try:
            yield
        finally:
            if not _content(out):
                shutil.rmtree(out, ignore_errors=True)


def refuse_content(out: Path, *, resume: bool, overwrite: bool) -> None:
    """Refuse an OUT that is a file, or holds what neither flag lets go.

    `resume` goes on from a state, or starts afresh over what a run leaves that was stopped before its first state.
    """
    names = _content(out)
    if not names or (resume and (list_states(out / "state") or names <= _EARLY)):
        return
    if not overwrite:
        if resume:
            raise MoesaicError(
                f"{out}: has no run state to go on with and holds other files, which a new run would remove; choose "
                "another OUT, or --overwrite a run or checkpoint"
            )
        raise MoesaicError(f"{out}: is not empty; --resume goes on with a run, --overwrite starts it again")
    if not names & {RECIPE_FILE, "config.json"}:
        raise MoesaicError(f"{out}: holds no run and no checkpoint, so --overwrite does not remove it")


def list_states(folder: Path) -> list[Path]:
    """Complete states, oldest first."""
    return sorted(path.parent for path in folder.glob(f"step-*/{RUN_FILE}") if path.parent.suffix != UNFINISHED)


def refuse_overlap(out: Path, recipe: TrainRecipe) -> None:
    """Refuse an OUT that can be none, or is, holds or lies in the model, the tokenizer or the data that are read."""
    check_place(out)
    target = out.resolve()
    read = [source for source in (recipe.model, recipe.tokenizer) if isinstance(source, str)]
    data = [
        name for one in (*recipe.data.sources, *recipe.data.validation) for name in (one.name, one.data_dir) if name
    ]
    for name in (*read, *data):
        for source in _places(name):
            if source.exists() and (source.is_relative_to(target) or target.is_relative_to(source)):
                raise MoesaicError(f"{out}: is, holds or lies in {name}, which the recipe reads; choose another OUT")


def require_local_files(recipe: TrainRecipe) -> None:
    """Refuse (MoesaicError) sources and held-out sets that are neither on the hub nor files or tasks with rows here."""
    for kind in ("sources", "validation"):
        for number, source in enumerate(getattr(recipe.data, kind)):
            if source.path.startswith(PREFIX):
                continue
            try:
                if source.task is None:
                    find_files(source, quiet=True)
                else:
                    refuse_missing_rows(source, trained=kind == "sources")
            except MoesaicError as error:
                key = "path" if source.task is None else "task"
                raise MoesaicError(f"data.{kind}.{number}.{key}: {error}") from error


def _places(name: str) -> list[Path]:
    """What a path in a recipe may mean: data begin with a home folder where it says `~`, models with a folder `~`."""
    path = Path(name)
    try:
        return [path.resolve(), path.expanduser().resolve()]
    except RuntimeError as error:
        raise MoesaicError(f"{name}: there is no such home folder; write the path in full") from error


def _content(out: Path) -> set[str]:
    """Names of what is in OUT, apart from a state folder with nothing in it."""
    if not out.exists():
        return set()
    if not out.is_dir():
        raise MoesaicError(f"{out}: is a file, choose another folder")
    names = {path.name for path in out.iterdir()}
    if "state" in names and not {path.name for path in (out / "state").iterdir()} - {_LOCK}:
        names.remove("state")
    return names


def clear_folder(out: Path) -> None:
    """Remove what an earlier run left in OUT; the lock stays. Links go, and what they lead to stays.

    What makes a folder a checkpoint or a state goes first, so that nothing looks like one if this is cut short, and
    the recipe last, so that --overwrite may then begin again.
    """
    states = [state for state in list_states(out / "state") if not state.is_symlink()]
    kept = {out / "state", out / "state" / _LOCK, out / RECIPE_FILE}
    others = {*out.iterdir(), *(out / "state").iterdir()} - kept
    for path in (out / "config.json", *(state / RUN_FILE for state in states), *others, out / RECIPE_FILE):
        with explained(path):
            remove(path)


def remove(path: Path) -> None:
    """Remove a file, a folder with all that is in it, or a link, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def refuse_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Refuse to resume with a recipe that would have computed other steps; name the first key that differs."""
    before, after = dict(_leaves(old)), dict(_leaves(new))
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) == after.get(key) or any(_is_within(key, parent) for parent in MAY_CHANGE):
            continue
        raise MoesaicError(
            f"{key}: was {before.get(key)} when this run started and is {after.get(key)} now; "
            f"--resume allows changes in {', '.join(MAY_CHANGE)}; use another OUT for another run"
        )


def refuse_changed_data(old: Sequence[str], new: Sequence[str], paths: Sequence[str], *, harm: str) -> None:
    """Refuse to resume with sources whose documents, or their tokens, are others; `harm` is what would come of it."""
    for path, before, after in zip(paths, old, new, strict=True):
        if before != after:
            raise MoesaicError(
                f"{path}: its content or the tokenizer changed since this run started, so {harm}; bring it back, or "
                "use another OUT for another run"
            )


def refuse_changed_expansions(
    expansions: Sequence[Mapping[str, Any]], step: int, recipe: TrainRecipe, steps: Sequence[int]
) -> None:
    """Refuse to resume where an expansion that was done is another now, or one that was not done would be too late.

    Args:
        expansions: records of those that were done.
        step: where the run goes on.
        recipe: what it would go on with.
        steps: after how many steps its expansions come.
    """
    for number, record in enumerate(expansions):
        done = f"expand.{number}: was done after step {record['step']:,}"
        if number >= len(steps):
            raise MoesaicError(f"{done} and is missing now; put it back, or use another OUT for another run")
        if steps[number] != record["step"]:
            raise MoesaicError(f"{done} and would be after step {steps[number]:,} now; say its moment as `step`")
        if recipe_values(recipe.transitions[number]) | _MOMENT != record["transition"] | _MOMENT:
            raise MoesaicError(f"{done} with other settings than the recipe has now; use another OUT for another run")
    for number in range(len(expansions), len(steps)):
        if steps[number] < step:
            raise MoesaicError(
                f"expand.{number}: is after step {steps[number]:,}, but this run is at step {step:,}; "
                "choose a later moment"
            )


_MOMENT = dict.fromkeys(("step", "tokens", "fraction"))
"""How the moment is said may change, as long as it is the same one."""


def _is_within(key: str, parent: str) -> bool:
    return key == parent or key.startswith(f"{parent}.")


def _leaves(values: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of everything in a recipe; an empty container is a value itself."""
    items = list(values.items()) if isinstance(values, Mapping) else list(enumerate(values))
    for name, value in items:
        key = f"{prefix}{name}"
        if isinstance(value, (Mapping, list, tuple)) and value:
            yield from _leaves(value, f"{key}.")
        else:
            yield key, value
