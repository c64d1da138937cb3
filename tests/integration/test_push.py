"""Results on a fake hub on this machine: pushed, refused before the work, or kept where the push fails."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from moesaic.cli.verbs import COMMANDS
from tests.fake_hub import FakeHub, serve
from tests.tiny_models import save_tiny
from tests.tiny_training import tiny_recipe

CLIENT = """
import contextlib, io, json, os, sys
from moesaic.cli.app import run

for token, line in json.loads(sys.argv[1]):
    os.environ.pop("HF_TOKEN", None)
    if token:
        os.environ["HF_TOKEN"] = token
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        status = run(line)
    print(json.dumps([status, said.getvalue()]))
"""

ACCOUNTS = {
    "writes": {"name": "me", "orgs": [{"name": "our-org"}], "auth": {"accessToken": {"role": "write"}}},
    "reads": {"name": "me", "orgs": [], "auth": {"accessToken": {"role": "read"}}},
}


def surroundings(folder: Path, endpoint: str) -> dict[str, str]:
    return {
        **os.environ,
        "HOME": str(folder),
        "HF_HOME": str(folder / "cache"),
        "MOESAIC_CACHE": str(folder / "cache"),
        "HF_ENDPOINT": endpoint,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
    }


def client(folder: Path, endpoint: str, *calls: tuple[str | None, list[str]]) -> list[tuple[int, str]]:
    """Status and stderr of command lines, each with a token, in one process that knows the fake hub only."""
    command = [sys.executable, "-c", CLIENT, json.dumps(calls)]
    environment = surroundings(folder, endpoint)
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


def upcycle(out: str, *more: str) -> list[str]:
    return ["upcycle", "base", out, "--method", "sparse", "--experts", "2", "--top-k", "1", *more]


@pytest.fixture(scope="module")
def pushed(tmp_path_factory) -> tuple[Path, FakeHub, list[tuple[int, str]]]:
    folder = tmp_path_factory.mktemp("push")
    save_tiny(folder / "base", "llama")
    recipe = tiny_recipe(folder / "in", budget={"steps": 2})
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    there: Any = {
        "me/public": {"README.md": b"x"},
        "me/mine": {"model-00001-of-00002.safetensors": b"x", "a.txt": b"x"},
    }
    hub = FakeHub({**there, "me/full": {}}, accounts=ACCOUNTS, private={"me/mine", "me/full"}, full={"me/full"})
    with serve(hub):
        said = client(
            folder,
            hub.url,
            ("writes", upcycle("moe", "--push-to-hub", "our-org/moe")),
            ("writes", ["train", "recipe.yaml", "run", "--push-to-hub", "me/run", "--public"]),
            ("writes", upcycle("again", "--push-to-hub", "me/mine", "--quiet")),
            ("writes", upcycle("kept", "--push-to-hub", "me/full")),
            ("writes", upcycle("dry", "--push-to-hub", "me/dry", "--dry-run")),
            (None, upcycle("none", "--push-to-hub", "me/none")),
            ("old", upcycle("none", "--push-to-hub", "me/none")),
            ("reads", upcycle("none", "--push-to-hub", "me/none")),
            ("writes", upcycle("none", "--push-to-hub", "you/none")),
            ("writes", upcycle("none", "--push-to-hub", "none")),
            ("writes", upcycle("none", "--push-to-hub", "me/public")),
            ("writes", upcycle("none", "--push-to-hub", "me/mine", "--public")),
            ("writes", upcycle("none", "--public")),
            ("reads", ["train", "recipe.yaml", "none", "--push-to-hub", "me/none", "--dry-run"]),
        )
    return folder, hub, said


def files(hub: FakeHub, name: str) -> dict[str, bytes]:
    found = hub.repos[name]
    assert not isinstance(found, tuple)
    return dict(found)


def local(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_a_result_is_pushed_and_private_unless_it_is_asked_for(pushed):
    folder, hub, said = pushed
    assert said[0][0] == 0
    assert f"moe: is on the hub, private: {hub.url}/our-org/moe" in said[0][1]
    assert files(hub, "our-org/moe") == local(folder / "moe")
    assert 'name = "our-org/moe"' in (folder / "moe" / "README.md").read_text()
    assert "our-org/moe" in hub.private


def test_a_trained_model_is_pushed_without_its_run_state(pushed):
    folder, hub, said = pushed
    assert said[1][0] == 0, said[1][1]
    assert files(hub, "me/run") == local(folder / "run")
    assert (folder / "run" / "state").is_dir()
    assert "me/run" not in hub.private


def test_weights_of_an_earlier_push_go(pushed):
    folder, hub, said = pushed
    assert said[2] == (0, ""), said[2]
    assert files(hub, "me/mine") == local(folder / "again") | {"a.txt": b"x"}


def test_a_push_that_fails_leaves_the_result_and_says_how_to_do_it_again(pushed):
    folder, hub, said = pushed
    status, error = said[3]
    assert status == 2
    assert "kept: is complete, but was not pushed to me/full (the hub forbids it" in error
    again = "hf upload me/full kept . --private --exclude 'state/*' --delete '*.safetensors*'"
    assert again in error
    assert local(folder / "kept").keys() == local(folder / "moe").keys()
    hub.full.clear()
    hf = shutil.which("hf", path=str(Path(sys.executable).parent))
    with serve(hub):
        environment = surroundings(folder, hub.url) | {"HF_TOKEN": "writes"}
        subprocess.run(["sh", "-c", again.replace("hf ", f"{hf} ", 1)], env=environment, cwd=folder, check=True)
    assert files(hub, "me/full") == local(folder / "kept")


def test_a_dry_run_asks_and_pushes_nothing(pushed):
    _, hub, said = pushed
    assert said[4][0] == 0
    assert "me/dry" not in hub.repos


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (5, "--push-to-hub me/none: there is no token; log in with `hf auth login`, or set HF_TOKEN"),
        (6, "--push-to-hub me/none: the hub does not know your token; log in"),
        (7, "--push-to-hub me/none: your token may only read; log in"),
        (8, "--push-to-hub you/none: your token is not of that account; it may write to me, our-org"),
        (9, "--push-to-hub none: is not a repository's name; give ORG/NAME"),
        (10, "--push-to-hub me/public: is there already, and public; give --public, or choose another name"),
        (11, "--push-to-hub me/mine: is there already, and private; leave out --public, or choose another name"),
        (12, "--public: says how --push-to-hub uploads; give both or neither"),
        (13, "--push-to-hub me/none: your token may only read; log in"),
    ],
)
def test_what_a_push_would_fail_on_is_refused_before_the_work(pushed, place, message):
    folder, hub, said = pushed
    status, error = said[place]
    assert status == 2
    assert message in error
    assert error.count("\n") == 1
    assert not (folder / "none").exists()
    assert "me/none" not in hub.repos


def test_every_verb_that_writes_a_checkpoint_can_push():
    pushing = {name for name, command in COMMANDS.items() if "push_to_hub" in command.run_options}
    assert pushing == {"upcycle", "expand", "extract", "merge-back", "export", "train"}
