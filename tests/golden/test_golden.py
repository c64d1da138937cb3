"""Every file that the verbs write which move bytes is the one that hashes.json knows."""

import json
import os
from pathlib import Path

import pytest

from tests.golden.commands import MOVED, SOURCES
from tests.golden.compare import differences
from tests.golden.record import HASHES, moved_hashes


@pytest.fixture
def here():
    """`run_all` changes into the folder of the run."""
    before = Path.cwd()
    yield
    os.chdir(before)


def test_every_command_writes_the_same_bytes_as_ever(tmp_path, here, monkeypatch):
    monkeypatch.setenv("MOESAIC_CACHE", str(tmp_path / "cache"))
    known = json.loads(HASHES.read_text())
    assert known.keys() == {SOURCES, *MOVED}
    found = moved_hashes(tmp_path / "run")
    if found[SOURCES] != known[SOURCES]:
        pytest.skip("this machine's torch draws other random numbers: use tests.golden.compare on two commits")
    assert differences(known, found) == []


def test_a_changed_byte_is_a_difference():
    old = {"verb": {"a": "1", "b": "2"}, "gone": {"c": "3"}}
    assert differences(old, {"verb": {"a": "1", "b": "4", "d": "5"}}) == ["gone: c", "verb: b", "verb: d"]
