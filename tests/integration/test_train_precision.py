"""A bf16 run's result is what the run computed with: reloaded, it has the held-out loss of the run's last line."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import moesaic
from moesaic.common.recipe import load_recipe
from moesaic.data.dataset import validation_sets
from moesaic.data.tokenise import prepare
from moesaic.modeling.cross_entropy import ratio_with_error
from moesaic.training.recipe import TrainRecipe
from moesaic.training.run import train
from moesaic.training.start import load_run_tokenizer
from moesaic.training.state import list_states
from moesaic.training.step import add_losses
from tests.tiny_moes import save_tiny_moe
from tests.tiny_training import save_tokenizer, tiny_recipe

FAMILIES = ("deepseek_v3", "glm4_moe")
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("MOESAIC_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def with_fine_biases(folder: Path, family: str) -> Path:
    """A bf16 checkpoint whose fp32 selection biases differ by less than bf16 can tell apart."""
    save_tiny_moe(folder, family, dtype=torch.bfloat16)
    save_tokenizer(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors[BIAS] = 8 + 0.02 * torch.randn(8, generator=torch.Generator().manual_seed(1))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def recipe_for(tmp_path: Path, family: str, **changes: Any) -> TrainRecipe:
    base = with_fine_biases(tmp_path / "base", family)
    steps = {"budget": {"steps": 2}, "checkpoint": {"every_steps": 1}}
    values = tiny_recipe(tmp_path / "in", losses={}, precision="bf16", **(steps | changes))
    return load_recipe(TrainRecipe, values | {"model": str(base), "tokenizer": None})


def biases(folder: Path) -> torch.Tensor:
    (file,) = folder.glob("*.safetensors")
    return load_file(file)[BIAS]


def reloaded_loss(recipe: TrainRecipe, out: Path) -> dict[str, Any]:
    model = moesaic.load(out)
    (held_out,) = validation_sets(prepare(recipe.data, load_run_tokenizer(recipe), quiet=True))
    sums_2N = torch.zeros(2, held_out.num_documents, dtype=torch.float64)
    with torch.no_grad():
        for batch in held_out.batches(recipe.batch.micro_sequences):
            add_losses(model, batch, sums_2N)
    return vars(ratio_with_error(*sums_2N))


def last_loss(out: Path) -> dict[str, Any]:
    return json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])["validation"]["math"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_selection_bias_is_not_rounded(tmp_path, family):
    recipe = recipe_for(tmp_path, family)
    out = tmp_path / "out"
    train(recipe, out, quiet=True)
    bias_E = biases(tmp_path / "base")
    assert not torch.equal(bias_E, bias_E.bfloat16().float())
    for folder in (out, *(state / "model" for state in list_states(out / "state"))):
        assert torch.equal(biases(folder), bias_E), folder
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    tensors = load_file(out / "model.safetensors")
    assert {name for name, tensor in tensors.items() if tensor.dtype != torch.bfloat16} == {BIAS}
    assert reloaded_loss(recipe, out) == last_loss(out)
    before = (out / "model.safetensors").read_bytes()
    (out / "config.json").unlink()
    train(recipe, out, resume=True, quiet=True)
    assert (out / "model.safetensors").read_bytes() == before


def test_a_selection_bias_is_not_rounded_when_experts_grow(tmp_path):
    # DeepSeek's attention has no dense family to be exact in, so the number of active experts grows with that of all.
    recipe = recipe_for(tmp_path, "deepseek_v3", expand={"step": 1, "experts": 16, "top_k": 4, "utility": "uniform"})
    out = tmp_path / "out"
    train(recipe, out, quiet=True)
    grown_E = biases(list_states(out / "state")[-1] / "model")
    assert len(grown_E) == 16
    assert set(biases(tmp_path / "base").tolist()) <= set(grown_E.tolist())
    assert torch.equal(biases(out), grown_E)
    assert reloaded_loss(recipe, out) == last_loss(out)
