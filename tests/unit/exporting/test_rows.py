"""Rows of stored tensors: parts, slots, joins, and their values."""

import pytest
import torch
from safetensors.torch import save_file

from moesaic.checkpoint.headers import read_header
from moesaic.exporting.rows import joined, part, read, slot, stacked, stored


@pytest.fixture
def infos(tmp_path):
    tensors = {"a": torch.arange(24.0).reshape(6, 4), "b": torch.arange(12.0).reshape(3, 4) + 100}
    tensors["s"] = torch.arange(30.0).reshape(2, 5, 3).bfloat16()
    save_file(tensors, tmp_path / "t.safetensors")
    return tensors, read_header(tmp_path / "t.safetensors")


def test_parts_of_joined_tensors(infos):
    values, header = infos
    both = joined([stored(header["a"]), stored(header["b"])])
    expected = torch.cat([values["a"], values["b"]])
    for start, stop in [(0, 9), (2, 5), (5, 7), (7, 9), (0, 1)]:
        assert torch.equal(read(part(both, start, stop)), expected[start:stop])


def test_slots_and_stacks(infos):
    values, header = infos
    slots = [slot(header["s"], index) for index in (1, 0)]
    assert torch.equal(read(slots[0]), values["s"][1])
    assert torch.equal(read(stacked(slots)), values["s"][[1, 0]])
    assert torch.equal(read(part(slots[0], 2, 4)), values["s"][1, 2:4])
    assert stacked(slots).shape == (2, 5, 3)
