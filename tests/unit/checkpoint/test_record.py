import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moesaic.checkpoint.headers import SIDE_FILES, TOKENIZER_FILES
from moesaic.checkpoint.record import (
    check_side_files,
    combine,
    copy_side_files,
    fingerprint,
    read_provenance,
    side_files,
    source_record,
    versions,
    weights_hash,
    write_provenance,
)
from moesaic.checkpoint.source import open_checkpoint
from moesaic.checkpoint.streaming import scan
from moesaic.common.errors import MoesaicError
from tests.tiny_files import checkpoint_folder

SIDE = {
    "tokenizer.json": b'{"a": 1}\r\n',
    "tokenizer.model": bytes(range(256)),
    "merges.txt": b"\xff\x00",
    "vocab.json": b"",
    "generation_config.json": b"{ }",
    "chat_template.jinja": b"{{ x }}",
    "additional_chat_templates/tool.jinja": b"t",
}
OTHER = (
    "modeling_x.py",
    "pytorch_model.bin",
    "README.md",
    "notes.txt",
    "training_args.bin",
    "original/tokenizer.model",
)


def source(folder: Path) -> Path:
    checkpoint_folder(folder)
    for name, data in {**SIDE, **dict.fromkeys(OTHER, b"x")}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def test_side_files_byte_for_byte(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(source(tmp_path / "src"))
    (tmp_path / "out").mkdir()
    assert copy_side_files(checkpoint, tmp_path / "out") == sorted(SIDE)
    copied = {
        p.relative_to(tmp_path / "out").as_posix(): p.read_bytes() for p in tmp_path.glob("out/**/*") if p.is_file()
    }
    assert copied == SIDE
    assert side_files(checkpoint, TOKENIZER_FILES) == ["merges.txt", "tokenizer.json", "tokenizer.model", "vocab.json"]
    assert set(TOKENIZER_FILES) < set(SIDE_FILES)


def test_side_files_cannot_take_in_strangers(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("key")
    folder = checkpoint_folder(tmp_path / "src")
    (folder / "tokenizer.json").symlink_to(tmp_path / "secret")
    (tmp_path / "out").mkdir()
    with pytest.raises(MoesaicError, match=r"'tokenizer.json' leads outside"):
        copy_side_files(open_checkpoint(folder), tmp_path / "out")


def test_a_link_that_leads_nowhere_is_named(tmp_path: Path) -> None:
    folder = checkpoint_folder(tmp_path / "src")
    (folder / "tokenizer.json").symlink_to(folder / "gone.json")
    with pytest.raises(MoesaicError, match=r"src/tokenizer.json: is a link to a file that does not exist"):
        side_files(open_checkpoint(folder))


@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json", "special_tokens_map.json"])
def test_files_that_would_be_copied_broken_are_named(tmp_path: Path, name: str) -> None:
    folder = checkpoint_folder(tmp_path / "src")
    (folder / name).write_text("{}")
    (folder / "merges.txt").write_text("{")
    assert check_side_files(open_checkpoint(folder)) == 3
    for content in (b'{"a": ', b"\xff\xfe{}", b"[]", b""):
        (folder / name).write_bytes(content)
        with pytest.raises(MoesaicError, match=rf"src/{name}: not (JSON|UTF-8|a JSON object)"):
            check_side_files(open_checkpoint(folder))


def test_weights_hash_depends_on_each_part_and_not_on_order() -> None:
    base = [("a", "F32", (2, 3), "00"), ("b", "F32", (), "11")]
    reference = weights_hash(base)
    assert weights_hash(reversed(base)) == reference == weights_hash([("a", "F32", [2, 3], "00"), base[1]])
    variants = [
        ("a2", "F32", (2, 3), "00"),
        ("a", "BF16", (2, 3), "00"),
        ("a", "F32", (3, 2), "00"),
        ("a", "F32", (2, 3), "01"),
    ]
    hashes = {weights_hash([variant, base[1]]) for variant in variants} | {weights_hash(base[:1]), weights_hash([])}
    assert len(hashes) == 6
    assert reference not in hashes


def test_fingerprint_is_combine_of_scan(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.randn(5, i) for i in range(5)}
    one = open_checkpoint(checkpoint_folder(tmp_path / "one", {"model.safetensors": tensors}))
    shards = {
        "x.safetensors": {n: t for n, t in tensors.items() if n < "t2"},
        "y.safetensors": {n: t for n, t in tensors.items() if n >= "t2"},
    }
    two = open_checkpoint(checkpoint_folder(tmp_path / "two", shards))
    assert fingerprint(one) == fingerprint(two, workers=3) == combine(one, scan(one.tensors.values()))
    assert fingerprint(open_checkpoint(checkpoint_folder(tmp_path / "three"))) != fingerprint(one)


def test_record_round_trip_and_same_bytes(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(checkpoint_folder(tmp_path / "src", config={"b": 1, "a": 2}))
    record = source_record(checkpoint, "abc")
    assert record | {"config_hash": ""} == {
        "name": str(tmp_path / "src"),
        "revision": None,
        "path": str(tmp_path / "src"),
        "config_hash": "",
        "weights_hash": "abc",
    }
    reordered = open_checkpoint(checkpoint_folder(tmp_path / "src2", config={"a": 2, "b": 1}))
    assert source_record(reordered, None)["config_hash"] == record["config_hash"]
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        write_provenance(
            tmp_path / name,
            verb="upcycle",
            recipe={"k": "ü"},
            seed=3,
            sources=[record],
            weights_hash="d",
            extra={"e": 1},
        )
    assert (tmp_path / "x" / "moesaic.json").read_bytes() == (tmp_path / "y" / "moesaic.json").read_bytes()
    assert read_provenance(tmp_path / "x") == {
        "format": "moesaic/1",
        "verb": "upcycle",
        "recipe": {"k": "ü"},
        "seed": 3,
        "versions": versions(),
        "sources": [record],
        "weights_hash": "d",
        "e": 1,
    }


def test_reading_records(tmp_path: Path) -> None:
    assert read_provenance(tmp_path) is None
    (tmp_path / "moesaic.json").write_text(json.dumps({"format": "moesaic/9"}))
    with pytest.raises(MoesaicError, match=r"format is 'moesaic/9'.*update moesaic"):
        read_provenance(tmp_path)
    (tmp_path / "moesaic.json").write_text("{")
    with pytest.raises(MoesaicError, match="not JSON"):
        read_provenance(tmp_path)


def test_versions() -> None:
    found = versions()
    assert found["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert {"moesaic", "python", "transformers", "safetensors"} <= found.keys()


def test_interface_modules_are_free_of_torch() -> None:
    modules = ["headers", "source", "writer", "output", "record", "lazy", "streaming", "hub", "pio"]
    code = "import sys\n" + "\n".join(f"import moesaic.checkpoint.{m}" for m in modules)
    code += "\nprint(sorted({'torch', 'transformers'} & sys.modules.keys()))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_headers_alone_import_next_to_nothing() -> None:
    code = (
        "import sys\nfrom moesaic.checkpoint import headers, lazy, output, record, source, streaming, writer\n"
        "print(sorted({'torch', 'transformers', 'numpy', 'huggingface_hub', 'yaml'} & sys.modules.keys()))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"experts": None}, "experts: expected keys and values"),
        ({"experts": {"original": 5}}, "experts.original: expected a list, got 5"),
        ({"experts": {"original": [[-1]]}}, "experts.original.0.0: must be at least 0, got -1"),
        ({"routing": 5}, r"routing: expected keys and values \(rule, selection_bias\), got 5"),
        ({"routing": {}}, "routing.rule: this key is required and missing"),
        ({"routing": {"rule": {}, "selection_bias": [[0.0], [0.0, 1.0]]}}, "selection_bias: has rows of different len"),
        ({"routing": {"rule": {}, "selection_bias": [["a"]]}}, "selection_bias.0.0: expected a finite number, got 'a'"),
        ({"lineage": [{"ids": []}]}, "lineage.0.model: this key is required and missing"),
    ],
)
def test_a_record_of_other_kinds_is_refused(tmp_path: Path, values: dict[str, object], message: str) -> None:
    write_provenance(tmp_path, verb="train", recipe={}, seed=None, sources=[], weights_hash=None, extra=values)
    with pytest.raises(MoesaicError, match=message):
        read_provenance(tmp_path)
