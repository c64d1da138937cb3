"""Layers for multi-token prediction: what each verb makes of them, that it says so, and that the config agrees."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import moesaic
from moesaic.checkpoint.source import open_checkpoint
from moesaic.families.moe import PREDICTION_KEYS, detect_moe
from tests import every_moe
from tests.tiny_moes import save_tiny_moe
from tests.tiny_training import VOCABULARY, save_tokenizer, tiny_recipe, write_documents

SAID = "layer 2 is for multi-token prediction, which transformers does not run: "


KEYS = {"deepseek_v3": PREDICTION_KEYS[0], "glm4_moe": PREDICTION_KEYS[0], "qwen3_next": PREDICTION_KEYS[2]}


@pytest.fixture(params=KEYS)
def family(request) -> str:
    return request.param


@pytest.fixture
def full(family: str, tmp_path: Path) -> Path:
    """Two layers that run, and one behind them; Qwen3-Next's has a name of its own."""
    if family == "qwen3_next":
        folder, name = every_moe.save(tmp_path / "full", family), "mtp.layers.0."
    else:
        folder = save_tokenizer(save_tiny_moe(tmp_path / "full", family, vocab_size=VOCABULARY, n_group=2))
        name = "model.layers.2."
    tensors = load_file(folder / "model.safetensors")
    more = {n.replace("model.layers.1.", name): t.clone() for n, t in tensors.items() if "layers.1." in n}
    save_file(tensors | more, folder / "model.safetensors", metadata={"format": "pt"})
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {KEYS[family]: 1}))
    write_documents(tmp_path / "math.jsonl", "math", number=20, seed=0)
    return folder


def layers(folder: Path) -> list[int]:
    return [layer.layer for layer in detect_moe(open_checkpoint(folder)).layers]


def predicted(folder: Path) -> int:
    config = json.loads((folder / "config.json").read_text())
    return next(config[key] for key in PREDICTION_KEYS if key in config)


def test_what_becomes_of_them_is_said_and_true(
    full: Path, family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    def said() -> str:
        return capsys.readouterr().err

    moesaic.expand(full, tmp_path / "larger", experts=32, utility="uniform", quiet=False)
    assert f"{SAID}its experts grow as well" in said()
    assert (layers(tmp_path / "larger"), predicted(tmp_path / "larger")) == ([1, 2], 1)

    if family != "qwen3_next":  # it has one layout only
        result = moesaic.export(full, tmp_path / "fused", layout="fused")
        assert any(f"{SAID}it is written in this layout as well" in line for line in result.notices)
        assert (layers(tmp_path / "fused"), predicted(tmp_path / "fused")) == ([1, 2], 1)

    said()
    selection = moesaic.select(full, keep="4", data=tmp_path / "math.jsonl", examples=3, quiet=False)
    assert f"{SAID}its experts are not scored, and `extract` leaves it out" in said()

    moesaic.extract(full, selection, tmp_path / "cut", quiet=False)
    assert f"{SAID}left out, as nothing says which of its experts to keep" in said()
    assert (layers(tmp_path / "cut"), predicted(tmp_path / "cut")) == ([1], 0)

    moesaic.merge_back(full, tmp_path / "cut", tmp_path / "back", quiet=False)
    assert f"{SAID}kept as the full model has it" in said()
    assert (layers(tmp_path / "back"), predicted(tmp_path / "back")) == ([1, 2], 1)

    moesaic.load(full)
    loading = said()
    assert f"warning: {full}: {SAID}it is not loaded" in loading
    assert "does not use" not in loading


def test_training_leaves_them_out(full: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MOESAIC_CACHE", str(tmp_path / "cache"))
    recipe = tiny_recipe(tmp_path / "in", model=str(full), tokenizer=None, losses={}, budget={"steps": 2})
    moesaic.train(recipe, tmp_path / "run")
    assert (layers(tmp_path / "run"), predicted(tmp_path / "run")) == ([1], 0)


def test_growing_into_groups_takes_them_along(full: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    options = {"experts": 32, "utility": "uniform", "delta": 0, "routing": "one_per_copy_group"}
    grown = moesaic.expand(full, tmp_path / "grown", quiet=False, **options)
    assert f"{SAID}its experts grow as well" in capsys.readouterr().err
    assert (grown.statement.code, predicted(tmp_path / "grown"), layers(tmp_path / "grown")) == ("E2", 1, layers(full))
    report = moesaic.verify(full, tmp_path / "grown", quiet=True)
    assert (report.code, report.ok) == ("E2", True)
    everything = moesaic.select(tmp_path / "grown", keep="100%", method="random")
    moesaic.extract(tmp_path / "grown", everything, tmp_path / "part")
    moesaic.export(tmp_path / "grown", tmp_path / "back")
    for folder in ("part", "back"):
        there = layers(tmp_path / folder)
        assert len(there) == len(layers(full)) - (1 - predicted(tmp_path / folder))
