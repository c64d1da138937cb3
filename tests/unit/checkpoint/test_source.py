import json
import os
from pathlib import Path

import pytest
import torch

from moesaic.checkpoint.source import open_checkpoint, open_headers
from moesaic.common.errors import MoesaicError
from tests.tiny_files import checkpoint_folder, raw_safetensors, write_tensors

A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
W = torch.ones(2, 3)


def refused(folder: Path | str, *parts: str) -> str:
    with pytest.raises(MoesaicError) as caught:
        open_checkpoint(folder)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message
    return message


def test_single_file(tmp_path: Path) -> None:
    folder = checkpoint_folder(tmp_path / "c", config={"model_type": "qwen3"})
    for checkpoint in (open_checkpoint(folder), open_checkpoint(str(folder)), open_headers(folder)):
        assert checkpoint.path == folder
        assert checkpoint.name == str(folder)
        assert checkpoint.revision is None
        assert checkpoint.config == {"model_type": "qwen3"}
        assert list(checkpoint.tensors) == ["w"]
        assert checkpoint.download_bytes == 0


def test_shards(tmp_path: Path) -> None:
    folder = checkpoint_folder(tmp_path / "c", {A: {"a": W}, B: {"b": W, "c": W}})
    assert sorted(open_checkpoint(folder).tensors) == ["a", "b", "c"]
    extra = checkpoint_folder(tmp_path / "d", {A: {"a": W}, B: {"b": W}}, weight_map={"a": A, "b": B})
    write_tensors(extra / B, {"b": W, "unnamed": W})
    assert sorted(open_checkpoint(extra).tensors) == ["a", "b", "unnamed"]


def test_missing_parts(tmp_path: Path) -> None:
    folder = checkpoint_folder(tmp_path / "c", {A: {"a": W}, B: {"b": W}})
    (folder / B).unlink()
    refused(folder, INDEX, B)
    refused(tmp_path / "absent", str(tmp_path / "absent"), "no such folder")
    refused(folder / A, "is a file")
    refused("gpt2", "no such folder", "org/name")
    (folder / "config.json").unlink()
    refused(folder, "no config.json")


def test_tensor_named_but_absent(tmp_path: Path) -> None:
    shards = {A: {"a": W}, B: {"b": W}}
    refused(checkpoint_folder(tmp_path / "c", shards, weight_map={"a": A, "b": B, "lost": B}), INDEX, "'lost'", B)
    refused(checkpoint_folder(tmp_path / "d", shards, weight_map={"x": A, "b": B}), "'x'", A)
    refused(checkpoint_folder(tmp_path / "e", shards, weight_map={"a": B, "b": A}), "'a'", f"it is in {A}")


def test_duplicate_tensor(tmp_path: Path) -> None:
    folder = checkpoint_folder(tmp_path / "c", {A: {"a": W, "twin": W}, B: {"twin": W}})
    refused(folder, "'twin'", A, B)


@pytest.mark.parametrize("name", ["../outside.safetensors", "sub/../../outside.safetensors", "ABSOLUTE"])
def test_index_leads_outside(name: str, tmp_path: Path) -> None:
    write_tensors(tmp_path / "outside.safetensors", {"w": W})
    name = str(tmp_path / "outside.safetensors") if name == "ABSOLUTE" else name
    folder = checkpoint_folder(tmp_path / "c", {}, weight_map={"w": name})
    refused(folder, name, "outside")


def test_links_lead_outside(tmp_path: Path) -> None:
    write_tensors(tmp_path / "outside.safetensors", {"w": W})
    folder = checkpoint_folder(tmp_path / "c", {}, weight_map={"w": A})
    (folder / A).symlink_to(tmp_path / "outside.safetensors")
    refused(folder, A, "outside")
    sub = checkpoint_folder(tmp_path / "d", {}, weight_map={"w": "sub/outside.safetensors"})
    (sub / "sub").symlink_to(tmp_path)
    refused(sub, "sub/outside.safetensors")
    single = checkpoint_folder(tmp_path / "e", {})
    (single / INDEX).unlink()
    (single / "model.safetensors").symlink_to(tmp_path / "outside.safetensors")
    refused(single, "model.safetensors", "outside")
    dangling = checkpoint_folder(tmp_path / "f", {})
    (dangling / INDEX).unlink()
    (dangling / "model.safetensors").symlink_to("nowhere")
    refused(dangling, "no such file")


def test_links_inside_and_link_to_the_folder_work(tmp_path: Path) -> None:
    folder = checkpoint_folder(tmp_path / "c", {}, weight_map={"w": A})
    write_tensors(folder / "real.safetensors", {"w": W})
    (folder / A).symlink_to("real.safetensors")
    (tmp_path / "link").symlink_to(folder)
    assert list(open_checkpoint(tmp_path / "link").tensors) == ["w"]


def test_hub_cache_links_work(tmp_path: Path) -> None:
    repo = tmp_path / "models--org--name"
    real = checkpoint_folder(tmp_path / "real", {A: {"a": W}, B: {"b": W}})
    (repo / "blobs").mkdir(parents=True)
    snapshot = repo / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for i, file in enumerate(sorted(real.iterdir())):
        file.rename(repo / "blobs" / str(i))
        (snapshot / file.name).symlink_to(f"../../blobs/{i}")
    assert sorted(open_checkpoint(snapshot).tensors) == ["a", "b"]
    (snapshot / A).unlink()
    (snapshot / A).symlink_to("../../../elsewhere")
    refused(snapshot, A, "outside")


def test_index_may_only_name_safetensors(tmp_path: Path) -> None:
    refused(checkpoint_folder(tmp_path / "c", {}, weight_map={"w": "model.bin"}), "'model.bin'")


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 1}}', '{"weight_map": {}}', "{"]
)
def test_bad_index(text: str, tmp_path: Path) -> None:
    folder = checkpoint_folder(tmp_path / "c", {A: {"a": W}})
    (folder / INDEX).write_text(text)
    refused(folder, INDEX)


@pytest.mark.parametrize("text", ["", "[]", "nope", "\xff"])
def test_bad_config(text: str, tmp_path: Path) -> None:
    folder = checkpoint_folder(tmp_path / "c")
    (folder / "config.json").write_text(text, encoding="latin-1")
    refused(folder, "config.json")


def test_truncated_shard(tmp_path: Path) -> None:
    folder = checkpoint_folder(tmp_path / "c", {A: {"a": W}, B: {"b": W}})
    os.truncate(folder / B, (folder / B).stat().st_size - 1)
    refused(folder, B, "truncated")


def test_no_safetensors(tmp_path: Path) -> None:
    folder = checkpoint_folder(tmp_path / "c", {})
    (folder / INDEX).unlink()
    refused(folder, "neither")
    (folder / "x.gguf").touch()
    refused(folder, "GGUF")
    (folder / "pytorch_model.bin").touch()
    refused(folder, "pickled", "save_pretrained")
    write_tensors(folder / A, {"a": W})
    refused(folder, "only other .safetensors")
    (folder / "model.safetensors").write_bytes(raw_safetensors({}))
    refused(folder, "no tensor")


@pytest.mark.parametrize(
    "config",
    [
        {"quantization_config": {"quant_method": "fp8"}},
        {"quantization_config": {"quant_method": "gptq"}},
        {"compression_config": {"quant_method": "fp8"}},
        {"text_config": {"quantization_config": {"quant_method": "awq"}}},
    ],
)
def test_quantised_config(config: dict, tmp_path: Path) -> None:
    method = json.dumps(config).split('"quant_method": "')[1].split('"')[0]
    refused(checkpoint_folder(tmp_path / "c", config=config), "quantised", method, "dequantise")


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("w", W.to(torch.float8_e4m3fn)),
        ("w", W.to(torch.uint8)),
        ("w", W.to(torch.int8)),
        ("layers.0.up_proj.qweight", W.to(torch.int32)),
        ("layers.0.up_proj.weight_scale_inv", W),
    ],
)
def test_quantised_tensors(name: str, tensor: torch.Tensor, tmp_path: Path) -> None:
    refused(checkpoint_folder(tmp_path / "c", {"model.safetensors": {name: tensor}}), "quantised", repr(name))


def test_integer_buffers_are_fine(tmp_path: Path) -> None:
    buffers = {"position_ids": torch.arange(3), "mask": torch.ones(2, dtype=torch.bool), "w": W}
    assert len(open_checkpoint(checkpoint_folder(tmp_path / "c", {"model.safetensors": buffers})).tensors) == 3


def test_what_is_no_utf8_or_no_file_name_is_said_so(tmp_path: Path) -> None:
    folder = checkpoint_folder(tmp_path / "a", {A: {"a": W}, B: {"b": W}})
    (folder / INDEX).write_bytes(b"\xff\xfe{}")
    refused(folder, INDEX, "not UTF-8 (byte 0)")
    (folder / INDEX).write_text('{"weight_map": {"a": 1}}')
    refused(folder, INDEX, "weight_map.a: expected text, got 1")
    (folder / "config.json").write_bytes(b'{"a": "\xe9"}')
    refused(folder, "config.json", "not UTF-8 (byte 7)")


@pytest.mark.parametrize("name", ["", " ", "\n"])
def test_an_empty_name_is_not_this_folder(name: str) -> None:
    for opener in (open_checkpoint, open_headers):
        with pytest.raises(MoesaicError, match="the name of a checkpoint is empty"):
            opener(name)
