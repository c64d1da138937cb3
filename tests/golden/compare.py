"""Run every golden command with the code of another commit and with this one's, and compare what they leave.

    python -m tests.golden.compare COMMIT

Both run on this machine with this environment and with this folder's command list, so that what the processor decides
is the same. Exit status 1 where something differs.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def hashes_of(code: Path, folder: Path) -> dict[str, dict[str, str]]:
    """The hashes of all commands, run by the package in `code`/src."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(str(path) for path in (code / "src", ROOT)),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-m", "tests.golden.commands", str(folder), "computed"]
    done = subprocess.run(command, env=environment, cwd=folder.parent, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{code}: {done.stderr[-3000:]}")
    return json.loads(done.stdout)


def differences(old: dict[str, dict[str, str]], new: dict[str, dict[str, str]]) -> list[str]:
    """One line for each file that is not the same on both sides."""
    found = []
    for name in sorted({*old, *new}):
        before, after = old.get(name, {}), new.get(name, {})
        found += [f"{name}: {file}" for file in sorted({*before, *after}) if before.get(file) != after.get(file)]
    return found


def main() -> int:
    """Print the differences, or how many files are equal."""
    with tempfile.TemporaryDirectory() as name:
        other = Path(name) / "code"
        subprocess.run(["git", "-C", ROOT, "worktree", "add", "--detach", "-q", other, sys.argv[1]], check=True)
        try:
            (Path(name) / "old").mkdir()
            (Path(name) / "new").mkdir()
            old = hashes_of(other, Path(name) / "old" / "run")
            new = hashes_of(ROOT, Path(name) / "new" / "run")
        finally:
            subprocess.run(["git", "-C", ROOT, "worktree", "remove", "--force", other], check=True)
    found = differences(old, new)
    print("\n".join(found) or f"{sum(map(len, new.values()))} files and documents of {len(new) - 1} commands: equal")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
