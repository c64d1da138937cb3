"""What is written is read back, and what does not fit is refused in one line."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from moesaic.analysis.format import read_inspection
from moesaic.analysis.inspection import Inspection
from moesaic.common.errors import MoesaicError
from tests.tiny_inspection import NASTY, tiny_inspection, write_tiny_inspection


def same(first: object, second: object) -> bool:
    if isinstance(first, np.ndarray):
        assert isinstance(second, np.ndarray)
        return first.dtype == second.dtype and np.array_equal(first, second, equal_nan=first.dtype.kind == "f")
    if dataclasses.is_dataclass(first):
        return type(first) is type(second) and all(
            same(getattr(first, field.name), getattr(second, field.name)) for field in dataclasses.fields(first)
        )
    return first == second


def test_what_is_written_is_read_back(tmp_path: Path):
    found = read_inspection(write_tiny_inspection(tmp_path / "out", against=True))
    assert isinstance(found, Inspection)
    assert same(dataclasses.replace(found, against=None), tiny_inspection())
    assert same(found.against, tiny_inspection(seed=1, name="./other"))
    assert found.scopes == ("all", "code", "math", "prose")
    assert NASTY in found.reader.strings


def test_the_same_inspection_is_the_same_bytes(tmp_path: Path):
    first, second = (write_tiny_inspection(tmp_path / name) for name in ("first", "second"))
    for file in sorted(first.iterdir()):
        assert file.read_bytes() == (second / file.name).read_bytes(), file.name


def test_broken_unicode_survives(tmp_path: Path):
    made = tiny_inspection()
    reader = dataclasses.replace(made.reader, strings=("\ud800", *made.reader.strings[1:]))
    from moesaic.analysis.format import write_inspection

    write_inspection(dataclasses.replace(made, reader=reader), tmp_path)
    assert read_inspection(tmp_path).reader.strings[0] == "\ud800"


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("inspection.json", b'{"format": "moesaic-inspection/9"}', "format is 'moesaic-inspection/9', expected"),
        ("inspection.json", b"{", "not JSON"),
        ("statistics.npz", b"PK\x03\x04 cut off", "damaged"),
        ("reader.npz", b"no zip at all", "damaged"),
        ("documents.json", b'{"documents": []}', "belongs to another inspection"),
        ("experts.json", b'{"experts": [{"layer": 1}]}', "experts.0.expert: this key is required"),
        ("reader.json", b'{"documents": []}', "sampled: this key is required and missing"),
    ],
)
def test_a_damaged_file_is_one_line_with_its_name(tmp_path: Path, file: str, content: bytes, message: str):
    folder = write_tiny_inspection(tmp_path / "out")
    (folder / file).write_bytes(content)
    with pytest.raises(MoesaicError, match=message) as caught:
        read_inspection(folder)
    assert file in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_or_another_folder_is_one_line(tmp_path: Path):
    folder = write_tiny_inspection(tmp_path / "out")
    (folder / "statistics.npz").unlink()
    with pytest.raises(MoesaicError, match="no such file; run `moesaic inspect` again"):
        read_inspection(folder)
    with pytest.raises(MoesaicError, match="not a folder that `moesaic inspect` wrote"):
        read_inspection(tmp_path)


def test_arrays_are_never_unpickled(tmp_path: Path):
    folder = write_tiny_inspection(tmp_path / "out")
    with np.load(folder / "statistics.npz") as file:
        arrays = dict(file)
    arrays["counts_SLE"] = np.array([json], dtype=object)
    arrays["counts_SLE"][0] = {"any": "object"}
    np.savez(folder / "statistics.npz", **arrays)
    with pytest.raises(MoesaicError, match="damaged"):
        read_inspection(folder)
