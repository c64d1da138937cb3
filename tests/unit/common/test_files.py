"""A small file is there whole or not at all."""

import pytest

from moesaic.common import files
from moesaic.common.errors import MoesaicError


def test_a_file_is_written_with_its_folders(tmp_path):
    file = tmp_path / "new" / "words.txt"
    files.write_file(file, "één\n")
    files.write_file(file, b"two\n")
    assert file.read_bytes() == b"two\n"
    assert [path.name for path in file.parent.iterdir()] == ["words.txt"]


def test_a_full_disk_leaves_the_old_file_as_it_was(tmp_path, monkeypatch):
    def fail(fd):
        raise OSError(28, "No space left on device")

    file = tmp_path / "words.txt"
    file.write_text("old")
    monkeypatch.setattr(files.os, "fsync", fail)
    with pytest.raises(MoesaicError, match=r"words\.txt: the disk is full"):
        files.write_file(file, "new")
    assert file.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["words.txt"]
