from pathlib import Path

import pytest
import torch
import xxhash

from moesaic.checkpoint.headers import read_header
from moesaic.checkpoint.streaming import COPY_BYTES, has_nonfinite, scan
from moesaic.common.errors import MoesaicError
from tests.tiny_files import write_tensors

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
NAN, INF = float("nan"), float("inf")


def raw(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())


def code(dtype: torch.dtype) -> str:
    return {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}[dtype]


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_kind_of_number(dtype: torch.dtype) -> None:
    limits = torch.finfo(dtype)
    values = [0.0, -0.0, 1, -1, limits.max, limits.min, limits.tiny, -limits.tiny, limits.smallest_normal / 2, 3]
    finite = torch.tensor(values, dtype=dtype)
    assert torch.isfinite(finite).all()
    assert not has_nonfinite(raw(finite), code(dtype))
    for bad in (NAN, -NAN, INF, -INF):
        for at in (0, 5, 9):
            damaged = finite.clone()
            damaged[at] = bad
            assert has_nonfinite(raw(damaged), code(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_all_codes_of_half_precision(dtype: torch.dtype) -> None:
    every = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(dtype)
    expected = ~torch.isfinite(every)
    found = torch.tensor([has_nonfinite(raw(every[i : i + 1]), code(dtype)) for i in range(2**16)])
    assert torch.equal(found, expected)


@pytest.mark.parametrize("workers", [1, 3])
def test_hashes_are_those_of_the_bytes(workers: int, tmp_path: Path) -> None:
    tensors = {
        "big": torch.randn(3 * COPY_BYTES // 4 + 7),
        "bf16": torch.randn(5, 3, dtype=torch.bfloat16),
        "int": torch.full((9,), -1),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(1.0),
    }
    write_tensors(tmp_path / "x.safetensors", tensors)
    infos = read_header(tmp_path / "x.safetensors")
    ticks: list[int] = []
    hashes = scan(infos.values(), workers, progress=ticks.append)
    assert hashes == {name: xxhash.xxh3_128_hexdigest(raw(tensor)) for name, tensor in tensors.items()}
    assert list(hashes) == list(infos)
    assert sum(ticks) == sum(info.nbytes for info in infos.values())


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_first_bad_tensor_is_named(bad: float, dtype: torch.dtype, workers: int, tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.ones(COPY_BYTES, dtype=dtype) for i in range(6)}
    tensors["t2"][-1] = bad
    tensors["t4"][0] = bad
    write_tensors(tmp_path / "x.safetensors", tensors)
    infos = [read_header(tmp_path / "x.safetensors")[f"t{i}"] for i in range(6)]
    with pytest.raises(MoesaicError) as caught:
        scan(infos, workers)
    assert "'t2'" in str(caught.value)
    assert str(tmp_path / "x.safetensors") in str(caught.value)
    assert "--allow-nonfinite" in str(caught.value)
    assert len(scan(infos, workers, allow_nonfinite=True)) == 6
