import gc
import os
from pathlib import Path

import pytest
import torch

from moesaic.checkpoint.headers import TensorInfo, read_header
from moesaic.checkpoint.reader import DTYPE_CODES, TORCH_DTYPES, BufferPool, read_tensor
from moesaic.common.errors import MoesaicError
from tests.tiny_files import write_tensors

LARGE = torch.arange(600_000, dtype=torch.float32).reshape(600, 1000)  # takes the pool's way


@pytest.fixture
def infos(tmp_path: Path) -> dict[str, TensorInfo]:
    file = tmp_path / "x.safetensors"
    write_tensors(file, {"large": LARGE, "small": torch.arange(12).reshape(4, 3), "scalar": torch.tensor(2.5)})
    return read_header(file)


def test_rows(infos: dict[str, TensorInfo]) -> None:
    for name in ("large", "small"):
        whole = read_tensor(infos[name])
        assert whole.is_contiguous()
        for start, stop in [(0, 1), (1, 3), (3, None), (0, 4), (2, 2), (0, 0)]:
            assert torch.equal(read_tensor(infos[name], start, stop), whole[start:stop])
    assert torch.equal(read_tensor(infos["large"]), LARGE)
    assert read_tensor(infos["scalar"]) == 2.5


def test_bad_rows_are_bugs(infos: dict[str, TensorInfo]) -> None:
    for start, stop in [(-1, 2), (0, 5), (3, 2)]:
        with pytest.raises(AssertionError, match="no rows"):
            read_tensor(infos["small"], start, stop)
    with pytest.raises(AssertionError, match="scalar"):
        read_tensor(infos["scalar"], 0, 1)


def test_tensors_own_their_memory(infos: dict[str, TensorInfo]) -> None:
    """Reused blocks never show through: a freed tensor's block may be reused, a living one's (or a view's) not."""
    first = read_tensor(infos["large"])
    view, array = first[5:7], first.numpy()
    del first
    gc.collect()
    other = read_tensor(infos["large"])
    other.fill_(-1)
    assert torch.equal(view, LARGE[5:7])
    assert torch.equal(torch.from_numpy(array), LARGE)
    assert torch.equal(read_tensor(infos["large"]), LARGE)


def test_file_cut_or_gone_after_the_header(infos: dict[str, TensorInfo]) -> None:
    file = infos["large"].file
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(MoesaicError, match="ends early"):
        read_tensor(infos["large"])
    file.unlink()
    with pytest.raises(MoesaicError, match="not on this machine"):
        read_tensor(infos["large"])


def test_sub_byte_dtypes_are_refused(infos: dict[str, TensorInfo]) -> None:
    info = TensorInfo(name="q", dtype="F4", shape=(2,), file=infos["small"].file, offset=0, nbytes=1)
    with pytest.raises(MoesaicError, match="'q' is F4"):
        read_tensor(info)


def test_tables_are_inverse() -> None:
    assert {TORCH_DTYPES[code]: code for code in TORCH_DTYPES} == DTYPE_CODES


def test_short_reads_are_continued(infos: dict[str, TensorInfo], monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: real(fd, [views[0][:100_001]], offset))
    assert torch.equal(read_tensor(infos["large"]), LARGE)


def test_pool_reuses_blocks_and_drops_what_is_too_much() -> None:
    pool = BufferPool(idle_bytes=8 << 20)
    first = pool.take(3 << 20)
    address = first.ctypes.data
    del first
    assert pool.take(4 << 20).ctypes.data == address
    held = [pool.take(4 << 20) for _ in range(5)]
    assert len({array.ctypes.data for array in held}) == 5
    del held
    assert 0 < sum(map(len, pool._idle)) <= 8 << 20
    large = pool.take(100 << 20)
    del large
    assert sum(map(len, pool._idle)) + sum(map(len, pool._returned)) <= 8 << 20
