"""Every family in both layouts: grown, loaded by transformers, run; old tensors as they were; promises hold."""

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from moesaic.checkpoint.source import open_checkpoint
from moesaic.checkpoint.streaming import scan
from moesaic.expansion.recipe import ExpandRecipe
from moesaic.expansion.run import expand
from moesaic.families.moe import ROUTER_ROLES, detect_moe
from tests.tiny_moes import EXPERTS, MOE_FAMILIES, TOP_K, VOCABULARY, save_tiny_moe

WITH_NORM_TOPK_PROB = ("olmoe", "flex_olmo", "qwen2_moe", "qwen3_moe", "deepseek_v3", "glm4_moe")
EXACT = 1e-6
"""In float64 weights; but transformers' own routers round their scores to float32."""
TOKENS = torch.randint(3, VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(5))

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning")


def grow(source, out, **settings):
    return expand(ExpandRecipe(checkpoint=str(source), **settings), out, quiet=True)


def run(folder, dtype=torch.float64):
    # Not grouped_mm, which cannot multiply float64.
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, output_loading_info=True, experts_implementation="eager"
    )
    model, loading = loaded
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        return model.eval(), model(TOKENS).logits


def distance(logits, reference):
    return ((logits - reference).norm() / reference.norm()).item()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_grown_models_load_run_and_keep_what_they_had(tmp_path, family, fused):
    source = save_tiny_moe(tmp_path / "source", family, fused=fused, dtype=torch.bfloat16)
    result = grow(source, tmp_path / "out", experts=12, seed=3)
    before, after = open_checkpoint(source), open_checkpoint(tmp_path / "out")
    grown = detect_moe(after)
    assert (grown.num_experts, grown.top_k, grown.family.model_type) == (12, TOP_K, family)
    assert [len(layer.expert_tensors) for layer in grown.layers] == [
        len(layer.expert_tensors) for layer in detect_moe(before).layers
    ]
    _check_tensors(before, after, result)
    model, logits = run(tmp_path / "out", torch.float32)
    assert logits.isfinite().all()
    assert model.config.to_dict()["num_experts_per_tok"] == TOP_K
    assert model.generate(TOKENS[:1], max_new_tokens=3, do_sample=False).shape == (1, 27)
    model.save_pretrained(tmp_path / "saved")
    assert detect_moe(open_checkpoint(tmp_path / "saved")).num_experts == 12


def _check_tensors(before, after, result):
    """Everything outside the experts has its old hash; every expert has the bytes of its source."""
    hashes = [scan(checkpoint.tensors.values()) for checkpoint in (before, after)]
    old, new = (load_file(checkpoint.path / "model.safetensors") for checkpoint in (before, after))
    of_experts = set()
    for layer, grown in zip(detect_moe(before).layers, detect_moe(after).layers, strict=True):
        sources = result.plan.sources(result.copies[layer.layer])
        for tensor, larger in zip(layer.expert_tensors, grown.expert_tensors, strict=True):
            assert (tensor.role, tensor.name, tensor.axis) == (larger.role, larger.name, larger.axis)
            of_experts |= {*tensor.names(EXPERTS), *larger.names(12)}
            if tensor.axis is None:
                pairs = [(old[tensor.name.format(expert=s)], n) for n, s in enumerate(sources)]
                assert all(torch.equal(new[tensor.name.format(expert=n)], values) for values, n in pairs)
            elif tensor.role in ROUTER_ROLES:
                firsts = [sources.index(expert) for expert in range(EXPERTS)]
                assert torch.equal(new[tensor.name][firsts], old[tensor.name])
                difference = (new[tensor.name].float() - old[tensor.name][sources].float()).abs()
                assert difference.max() < 0.02
                noisy = "selection_bias" if any(t.role == "selection_bias" for t in layer.expert_tensors) else "router"
                assert bool(difference.any()) == (tensor.role == noisy)
            else:
                assert torch.equal(new[tensor.name], old[tensor.name][sources])
    kept = set(before.tensors) - of_experts
    assert kept == set(after.tensors) - of_experts
    assert all(hashes[0][name] == hashes[1][name] for name in kept)


@pytest.mark.parametrize(
    ("family", "normalise"),
    [(f, n) for f in MOE_FAMILIES for n in (True, False) if n or f in WITH_NORM_TOPK_PROB],
)
def test_m_fold_copies_with_m_times_as_many_active_experts_are_exact(tmp_path, family, normalise):
    options = {"norm_topk_prob": normalise} if family in WITH_NORM_TOPK_PROB else {}
    if family in ("deepseek_v3", "glm4_moe"):
        options["routed_scaling_factor"] = 2.5
    source = save_tiny_moe(tmp_path / "source", family, **options)
    for times in (2, 3):
        out = tmp_path / f"out{times}"
        result = grow(source, out, experts=times * EXPERTS, top_k=times * TOP_K, delta=0)
        assert result.statement.code == "E1"
        assert distance(run(out)[1], run(source)[1]) < EXACT


@pytest.mark.parametrize("family", ["deepseek_v2"])
def test_m_fold_copies_with_groups_by_their_largest_score(tmp_path, family):
    groups = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
    source = save_tiny_moe(tmp_path / "source", family, **groups)
    grow(source, tmp_path / "out", experts=16, top_k=4, delta=0)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["n_group"], config["topk_group"]) == (8, 4)
    assert distance(run(tmp_path / "out")[1], run(source)[1]) < EXACT


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_one_expert_per_token_of_constant_weight_is_exact(tmp_path, family):
    source = save_tiny_moe(tmp_path / "source", family, num_experts_per_tok=1)
    result = grow(source, tmp_path / "out", experts=13, delta=0, utility="weight_norm")
    assert result.statement.code == "E3"
    assert distance(run(tmp_path / "out")[1], run(source)[1]) < EXACT


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_plain_copies_at_the_same_top_k_are_not_exact_and_it_is_said(tmp_path, family):
    source = save_tiny_moe(tmp_path / "source", family)
    result = grow(source, tmp_path / "out", experts=16)
    assert result.statement.code == "none"
    assert "uses several copies of the same expert" in result.statement.text
    assert distance(run(tmp_path / "out")[1], run(source)[1]) > 0.01


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_one_per_copy_group_is_exact_at_the_same_top_k_for_uneven_copies(tmp_path, family, fused):
    for normalise in (True, False) if family in WITH_NORM_TOPK_PROB else (True,):
        options = {"norm_topk_prob": normalise} if family in WITH_NORM_TOPK_PROB else {}
        source = save_tiny_moe(tmp_path / f"source{normalise}", family, fused=fused, **options)
        reference = run(source)[1]
        settings = {"experts": 12, "utility": "weight_norm", "routing": "one_per_copy_group"}
        distances = {}
        for delta in (0.0, 1e-3):
            out = tmp_path / f"out{normalise}{delta}"
            result = grow(source, out, delta=delta, **settings)
            assert result.statement.code == "E2"
            assert result.copies is not None
            assert any(len(set(numbers)) > 1 for numbers in result.copies.values())
            model, logits = run(out)
            assert model.config.model_type.startswith("moesaic_")
            distances[delta] = distance(logits, reference)
        assert distances[0.0] < 1e-10
        assert distances[1e-3] < 1e-4
        assert model.generate(TOKENS[:1], max_new_tokens=3, do_sample=False).shape == (1, 27)


def test_dense_layers_stay_dense(tmp_path):
    source = save_tiny_moe(tmp_path / "source", "qwen3_moe", num_hidden_layers=4, decoder_sparse_step=2)
    result = grow(source, tmp_path / "out", experts=9, routing="one_per_copy_group", delta=0)
    assert [layer.layer for layer in result.plan.model.layers] == [1, 3]
    assert distance(run(tmp_path / "out")[1], run(source)[1]) < 1e-10
