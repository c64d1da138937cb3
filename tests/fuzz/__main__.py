"""The long form: `make fuzz MINUTES=60`. Edits documents at random until the time is over; prints a table of outcomes.

python -m tests.fuzz MINUTES [NAME ...]    only documents whose names contain one of these
"""

import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded

from tests.fuzz.documents import DOCUMENTS, Document, make_workspace, outcome, quiet_cache
from tests.fuzz.edits import WEIRD, edits


def _round(document: Document, workspace: Path, number: int, size: int, found: Counter[str], wrong: list[str]) -> None:
    @seeded(f"{document.name} {number}")
    @settings(
        max_examples=size,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=[*HealthCheck],  # pyright: ignore[reportArgumentType]
    )
    @given(edits)
    def look(edit: tuple[str, int, int]) -> None:
        what = outcome(document, workspace, edit)
        found[what if what in ("works", "refused") else "wrong"] += 1
        if what not in ("works", "refused"):
            wrong.append(f"{document.name}: {edit[0]} at {edit[1]} {ascii(WEIRD[edit[2]])[:60]} {edit}: {what}")
            print(wrong[-1], flush=True)

    look()


def main(minutes: float, names: list[str]) -> int:
    """Edit for so many minutes; returns 1 where anything was neither done nor refused in one line."""
    chosen = [one for one in DOCUMENTS if not names or any(name in one.name for name in names)]
    counts = {document.name: Counter[str]() for document in chosen}
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as folder, quiet_cache(Path(folder) / "cache"):
        workspace = make_workspace(Path(folder) / "work")
        end, number = time.monotonic() + 60 * minutes, 0
        while time.monotonic() < end:
            for document in chosen:
                if time.monotonic() < end:
                    _round(document, workspace, number, 20 if document.quick else 4, counts[document.name], wrong)
            number += 1
    print("\n| document | edits | works | refused in one line | wrong |\n|---|---|---|---|---|")
    for name, found in counts.items():
        print(f"| {name} | {found.total()} | {found['works']} | {found['refused']} | {found['wrong']} |")
    print(f"{sum(found.total() for found in counts.values())} edits, {len(wrong)} wrong")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
