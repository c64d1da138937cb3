"""Utilities from gradients against one expert, one document and one batch at a time."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from moesaic.expansion.recipe import ExpandRecipe, UtilityLayers
from moesaic.expansion.resolve import resolve
from moesaic.expansion.utility import calibration_batches, find_utilities, measure
from moesaic.families.moe import detect_moe
from moesaic.loading import load
from tests.tiny_moes import EXPERTS, save_tiny_moe
from tests.tiny_training import save_tokenizer, write_documents

BATCHES = 2


@pytest.fixture(params=["qwen3_moe", "deepseek_v3", "gpt_oss", "granitemoe"])
def plan(request, tmp_path, monkeypatch):
    monkeypatch.setenv("MOESAIC_CACHE", str(tmp_path / "cache"))
    source = save_tokenizer(save_tiny_moe(tmp_path / "source", request.param))
    text = write_documents(tmp_path / "text.jsonl", "math", number=12, seed=0)
    recipe = ExpandRecipe(
        checkpoint=str(source),
        experts=12,
        calibration=(str(text),),
        utility_batches=BATCHES,
        batch_size=2,
        sequence_length=64,
    )
    return resolve(recipe)


MATRICES = {"fc1": ["gate_up_proj"], "fc2": ["down_proj"], "both": ["gate_up_proj", "down_proj"]}


def naive_norms(model: Any, batches, layer, number, layers):
    """||mean over batches of the gradient||, from documents that run alone, in float64."""
    (experts,) = [m for name, m in model.named_modules() if name.endswith(f"layers.{layer}.{_block(model)}.experts")]
    matrices = [getattr(experts, name) for name in MATRICES[layers]]
    totals = [torch.zeros_like(p[number]) for p in matrices]
    for batch in batches:
        loss = torch.zeros((), dtype=torch.float64)
        for document in range(batch.num_documents):
            for row in range(len(batch.input_ids_BS)):  # the end of a row cuts a document into two
                chosen = batch.document_ids_BS[row] == batch.first_document + document
                ids = batch.input_ids_BS[row][chosen]
                if len(ids) > 1:
                    logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
                    loss = loss + torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum")
        gradients = torch.autograd.grad(loss / batch.num_targets, matrices)
        totals = [t + g[number] / len(batches) for t, g in zip(totals, gradients, strict=True)]
    weights = [p[number] for p in matrices]
    return [float(torch.cat([t.detach().flatten() for t in both]).norm()) for both in (totals, weights)]


def _block(model):
    return "block_sparse_moe" if any(".block_sparse_moe." in name for name, _ in model.named_modules()) else "mlp"


LAYERS: dict[str, UtilityLayers] = {"qwen3_moe": "fc1", "deepseek_v3": "fc2", "gpt_oss": "both", "granitemoe": "fc1"}


def test_gradient_and_weight_norms(plan):
    layers = LAYERS[plan.model.family.model_type]
    batches = calibration_batches(plan, quiet=True)
    assert len(batches) == BATCHES
    found = measure(load(plan.checkpoint.path), batches, name="model", layers=layers)
    model: Any = load(plan.checkpoint.path, dtype=torch.float64)
    model.set_experts_implementation("eager")
    assert set(found.gradient_norms) == {layer.layer for layer in detect_moe(plan.checkpoint).layers}
    for layer in found.gradient_norms:
        for number in (0, EXPERTS - 1):
            gradient, weight = naive_norms(model, batches, layer, number, layers)
            assert found.gradient_norms[layer][number] == pytest.approx(gradient, rel=1e-3, abs=1e-9)
            assert found.weight_norms[layer][number] == pytest.approx(weight, rel=1e-5)
        tokens = sum(batch.num_tokens for batch in batches)
        assert sum(found.tokens[layer]) == 2 * tokens


def test_every_utility(plan):
    def table(**settings):
        made = find_utilities(replace(plan, recipe=replace(plan.recipe, **settings)), quiet=True)
        assert made is not None
        return made.per_layer

    gradients = table(utility="gradient_norm")
    weights = table(utility="weight_norm", calibration=())
    squared, saliency = table(utility="gradient_squared"), table(utility="saliency")
    for layer, norms in gradients.items():
        assert squared[layer] == pytest.approx([norm**2 for norm in norms])
        assert saliency[layer] == pytest.approx([n * w for n, w in zip(norms, weights[layer], strict=True)], rel=1e-5)


@pytest.mark.parametrize("layers", ["fc1", "fc2", "both"])
def test_weight_norms_from_the_disk_are_those_of_the_loaded_model(plan, layers):
    recipe = replace(plan.recipe, utility="weight_norm", utility_layers=layers, calibration=())
    table = find_utilities(replace(plan, recipe=recipe))
    assert table is not None
    model: Any = load(plan.checkpoint.path)
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            layer = int(name.split("layers.")[1].split(".")[0])
            expected = [
                sum(getattr(module, matrix)[e].square().sum().item() for matrix in MATRICES[layers]) ** 0.5
                for e in range(EXPERTS)
            ]
            assert table.per_layer[layer] == pytest.approx(expected, rel=1e-5)
