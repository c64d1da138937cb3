"""Every document that the tool reads, made once, and the command that reads it."""

import contextlib
import io
import json
import signal
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from moesaic.checkpoint.source import open_checkpoint
from moesaic.cli import app as cli
from tests.fuzz.edits import edited
from tests.tiny_inspection import write_tiny_inspection
from tests.tiny_models import save_tiny
from tests.tiny_moes import save_tiny_moe
from tests.tiny_report import write_results, write_run
from tests.tiny_training import save_tokenizer, tiny_recipe, write_documents

SECONDS = 30
"""More than any command here takes on a slow machine, by far; what takes longer hangs."""
_UPCYCLE = "upcycle dense OUT --method sparse --experts 4 --dry-run"
_GENERATE = "generate {} hello --max-new-tokens 2 --device cpu"


@dataclass(frozen=True, kw_only=True)
class Document:
    """One file and what reads it; OUT in the command is a path that must not exist after a refusal."""

    name: str
    file: str
    """Below the workspace."""
    command: str
    quick: bool = True
    """Whether one reading is well below a second."""


DOCUMENTS = tuple(
    Document(name=name, file=file, command=command, quick=quick)
    for name, file, command, quick in (
        ("selection", "s.json", "extract moe s.json OUT --dry-run", True),
        ("statistics", "st.json", "select moe OUT --keep 4 --stats st.json", True),
        ("results, compared", "r.json", "compare r.json", True),
        ("results, reported", "r.json", "report r.json OUT.html", True),
        ("metrics, compared", "run/metrics.jsonl", "compare run", True),
        ("metrics, reported", "run/metrics.jsonl", "report run OUT.html", True),
        ("recipe of a run", "run/recipe.yaml", "report run OUT.html", True),
        ("inspection.json", "look/inspection.json", "report look OUT.html", True),
        ("inspection documents", "look/documents.json", "report look OUT.html", True),
        ("inspection experts", "look/experts.json", "report look OUT.html", True),
        ("inspection statistics", "look/statistics.npz", "report look OUT.html", True),
        ("inspection reader", "look/reader.json", "report look OUT.html", True),
        ("inspection reader arrays", "look/reader.npz", "report look OUT.html", True),
        ("moesaic.json, merged", "subset/moesaic.json", "merge-back moe subset OUT --dry-run", True),
        ("moesaic.json, loaded", "trained/moesaic.json", _GENERATE.format("trained"), False),
        ("moesaic.json, verified", "ours/moesaic.json", "verify dense ours --device cpu", False),
        ("moesaic.json, exported", "ours/moesaic.json", "export ours OUT --dry-run", True),
        (
            "config.json, dense, upcycled",
            "dense/config.json",
            "upcycle dense OUT --method sparse --experts 4 --dry-run",
            True,
        ),
        ("config.json, dense, planned", "dense/config.json", "plan dense", True),
        ("config.json, dense, loaded", "dense/config.json", _GENERATE.format("dense"), False),
        ("config.json, MoE, extracted", "moe/config.json", "extract moe s.json OUT --dry-run", True),
        ("config.json, MoE, loaded", "moe/config.json", _GENERATE.format("moe"), False),
        ("config.json, ours, loaded", "ours/config.json", _GENERATE.format("ours"), False),
        ("config.json, ours, exported", "ours/config.json", "export ours OUT --dry-run", True),
        ("index.json", "shards/model.safetensors.index.json", "plan shards", True),
        ("safetensors header", "moe/model.safetensors", "extract moe s.json OUT --dry-run", True),
        ("generation_config.json", "dense/generation_config.json", _GENERATE.format("dense"), False),
        ("tokenizer.json", "dense/tokenizer.json", _GENERATE.format("dense"), False),
        ("tokenizer_config.json", "dense/tokenizer_config.json", _GENERATE.format("dense"), False),
        ("train recipe, planned", "train.yaml", "train train.yaml OUT --dry-run", True),
        ("upcycle recipe", "upcycle.yaml", "upcycle dense OUT --config upcycle.yaml --dry-run", True),
        ("suite", "suite.yaml", "eval moe --suite suite.yaml --data-dir evals --out OUT --dry-run", True),
        ("run.json of a state", "trained/state/STATE/run.json", "train train.yaml trained --resume", False),
        ("data", "text.jsonl", "select moe OUT --keep 4 --data text.jsonl --max-tokens 16", False),
    )
)


def make_workspace(folder: Path) -> Path:
    """Make all documents in a new folder; returns it."""
    folder.mkdir(parents=True)
    with contextlib.chdir(folder):
        for name in ("dense", "shards"):
            save_tokenizer(save_tiny(Path(name), "llama"))
        _split(Path("shards"))
        save_tokenizer(save_tiny_moe(Path("moe"), "olmoe"))
        write_documents(Path("text.jsonl"), "math", number=6, seed=0)
        write_results(Path("r.json"))
        write_run(Path("run"))
        write_tiny_inspection(Path("look"))
        for line in (
            "select moe s.json --keep 4 --data text.jsonl --stats-out st.json",
            "extract moe s.json subset",
            "upcycle dense ours --method sparse --experts 4",
        ):
            assert cli.run([*line.split(), "--quiet"]) == 0, line
        _train(folder)
        Path("upcycle.yaml").write_text("method: sparse\nexperts: 4\ntop_k: 2\nseed: 0\n")
        suite = {"tasks": [{"task": "arc_easy", "shots": 0}], "averages": [{"name": "all"}]}
        Path("suite.yaml").write_text(yaml.safe_dump(suite))
        from tests.tiny_evals import write_evals

        write_evals(Path("evals"))
    return folder


def _split(folder: Path) -> None:
    """One file of weights as a shard with an index."""
    names = list(open_checkpoint(folder).tensors)
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, "a.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _train(folder: Path) -> None:
    recipe = tiny_recipe(folder / "in", budget={"steps": 2}, optimizer={"lr": 1e-2})
    Path("train.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    assert cli.run(["train", "train.yaml", "trained", "--quiet"]) == 0


def file_of(document: Document, workspace: Path) -> Path:
    """The file of a document; STATE stands for the one state of the run."""
    if "STATE" not in document.file:
        return workspace / document.file
    (found,) = workspace.glob(document.file.replace("STATE", "*"))
    return found


def outcome(document: Document, workspace: Path, edit: tuple[str, int, int]) -> str:
    """`works`, `refused`, or what is wrong: the first line of what was said, a hang, or what was left behind."""
    file = file_of(document, workspace)
    before = file.read_bytes()
    changed = edited(file, before, edit)
    said = io.StringIO()
    try:
        file.write_bytes(changed)
        with contextlib.chdir(workspace), contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            status = _timed(document.command.split())
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return f"raised {type(error).__name__}: {error}"
    finally:
        file.write_bytes(before)
        left = list(workspace.glob("OUT*"))
        for path in left:
            _remove(path)
    errors = [line for line in said.getvalue().splitlines() if line.startswith("moesaic: error: ")]
    if status == 0:
        return "works"
    if status == 2 and len(errors) == 1 and not left and len(errors[0]) < 2000:
        return "refused"
    lines = said.getvalue().strip().splitlines() or ["nothing was said"]
    return f"status {status}{', OUT was left' if left else ''}: {lines[-1][:400]}"


class _HangError(Exception):
    pass


def _timed(arguments: list[str]) -> int:
    def stop(*_: Any) -> None:
        raise _HangError(f"more than {SECONDS} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return cli.run(arguments)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def _remove(path: Path) -> None:
    import shutil

    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def quiet_cache(folder: Path) -> Iterator[None]:
    """Run with a cache of its own."""
    import os

    before = os.environ.get("MOESAIC_CACHE")
    os.environ["MOESAIC_CACHE"] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ["MOESAIC_CACHE"]
        else:
            os.environ["MOESAIC_CACHE"] = before
