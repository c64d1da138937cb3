"""Write hashes.json anew: `python -m tests.golden.record`. Only after a change of bytes that is wanted and named."""

import json
import tempfile
from pathlib import Path

from tests.golden.commands import MOVED, SOURCES, run_all, source_hash, write_sources

HASHES = Path(__file__).with_name("hashes.json")


def moved_hashes(folder: Path) -> dict[str, dict[str, str]]:
    """The hashes of the verbs that move bytes, run in `folder`."""
    write_sources(folder)
    return {SOURCES: {"": source_hash(folder)}} | run_all(folder, MOVED)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        HASHES.write_text(json.dumps(moved_hashes(Path(name)), indent=1, sort_keys=True) + "\n")
