import contextlib
import json
import os
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from moesaic.checkpoint.record import fingerprint
from moesaic.checkpoint.source import open_checkpoint
from moesaic.checkpoint.streaming import HASH, scan
from moesaic.checkpoint.writer import CheckpointWriter, Layout, OutputTensor, Written, plan_files
from moesaic.common.errors import MoesaicError
from tests.tiny_files import checkpoint_folder

TENSORS = {
    "a": torch.randn(6, 4, dtype=torch.bfloat16),
    "b": torch.randn(3, 5),
    "none": torch.empty(0, 3),
    "scalar": torch.tensor(1.5),
}
CODES = {torch.bfloat16: "BF16", torch.float32: "F32"}


def layout_of(tensors: dict[str, torch.Tensor], shard_size: int = 10**9) -> Layout:
    return plan_files(
        [OutputTensor(name=n, dtype=CODES[t.dtype], shape=tuple(t.shape)) for n, t in tensors.items()], shard_size
    )


def write_all(folder: Path, shard_size: int = 10**9) -> Written:
    folder.mkdir()
    with CheckpointWriter(folder, layout_of(TENSORS, shard_size)) as writer:
        for name, tensor in TENSORS.items():
            writer.write(name, tensor)
        return writer.finish()


def load_folder(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("shard_size", [10**9, 50])
def test_the_library_reads_it_back(shard_size: int, tmp_path: Path) -> None:
    write_all(tmp_path / "out", shard_size)
    loaded = load_folder(tmp_path / "out")
    assert loaded.keys() == TENSORS.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())
    index = tmp_path / "out" / "model.safetensors.index.json"
    assert index.exists() == (shard_size == 50)
    if index.exists():
        files = json.loads(index.read_text())["weight_map"]
        assert all(name in load_file(tmp_path / "out" / file) for name, file in files.items())


def test_hashes_do_not_depend_on_shards_and_equal_scan(tmp_path: Path) -> None:
    one, many = write_all(tmp_path / "one"), write_all(tmp_path / "many", 30)
    assert one.weights_hash == many.weights_hash
    assert one.tensor_hashes == many.tensor_hashes
    for name in ("one", "many"):
        (tmp_path / name / "config.json").write_text("{}")
        checkpoint = open_checkpoint(tmp_path / name)
        assert scan(checkpoint.tensors.values()) == one.tensor_hashes
        assert fingerprint(checkpoint, workers=2) == one.weights_hash
    changed = checkpoint_folder(tmp_path / "changed", {"model.safetensors": TENSORS | {"scalar": torch.tensor(1.25)}})
    assert fingerprint(open_checkpoint(changed)) != one.weights_hash
    renamed = dict(zip(["b2", "a", "none", "scalar"], [TENSORS[n] for n in ("b", "a", "none", "scalar")], strict=True))
    assert fingerprint(open_checkpoint(checkpoint_folder(tmp_path / "r", {"model.safetensors": renamed}))) != (
        one.weights_hash
    )


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_order_of_runs(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("out")
    tensor = torch.randn(97)
    cuts = sorted(data.draw(st.sets(st.integers(1, 96), max_size=8)))
    runs = list(zip([0, *cuts], [*cuts, 97], strict=True))
    order = data.draw(st.permutations(runs))
    first = data.draw(st.sampled_from([0, *cuts, 97]))
    with CheckpointWriter(folder, layout_of({"t": tensor}), hash_first={"t": 4 * first}) as writer:
        for start, stop in order:
            piece = tensor[start:stop]
            writer.write("t", piece if start % 2 else bytes(piece.numpy().data.cast("B")), start)
        written = writer.finish()
    hashes = written.tensor_hashes
    assert written.first_hashes == {"t": HASH(tensor[:first].numpy().tobytes()).hexdigest()}
    assert torch.equal(load_file(folder / "model.safetensors")["t"], tensor)
    (folder / "config.json").write_text("{}")
    assert hashes == scan(open_checkpoint(folder).tensors.values())


def test_many_threads_one_tensor(tmp_path: Path) -> None:
    tensor = torch.randn(64, 50_000)
    with CheckpointWriter(tmp_path, layout_of({"t": tensor})) as writer:
        threads = [
            threading.Thread(target=lambda k=k: [writer.write("t", tensor[i], i * 50_000) for i in range(k, 64, 4)])
            for k in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        hashes = writer.finish(workers=2).tensor_hashes
    assert torch.equal(load_file(tmp_path / "model.safetensors")["t"], tensor)
    (tmp_path / "config.json").write_text("{}")
    assert hashes == scan(open_checkpoint(tmp_path).tensors.values())


def test_every_element_exactly_once(tmp_path: Path) -> None:
    tensor = torch.randn(10)
    with CheckpointWriter(tmp_path, layout_of({"t": tensor})) as writer:
        writer.write("t", tensor[:4])
        writer.write("t", tensor[5:], 5)
        for start, stop in [(3, 5), (4, 6), (0, 10), (5, 6), (0, 1), (9, 10)]:
            with pytest.raises(RuntimeError, match="twice"):
                writer.write("t", tensor[start:stop], start)
        for start in (-1, 10):
            with pytest.raises(RuntimeError, match="outside"):
                writer.write("t", tensor[:1], start)
        with pytest.raises(RuntimeError, match="1 tensors are not complete, the first is 't'"):
            writer.finish()
        writer.write("t", tensor[4:5], 4)
        writer.finish()
    assert torch.equal(load_file(tmp_path / "model.safetensors")["t"], tensor)


def test_leaving_without_finish_is_a_bug(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="without finish"), CheckpointWriter(tmp_path, layout_of(TENSORS)):
        pass


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (torch.zeros(6, 4), "declared BF16"),
        (TENSORS["a"].t(), "not contiguous"),
        (torch.zeros(6, 4, dtype=torch.bfloat16, device="meta"), "on meta"),
        (b"123", "inside an element"),
    ],
)
def test_wrong_tensors_are_bugs(bad: torch.Tensor | bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=message), CheckpointWriter(tmp_path, layout_of(TENSORS)) as writer:
        writer.write("a", bad)


def test_a_failed_write_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with contextlib.suppress(RuntimeError), CheckpointWriter(tmp_path, layout_of({"t": torch.ones(3)})) as writer:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", full)
            with pytest.raises(MoesaicError, match=r"model.safetensors: the disk is full"):
                writer.write("t", torch.ones(3))
        with pytest.raises(RuntimeError, match="not complete"):
            writer.finish()


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, view, offset: real(fd, view[:7], offset))
    write_all(tmp_path / "out")
    assert all(torch.equal(load_folder(tmp_path / "out")[name], tensor) for name, tensor in TENSORS.items())


def test_files_beyond_two_and_four_gibibytes(tmp_path: Path) -> None:
    """Offsets need 64 bits: a sparse file whose last tensor lies beyond 4 GiB (only its ends are written)."""
    from moesaic.checkpoint.pio import read_into, write_all

    file = tmp_path / "large"
    with file.open("w+b") as stream:
        data = memoryview(b"\x01\x02\x03")
        write_all(stream.fileno(), data, (1 << 32) + 5, file)
        back = memoryview(bytearray(3))
        read_into(stream.fileno(), back, (1 << 32) + 5, file)
        assert back == data
