"""kill -9 at random moments of a conversion: the target is absent (or the old one) or complete and correct."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_models import save_tiny

PROGRAM = '''
"""Convert in forked children and kill them; the parent has everything imported, so the kill hits the conversion."""
import hashlib, json, os, shutil, sys
from pathlib import Path
from moesaic.upcycling.recipe import UpcycleRecipe
from moesaic.upcycling.run import upcycle
from tests.kills import at_random_calls, count_calls

base, root, overwrite, count = sys.argv[1], Path(sys.argv[2]), sys.argv[3] == "overwrite", int(sys.argv[4])
old, new = (UpcycleRecipe(base=base, method="sparse", experts=4, seed=seed, shard_size="4MB") for seed in (1, 2))


def fork(recipe, target, overwrite=False, die_at=None):
    pid = os.fork()
    if pid:
        return pid
    calls = count_calls(die_at)
    try:
        upcycle(recipe, target, overwrite=overwrite, quiet=True, workers=2)
    except BaseException as error:
        print(repr(error), file=sys.stderr)
        os._exit(1)
    (root / "calls").write_text(str(calls()))
    os._exit(0)


def run(recipe, target, overwrite=False):
    assert os.waitstatus_to_exitcode(os.waitpid(fork(recipe, target, overwrite), 0)[1]) == 0


def state(folder):
    if not folder.exists():
        return "absent"
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


run(old, root / "old")
run(new, root / "new", overwrite=True)
calls = int((root / "calls").read_text())
allowed = {"old": state(root / "old"), "new": state(root / "new")} | ({} if overwrite else {"absent": "absent"})
names = {value: name for name, value in allowed.items()}
if not overwrite:
    del names[allowed["old"]]

target, outcomes, leftovers = root / "target", [], 0
if overwrite:
    run(old, target)


def attempt(number):
    global leftovers
    os.waitpid(fork(new, target, overwrite, number), 0)
    outcomes.append(names.get(state(target), "BROKEN"))
    leftovers += any(path.name.startswith(".target") for path in root.iterdir())
    if outcomes[-1] == "new":  # back to where we were
        if overwrite:
            run(old, target, overwrite=True)
        else:
            shutil.rmtree(target)


at_random_calls(attempt, calls, count)
run(new, target, overwrite=overwrite)
(root / "calls").unlink()
after = sorted(path.name for path in root.iterdir())
print(json.dumps({"outcomes": outcomes, "leftovers": leftovers, "final": names.get(state(target)), "after": after}))
'''


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_tiny(
        tmp_path_factory.mktemp("base"), "llama", num_layers=8, hidden_size=128, intermediate_size=512, head_dim=32
    )


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["new", "overwrite"])
def test_twenty_kills(base, tmp_path, mode):
    command = [sys.executable, "-c", PROGRAM, str(base), str(tmp_path), mode, "20"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert len(report["outcomes"]) == 20
    before = "absent" if mode == "new" else "old"
    assert set(report["outcomes"]) <= {before, "new"}, report
    assert report["outcomes"].count(before) >= 10  # the kills did hit conversions that were not finished
    assert report["leftovers"] > 0  # and some of them while they were writing
    assert report["final"] == "new"
    assert report["after"] == ["new", "old", "target"]  # the next run has removed what the killed ones left
