"""What docs say of adding a scorer: a function, and its line in `SCORERS`."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import moesaic
from tests.tiny_moes import save_tiny_moe
from tests.tiny_training import save_tokenizer

_FUNCTION = '''
def score_last(statistics):
    """The last experts first."""
    return statistics.counts_LE * 0.0 + range(statistics.counts_LE.shape[1])


SCORERS: Mapping'''

_USE = """
import sys
from moesaic import select
from moesaic.cli.app import run
kept = select(sys.argv[1], keep=2, stats=[sys.argv[2]], method="last").kept
assert all(ids[0] == ids[1] - 1 == 6 for ids in kept), kept
assert run(["select", "--help"]) == 0
"""


def test_a_scorer_is_a_function_and_a_line(tmp_path):
    moe = save_tiny_moe(tmp_path / "moe", "olmoe")
    save_tokenizer(moe)
    (tmp_path / "text.txt").write_text("some text")
    stats = tmp_path / "stats.json"
    shutil.copytree(Path(moesaic.__file__).parent, tmp_path / "src" / "moesaic")
    file = tmp_path / "src" / "moesaic" / "selection" / "scorers.py"
    text = file.read_text()
    text = text.replace("\nSCORERS: Mapping", _FUNCTION).replace('    "reap"', '    "last": score_last,\n    "reap"')
    file.write_text(text)
    moesaic.select(moe, keep=2, data=tmp_path / "text.txt", stats_out=stats)
    done = subprocess.run(
        [sys.executable, "-c", _USE, str(moe), str(stats)],
        env=os.environ | {"PYTHONPATH": str(tmp_path / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "last" in done.stdout
