"""kill -9 at random moments of a conversion: the target is absent (or the old one) or complete and correct."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_models import save_tiny

PROGRAM = '''
"""Convert in forked children and kill them; the parent has everything imported, so the kill hits the conversion."""
import hashlib, json, os, shutil, signal, sys, time
from pathlib import Path
from moesaic.upcycling.recipe import UpcycleRecipe
from moesaic.upcycling.run import upcycle
from tests.kills import at_random_moments

base, root, overwrite, count = sys.argv[1], Path(sys.argv[2]), sys.argv[3] == "overwrite", int(sys.argv[4])
old, new = (UpcycleRecipe(base=base, method="sparse", experts=4, seed=seed, shard_size="4MB") for seed in (1, 2))


def fork(recipe, target, overwrite=False):
    pid = os.fork()
    if pid:
        return pid
    try:
        upcycle(recipe, target, overwrite=overwrite, quiet=True, workers=2)
    except BaseException as error:
        print(repr(error), file=sys.stderr)
        os._exit(1)
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
durations = []
for _ in range(3):  # the shortest: on a busy machine the others say when the machine had time, not what the work takes
    start = time.monotonic()
    run(new, root / "new", overwrite=True)
    durations.append(time.monotonic() - start)
allowed = {"old": state(root / "old"), "new": state(root / "new")} | ({} if overwrite else {"absent": "absent"})
names = {value: name for name, value in allowed.items()}
if not overwrite:
    del names[allowed["old"]]

target, outcomes, leftovers = root / "target", [], 0
if overwrite:
    run(old, target)


def attempt(delay):
    global leftovers
    pid = fork(new, target, overwrite)
    time.sleep(delay)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    outcomes.append(names.get(state(target), "BROKEN"))
    leftovers += any(path.name.startswith(".target") for path in root.iterdir())
    if outcomes[-1] == "new":  # back to where we were
        if overwrite:
            run(old, target, overwrite=True)
        else:
            shutil.rmtree(target)
    return outcomes[-1] != "new"


at_random_moments(attempt, min(durations), count)
run(new, target, overwrite=overwrite)
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
    assert len(report["outcomes"]) >= 20
    before = "absent" if mode == "new" else "old"
    assert set(report["outcomes"]) <= {before, "new"}, report
    assert report["outcomes"].count(before) >= 10  # the kills did hit conversions that were not finished
    assert report["leftovers"] > 0  # and some of them while they were writing
    assert report["final"] == "new"
    assert report["after"] == ["new", "old", "target"]  # the next run has removed what the killed ones left
