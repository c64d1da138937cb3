"""The code of docs/finetuning.md runs as it is, and does what the page says."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import disable_progress_bars
from safetensors.torch import load_file

import moesaic
from moesaic.training.recipe import load_train_recipe
from moesaic.training.start import draw, make_config
from tests.tiny_moes import MOE_FAMILIES, tiny_moe
from tests.tiny_training import DENSE, MOE, save_tokenizer, write_documents

PAGE = Path(__file__).parents[2] / "docs" / "finetuning.md"
BLOCKS = dict(re.findall(r"^## (\w+)\n.*?```python\n(.*?)```", PAGE.read_text(), re.DOTALL | re.MULTILINE))
FUSED = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    model = {"family": "llama", "config": DENSE, "moe": MOE}
    recipe = {
        "model": model,
        "tokenizer": "none",
        "optimizer": {"lr": 1.0},
        "batch": {"tokens": 8},
        "budget": {"steps": 1},
    }
    recipe |= {"data": {"sequence_length": 8, "sources": [{"path": "none", "domain": "none"}]}}
    draw(make_config(load_train_recipe(recipe).model), 0).save_pretrained(tmp_path / "moe")  # pyright: ignore
    save_tokenizer(tmp_path / "moe")
    write_documents(tmp_path / "text.jsonl", "math", number=24, seed=0)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    disable_progress_bars()
    return tmp_path


@pytest.mark.parametrize("title", ["Trainer", "TRL", "PEFT"])
@pytest.mark.filterwarnings("ignore")  # of the libraries
def test_code(place, title):
    names: dict[str, Any] = {}
    exec(compile(BLOCKS[title], f"{PAGE.name}: {title}", "exec"), names)
    trainer = names["trainer"]
    assert [line["balance_loss"] for line in trainer.state.log_history if "balance_loss" in line]
    folder = place / "tuned" if title != "TRL" else place / "tuned" / "checkpoint-4"
    record = json.loads((folder / "moesaic.json").read_text())
    assert record["verb"] == "train"
    before, after = load_file(place / "moe" / "model.safetensors"), load_file(folder / "model.safetensors")
    assert before.keys() == after.keys()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    experts = {name for name in before if name.endswith(FUSED)}
    assert experts <= moved
    assert len(moved) == len(before) if title != "PEFT" else not any("gate.weight" in name for name in moved)
    moesaic.load(folder)


def test_names_of_fused_experts():
    """What the page says of families: the end of the names, and the exceptions."""
    for family in MOE_FAMILIES:
        names = [name for name, _ in tiny_moe(family).named_parameters()]
        layers = "block_sparse_moe" if family.startswith("granite") else "mlp"
        router = "router" if family.startswith(("granite", "gpt_oss")) else "gate"
        for wanted in ("experts.gate_up_proj", "experts.down_proj", f"{router}.weight"):
            assert any(name.endswith(f"{layers}.{wanted}") for name in names), (family, wanted)
