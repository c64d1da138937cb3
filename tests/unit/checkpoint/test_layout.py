import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.checkpoint.writer import DEFAULT_SHARD_SIZE, OutputTensor, parse_size, plan_files
from moesaic.common.errors import MoesaicError


def bf16(name: str, *shape: int) -> OutputTensor:
    return OutputTensor(name=name, dtype="BF16", shape=shape)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1GB", 10**9),
        ("500MB", 5 * 10**8),
        ("2GiB", 2**31),
        ("2gib", 2**31),
        ("1.5 GB", 15 * 10**8),
        (".5KB", 500),
        ("123", 123),
        (123, 123),
        ("5_000B", 5000),
        ("1TB", 10**12),
        ("0.1GB", 10**8),
    ],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "5XB", "-5GB", "1e9", "5GB GB", "0", "0.0GB", "٥GB", "5 5", "nan", "1,5GB"])
def test_bad_sizes_name_the_flag(text: str) -> None:
    with pytest.raises(MoesaicError, match=r"^--max-size .*") as caught:
        parse_size(text, flag="--max-size")
    assert text in str(caught.value)


def test_default_is_that_of_transformers() -> None:
    assert parse_size("5GB") == DEFAULT_SHARD_SIZE == 5_000_000_000


def test_one_file_has_no_index() -> None:
    layout = plan_files([bf16("a", 3), bf16("b", 5)])
    assert [file.name for file in layout.files] == ["model.safetensors"]
    assert layout.index is None
    assert layout.nbytes == layout.files[0].nbytes == len(layout.files[0].header) + 16


def test_shards_are_filled_in_order_and_large_tensors_stand_alone() -> None:
    layout = plan_files([bf16("a", 2), bf16("b", 3), bf16("big", 100), bf16("c", 1), bf16("d", 4), bf16("e", 1)], 10)
    assert [[t.name for t in file.tensors] for file in layout.files] == [["a", "b"], ["big"], ["c", "d"], ["e"]]
    assert [file.name for file in layout.files] == [f"model-0000{i}-of-00004.safetensors" for i in range(1, 5)]
    assert layout.index is not None
    index = json.loads(layout.index)
    assert index["metadata"] == {"total_size": 222}
    assert index["weight_map"] == {t.name: f.name for f in layout.files for t in f.tensors}


@given(
    sizes=st.lists(st.integers(0, 30), min_size=1, max_size=30),
    limit=st.integers(1, 80),
    codes=st.lists(st.sampled_from(["F32", "BF16", "BOOL"]), min_size=30, max_size=30),
)
def test_layout_properties(sizes: list[int], limit: int, codes: list[str]) -> None:
    tensors = [OutputTensor(name=f"t{i}", dtype=codes[i], shape=(n,)) for i, n in enumerate(sizes)]
    layout = plan_files(tensors, limit)
    assert sorted(t.name for t in layout.tensors) == sorted(t.name for t in tensors)
    flat = [sorted(int(t.name[1:]) for t in file.tensors) for file in layout.files]
    assert [i for file in flat for i in file] == list(range(len(tensors)))  # files hold runs of the order given
    for file in layout.files:
        data = sum(t.nbytes for t in file.tensors)
        assert data <= limit or len([t for t in file.tensors if t.nbytes]) == 1
        assert len(file.header) % 64 == 0
        position = len(file.header)
        for tensor, offset in zip(file.tensors, file.offsets, strict=True):
            assert offset == position
            assert offset % (tensor.nbytes // max(tensor.shape[0], 1) or 1) == 0  # a multiple of the element size
            position += tensor.nbytes
        assert position == file.nbytes
    assert plan_files(tensors, limit) == layout


def test_names_are_unique() -> None:
    with pytest.raises(AssertionError, match="twice"):
        plan_files([bf16("a", 1), bf16("a", 2)])
