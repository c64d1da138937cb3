import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, load_file, save

from moesaic.checkpoint.headers import DTYPE_BITS, MAX_HEADER_BYTES, TensorInfo, read_header, tensor_bytes
from moesaic.checkpoint.reader import TORCH_DTYPES, read_tensor
from moesaic.checkpoint.writer import OutputTensor, plan_files
from moesaic.common.errors import MoesaicError
from tests.tiny_files import entry, raw_safetensors

NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20).filter(lambda n: n != "__metadata__")
SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
# The safetensors library (0.8) writes F8_E8M0 but its `load` has no entry for it.
CODES = st.sampled_from(sorted(TORCH_DTYPES.keys() - {"F8_E8M0"}))
TENSORS = st.dictionaries(NAMES, st.tuples(CODES, SHAPES), min_size=1, max_size=6)


def random_tensor(code: str, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Any bytes (NaN codes among them), so that equality below means equality of bits."""
    generator = torch.Generator().manual_seed(seed)
    nbytes = tensor_bytes(code, shape)
    limit = 2 if code == "BOOL" else 256
    data = torch.randint(limit, (nbytes,), dtype=torch.uint8, generator=generator)
    return data.view(TORCH_DTYPES[code]).reshape(shape)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
    )


@settings(max_examples=60, deadline=None)
@given(spec=TENSORS)
def test_reads_what_the_library_writes(spec: dict, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.mktemp("header") / "x.safetensors"
    tensors = {name: random_tensor(*what, seed=i) for i, (name, what) in enumerate(spec.items())}
    file.write_bytes(save(tensors))
    infos = read_header(file)
    assert infos.keys() == tensors.keys()
    for name, info in infos.items():
        assert (info.name, info.dtype, info.shape) == (name, *spec[name])
        assert same_bits(read_tensor(info), tensors[name])


@settings(max_examples=60, deadline=None)
@given(spec=TENSORS)
def test_the_library_reads_what_we_plan(spec: dict, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.mktemp("planned") / "x.safetensors"
    layout = plan_files([OutputTensor(name=name, dtype=code, shape=shape) for name, (code, shape) in spec.items()])
    tensors = {name: random_tensor(*what, seed=i) for i, (name, what) in enumerate(spec.items())}
    data = [tensors[t.name].reshape(-1).view(torch.uint8).numpy().tobytes() for t in layout.files[0].tensors]
    file.write_bytes(layout.files[0].header + b"".join(data))
    for loaded in (load(file.read_bytes()), load_file(file)):
        assert loaded.keys() == tensors.keys()
        assert all(same_bits(loaded[name], tensors[name]) for name in tensors)
    assert {name: (i.dtype, i.shape) for name, i in read_header(file).items()} == spec


def outcome(file: Path) -> tuple[dict[str, TensorInfo], str]:
    try:
        return read_header(file), ""
    except MoesaicError as error:
        return {}, str(error)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_damage_is_refused_or_harmless(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Any bytes changed or cut: one line, or tensors that lie within the file; never another exception."""
    good = bytearray(save({"a": torch.ones(3, 2), "b": torch.ones(5, dtype=torch.bfloat16)}))
    for _ in range(data.draw(st.integers(0, 3))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    damaged = bytes(good[: data.draw(st.integers(0, len(good)))])
    file = tmp_path_factory.mktemp("damage") / "x.safetensors"
    file.write_bytes(damaged)
    infos, message = outcome(file)
    assert "\n" not in message
    assert all(i.offset >= 8 and i.offset + i.nbytes <= len(damaged) for i in infos.values())
    assert infos or message.startswith(str(file)) or damaged[8:10] == b"{}"


F32 = "F32"
BAD = {
    "overlap": ({"a": entry(F32, [2], 0, 8), "b": entry(F32, [2], 4, 12)}, 12, "'b' overlaps"),
    "same place": ({"a": entry(F32, [2], 0, 8), "b": entry(F32, [2], 0, 8)}, 8, "overlaps"),
    "gap": ({"a": entry(F32, [1], 0, 4), "b": entry(F32, [1], 8, 12)}, 12, "'b' leaves a gap"),
    "gap at the start": ({"a": entry(F32, [1], 4, 8)}, 8, "leaves a gap"),
    "beyond the end": ({"a": entry(F32, [4], 0, 16)}, 12, "truncated"),
    "trailing bytes": ({"a": entry(F32, [1], 0, 4)}, 5, "has 74 bytes and its header describes 73"),
    "wrong size": ({"a": entry(F32, [2], 0, 4)}, 4, "4 bytes for 8 bytes of F32"),
    "backwards": ({"a": entry(F32, [1], 4, 0)}, 4, "-4 bytes"),
    "negative": ({"a": entry(F32, [1], -4, 0)}, 4, "bad data_offsets"),
    "three offsets": ({"a": {"dtype": F32, "shape": [1], "data_offsets": [0, 4, 8]}}, 4, "bad data_offsets"),
    "negative shape": ({"a": entry(F32, [-1, -1], 0, 4)}, 4, "bad shape"),
    "float shape": ({"a": {"dtype": F32, "shape": [1.0], "data_offsets": [0, 4]}}, 4, "bad shape"),
    "bool shape": ({"a": {"dtype": F32, "shape": [True], "data_offsets": [0, 4]}}, 4, "bad shape"),
    "huge shape": ({"a": entry(F32, [2**62, 2**62], 0, 4)}, 4, "4 bytes for"),
    "unknown dtype": ({"a": entry("F99", [1], 0, 4)}, 4, "unknown dtype 'F99'"),
    "unhashable dtype": ({"a": {"dtype": [], "shape": [1], "data_offsets": [0, 4]}}, 4, "unknown dtype"),
    "no entry": ({"a": 3}, 0, "no description"),
    "list": ([1], 0, "not a JSON object"),
    "not json": (b"{nope", 0, "not JSON"),
    "not utf-8": (b'{"\xff": 1}', 0, "not JSON"),
    "deep": (b"[" * 100_000, 0, "not JSON"),
    "duplicate": (
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
        8,
        "'a' is given twice",
    ),
    "newline in a name": ({"a\nb": entry("F99", [1], 0, 4)}, 4, r"'a\nb'"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_headers_are_one_line(case: str, tmp_path: Path) -> None:
    header, nbytes, message = BAD[case]
    file = tmp_path / "x.safetensors"
    file.write_bytes(raw_safetensors(header, bytes(nbytes)))
    with pytest.raises(MoesaicError) as caught:
        read_header(file)
    assert message in str(caught.value)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 40])
def test_every_early_end_is_truncation(size: int, tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes(raw_safetensors({"a": entry(F32, [1], 0, 4)}, bytes(4))[:size])
    with pytest.raises(MoesaicError, match="truncated"):
        read_header(file)


def test_other_files_are_named_for_what_they_are(tmp_path: Path) -> None:
    pointer, other = tmp_path / "p.safetensors", tmp_path / "o.safetensors"
    pointer.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    other.write_bytes(b"PK\x03\x04" + bytes([255]) * 100)
    with pytest.raises(MoesaicError, match="git lfs pull"):
        read_header(pointer)
    with pytest.raises(MoesaicError, match="not a safetensors file"):
        read_header(other)
    with pytest.raises(MoesaicError, match="no such file"):
        read_header(tmp_path / "absent.safetensors")
    with pytest.raises(MoesaicError, match="no such file"):
        read_header(tmp_path)


def test_metadata_padding_and_order(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    header = {"__metadata__": {"format": "pt"}, "b": entry(F32, [1], 4, 8), "a": entry(F32, [1], 0, 4)}
    file.write_bytes(raw_safetensors(json.dumps(header).encode() + b"   ", bytes(8)))
    infos = read_header(file)
    assert list(infos) == ["a", "b"]
    assert [i.offset for i in infos.values()] == [8 + len(json.dumps(header)) + 3, 12 + len(json.dumps(header)) + 3]


def test_sizes_cover_every_dtype() -> None:
    assert tensor_bytes("F4", (3,)) == 2
    assert all(tensor_bytes(code, ()) == math.ceil(bits / 8) for code, bits in DTYPE_BITS.items())
    assert all(dtype.itemsize * 8 == DTYPE_BITS[code] for code, dtype in TORCH_DTYPES.items())
    assert MAX_HEADER_BYTES == 100_000_000
