"""Real kill -9 and real races: the target is absent or complete, and the next run cleans up."""

import itertools
import json
import os
import random
from pathlib import Path

import numpy as np
import pytest

from moesaic.checkpoint import pio
from moesaic.checkpoint.headers import read_header
from moesaic.checkpoint.output import output_folder
from moesaic.checkpoint.record import fingerprint, read_provenance, write_provenance
from moesaic.checkpoint.source import open_checkpoint
from moesaic.checkpoint.writer import CheckpointWriter, OutputTensor, plan_files
from moesaic.common.errors import MoesaicError
from tests.kills import count_calls
from tests.tiny_files import fork, result_of

ROWS, COLUMNS = 64, 4096
LAYOUT = plan_files([OutputTensor(name=f"t{i}", dtype="F32", shape=(ROWS, COLUMNS)) for i in range(4)], 2 << 20)


def build(target: Path, value: int, overwrite: bool) -> str:
    """A small conversion: two shards, 4 MiB, every number is `value`."""
    row = np.full(COLUMNS, value, dtype=np.float32).data
    with output_folder(target, overwrite) as folder, CheckpointWriter(folder, LAYOUT) as writer:
        (folder / "config.json").write_text(json.dumps({"value": value}))
        for tensor in LAYOUT.tensors:
            for i in range(ROWS):
                writer.write(tensor.name, row, i * COLUMNS)
        written = writer.finish()
        write_provenance(
            folder,
            verb="test",
            recipe={},
            seed=0,
            sources=[],
            weights_hash=written.weights_hash,
            extra={"value": value},
        )
    return ""


def checked_value(target: Path) -> int:
    """The value of a complete checkpoint; anything missing, mixed or half fails here."""
    checkpoint = open_checkpoint(target)
    record = read_provenance(target)
    assert record is not None
    assert len(checkpoint.tensors) == 4
    assert fingerprint(checkpoint) == record["weights_hash"]
    assert record["value"] == checkpoint.config["value"]
    for file in target.glob("*.safetensors"):
        for info in read_header(file).values():
            data = np.fromfile(file, dtype=np.float32, count=ROWS * COLUMNS, offset=info.offset)
            assert (data == record["value"]).all()
    return record["value"]


def leftovers(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("one_step", [True, False])
def test_kill_at_any_moment(one_step: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not one_step:
        monkeypatch.setattr(pio, "_renameat2", lambda *_: False)
    target = tmp_path / "out"
    rng = random.Random(0)
    seen: set[str] = set()

    def forever(calls: int) -> str:
        count_calls(calls)
        for value in itertools.count(1):
            build(target, value, overwrite=True)
        return ""

    def counted() -> str:
        calls = count_calls()
        build(tmp_path / "warm-up", 0, overwrite=False)
        return str(calls())

    once = int(result_of(fork(counted)))
    wanted = {"new", "kept", "absent", "leftover"}
    for attempt in range(100):
        if attempt >= 20 and wanted <= seen:
            break
        if attempt % 3 == 0 and target.exists():
            target.rename(tmp_path / f"done{attempt}")  # so that kills before the first success are met too
        calls = rng.randint(1, 3 * once if attempt % 3 else once)
        result_of(fork(lambda calls=calls: forever(calls)))
        old = [path for path in leftovers(tmp_path) if path.name.endswith("-old")]
        if target.exists():
            seen.add("new" if checked_value(target) else "kept")
        elif old:
            assert not one_step
            assert checked_value(old[0]) >= 0
            seen.add("old")
        else:
            seen.add("absent")
        seen |= {"leftover" for _ in leftovers(tmp_path)}
        build(target, 0, overwrite=True)
        assert checked_value(target) == 0
        assert leftovers(tmp_path) == []
    assert wanted <= seen


@pytest.mark.parametrize("overwrite", [False, True])
def test_two_runs_at_once(overwrite: bool, tmp_path: Path) -> None:
    for attempt in range(8):
        target = tmp_path / f"out{attempt}"
        if overwrite:
            build(target, 0, overwrite=False)
        children = {value: fork(lambda value=value: build(target, value, overwrite)) for value in (1, 2, 3)}  # noqa: B023
        messages = {value: result_of(child) for value, child in children.items()}
        winners = {value for value, message in messages.items() if not message}
        refusals = [message for message in messages.values() if message]
        assert winners
        assert checked_value(target) in winners
        assert all("is writing it" in m or "appeared while" in m or "exists; choose" in m for m in refusals), refusals
        assert leftovers(tmp_path) == []
        if not overwrite:
            assert len(winners) == 1


def test_the_checks_above_see_damage(tmp_path: Path) -> None:
    build(tmp_path / "out", 5, overwrite=False)
    assert checked_value(tmp_path / "out") == 5
    file = tmp_path / "out" / LAYOUT.files[1].name
    with file.open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        stream.write(b"\0")
    with pytest.raises(AssertionError):
        checked_value(tmp_path / "out")
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(MoesaicError, match="truncated"):
        checked_value(tmp_path / "out")
