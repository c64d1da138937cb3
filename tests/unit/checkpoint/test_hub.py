"""Hub ids against a fake hub on this machine, in processes of their own (huggingface_hub reads its settings once)."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from tests.fake_hub import COMMIT, FakeHub, serve

CLIENT = """
import json, sys
from moesaic.checkpoint.source import open_checkpoint, open_headers
from moesaic.common.errors import MoesaicError

for verb, ref in json.loads(sys.argv[1]):
    try:
        c = {"open": open_checkpoint, "headers": open_headers}[verb](ref)
        print(json.dumps({
            "path": str(c.path), "name": c.name, "revision": c.revision, "config": c.config,
            "download_bytes": c.download_bytes,
            "tensors": {n: [i.dtype, i.shape, i.file.name, i.offset, i.nbytes] for n, i in c.tensors.items()},
        }))
    except MoesaicError as error:
        print(json.dumps(str(error)))
print(json.dumps(sorted({"torch", "transformers"} & sys.modules.keys())))
"""

A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
ONE = save({"w": torch.randn(300, 300)})
SHARDS = {A: save({"a": torch.randn(4, 5)}), B: save({"b": torch.randn(3), "c": torch.ones(2, dtype=torch.bfloat16)})}
BASIC = {"config.json": b'{"model_type": "llama"}', "tokenizer.json": b"{}", "generation_config.json": b"{}"}
NEVER = {
    "modeling_evil.py": b"raise SystemExit",
    "pytorch_model.bin": b"pickle",
    "consolidated.safetensors": ONE,
    "onnx/model.onnx": b"x",
    "README.md": b"x",
}


def index(**weight_map: str) -> bytes:
    return json.dumps({"metadata": {}, "weight_map": weight_map}).encode()


REPOS: dict[str, Mapping[str, bytes] | tuple[int, str]] = {
    "org/one": {**BASIC, **NEVER, "model.safetensors": ONE, "chat_template.jinja": b"x", "tokenizer.model": b"m"},
    "org/many": {**BASIC, **NEVER, **SHARDS, INDEX: index(a=A, b=B, c=B)},
    "org/lost-shard": {**BASIC, A: SHARDS[A], INDEX: index(a=A, b=B)},
    "org/lost-tensor": {**BASIC, **SHARDS, INDEX: index(a=A, b=B, c=B, d=A)},
    "org/evil": {**BASIC, INDEX: index(a="../../../../etc/passwd.safetensors")},
    "org/code": {**BASIC, **NEVER, INDEX: index(a="modeling_evil.py")},
    "org/pickle": {**BASIC, "pytorch_model.bin": b"pickle"},
    "org/garbage": {**BASIC, "model.safetensors": b"\xff" * 200},
    "org/fp8": {**BASIC, "model.safetensors": save({"w": torch.ones(3).to(torch.float8_e4m3fn)})},
    "org/gated": (403, "GatedRepo"),
    "org/private": (401, "RepoNotFound"),
    "org/disabled": (403, "DisabledRepo"),
    "org/busy": (429, ""),
    "org/forbidden": (403, ""),
    "org/broken": (501, ""),
}


def client(cache: Path, endpoint: str, *calls: tuple[str, str], **settings: str) -> list[Any]:
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(cache),
        "HF_HOME": str(cache),
        "HF_ENDPOINT": endpoint,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_ETAG_TIMEOUT": "3",
        **settings,
    }
    command = [sys.executable, "-W", "error", "-c", CLIENT, json.dumps(calls)]
    run = subprocess.run(command, env=environment, cwd=cache, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "Fetching" not in run.stderr  # no bars where there is no terminal
    *results, heavy = map(json.loads, run.stdout.splitlines())
    assert heavy == []
    return results


def test_download(tmp_path: Path) -> None:
    with serve(FakeHub(REPOS)) as hub:
        refs = ["org/one", "org/many", "org/many@refs/pr/1", f"org/one@{COMMIT}"]
        results = client(tmp_path, hub.url, *(("open", ref) for ref in refs))
        again = client(tmp_path, hub.url, ("open", "org/many"), HF_HUB_OFFLINE="1")
    for ref, result in zip(refs, results, strict=True):
        assert result["name"] == ref
        assert result["revision"] == COMMIT
        assert result["config"] == {"model_type": "llama"}
        assert result["download_bytes"] == 0
    assert results[0]["tensors"]["w"][:3] == ["F32", [300, 300], "model.safetensors"]
    assert sorted(results[1]["tensors"]) == ["a", "b", "c"]
    fetched = sorted(path.name for path in Path(results[0]["path"]).rglob("*"))
    assert fetched == sorted([*BASIC, "model.safetensors", "chat_template.jinja", "tokenizer.model"])
    assert not any(name in line for line in hub.requests for name in NEVER)
    assert again[0] == results[1]


def test_headers_only(tmp_path: Path) -> None:
    with serve(FakeHub(REPOS)) as hub:
        headers = client(tmp_path, hub.url, ("headers", "org/one"), ("headers", "org/many@refs/pr/1"))
        sent = dict(hub.bytes_sent)
        whole = client(tmp_path, hub.url, ("open", "org/one"), ("open", "org/many@refs/pr/1"))
        cached = client(tmp_path, hub.url, ("headers", "org/one"), ("headers", "org/many@refs/pr/1"))
        offline = client(tmp_path, hub.url, ("headers", "org/one"), HF_HUB_OFFLINE="1")
    assert sent["model.safetensors"] == 100_001 < len(ONE)
    assert headers[0]["download_bytes"] == len(ONE)
    assert headers[1]["download_bytes"] == sum(map(len, SHARDS.values()))
    for before, after in zip(headers, whole, strict=True):
        assert before["tensors"] == after["tensors"]  # the offsets too
        assert before["config"] == after["config"]
        assert before["revision"] == COMMIT
    assert cached == whole
    assert offline == whole[:1]


BAD = {
    "org/gated": ["gated", "{url}/org/gated", "hf auth login", "HF_TOKEN"],
    "org/private": ["no repository", "spelling", "hf auth login"],
    "org/absent": ["no repository", "spelling"],
    "org/one@v7": ["no revision 'v7'", "{url}/org/one"],
    "org/busy": ["wait"],
    "org/forbidden": ["may not be read with your token"],
    "org/broken": ["the hub answered 501"],
    "org/disabled": ["disabled"],
    "org/pickle": ["pickled", "save_pretrained"],
    "org/code": ["modeling_evil.py", "not a .safetensors"],
    "org/lost-shard": [B],
    "org/lost-tensor": ["'d'", A],
    "org/evil": ["passwd"],
    "org/garbage": ["model.safetensors"],
    "org/fp8": ["quantised"],
    "org/bad..name": ["hub id"],
}


@pytest.mark.parametrize("verb", ["open", "headers"])
def test_errors_say_what_to_do(verb: str, tmp_path: Path) -> None:
    with serve(FakeHub(REPOS)) as hub:
        results = client(tmp_path, hub.url, *((verb, ref) for ref in BAD))
    for (ref, parts), message in zip(BAD.items(), results, strict=True):
        assert isinstance(message, str), ref
        assert "\n" not in message
        assert ref.split("@")[0].split("/")[1] in message
        for part in parts:
            assert part.format(url=hub.url) in message, message
    assert not any(".py" in line or ".bin" in line for line in hub.requests)


@pytest.mark.parametrize("verb", ["open", "headers"])
def test_without_a_hub(verb: str, tmp_path: Path) -> None:
    nobody = "http://127.0.0.1:9"
    (offline,) = client(tmp_path, nobody, (verb, "org/one"), HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE" in offline
    assert "unset it" in offline
    (unreachable,) = client(tmp_path, nobody, (verb, "org/one"))
    assert f"{nobody} cannot be reached" in unreachable
    assert "\n" not in offline + unreachable


def test_folders_come_first(tmp_path: Path) -> None:
    folder = tmp_path / "org" / "one"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(ONE)
    with serve(FakeHub(REPOS)) as hub:
        results = client(tmp_path, hub.url, ("open", "org/one"), ("headers", "org/one"))
    assert [result["path"] for result in results] == ["org/one", "org/one"]
    assert hub.requests == []
