"""A restricted model computes what the extracted checkpoint computes, for every kind of router."""

import json
from typing import Any

import pytest
import torch

from moesaic.common.errors import MoesaicError
from moesaic.loading import load
from moesaic.routing.config import RuleConfig
from moesaic.routing.install import install
from moesaic.routing.restrict import restrict
from moesaic.selection.extract import extract
from tests.unit.selection.kinds import KINDS, random_selection, save_kind

IDS = torch.randint(3, 90, (2, 24), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def logits(model):
    return model(IDS).logits


@pytest.mark.parametrize("kind", KINDS)
def test_restricted_equals_extracted(tmp_path, kind):
    full = save_kind(tmp_path / "full", kind)
    selection = random_selection(full)
    extract(full, selection, tmp_path / "cut")
    model = load(full)
    before, expected = logits(model), logits(load(tmp_path / "cut"))
    assert (before - expected).abs().max() > 1e-3  # the cut is felt
    with restrict(model, selection):
        torch.testing.assert_close(logits(model), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(logits(model), before)


def test_keeping_all_changes_nothing(tmp_path):
    full = save_kind(tmp_path / "full", "deepseek_v3")
    model = load(full)
    before = logits(model)
    with restrict(model, random_selection(full, share=1)):
        torch.testing.assert_close(logits(model), before, rtol=1e-6, atol=1e-6)


def test_switching_between_selections(tmp_path):
    full = save_kind(tmp_path / "full", "qwen3_moe")
    first, second = random_selection(full, seed=1), random_selection(full, seed=2)
    model = load(full)
    before, separate = logits(model), []
    for selection in (first, second):
        with restrict(model, selection):
            separate.append(logits(model))
    restrict(model, first)
    assert torch.equal(logits(model), separate[0])
    with restrict(model, second):
        assert torch.equal(logits(model), separate[1])
    assert torch.equal(logits(model), separate[0])
    restrict(model, None)
    assert torch.equal(logits(model), before)
    assert not torch.equal(separate[0], separate[1])


def test_each_request_gets_its_own_subset_of_one_loaded_model(tmp_path):
    """One request math, the next law: what each generates is what its extracted checkpoint would."""
    full = save_kind(tmp_path / "full", "qwen3_moe")
    subsets = {name: random_selection(full, seed=seed) for seed, name in enumerate(("math", "law"))}
    for name, selection in subsets.items():
        extract(full, selection, tmp_path / name)
    model: Any = load(full)
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    cut: dict[str, Any] = {name: load(tmp_path / name) for name in subsets}
    expected = {name: one.generate(IDS, **options) for name, one in cut.items()}
    everything = model.generate(IDS, **options)
    for name in ("math", "law", "math", "law"):
        with restrict(model, subsets[name]):
            assert torch.equal(model.generate(IDS, **options), expected[name])
    assert torch.equal(model.generate(IDS, **options), everything)
    assert not torch.equal(expected["math"], expected["law"])


def test_dropped_experts_are_never_used_and_have_no_probability(tmp_path):
    full = save_kind(tmp_path / "full", "olmoe")
    selection = random_selection(full)
    model = load(full)
    router = model.model.layers[1].mlp.gate
    with restrict(model, selection):
        router_logits, _, ids = router(torch.randn(50, 32))
    kept = torch.tensor(selection.kept[1])
    assert torch.isin(ids, kept).all()
    dropped = torch.ones(8, dtype=torch.bool).index_fill(0, kept, False)
    assert router_logits[:, dropped].isneginf().all()
    assert torch.isfinite(router_logits[:, kept]).all()


def test_layers_may_keep_different_numbers_and_top_k_may_be_lowered(tmp_path):
    full = save_kind(tmp_path / "full", "mixtral")
    selection = random_selection(full)
    uneven = type(selection)(**{**vars(selection), "kept": ((2,), (0, 3, 5))})
    model = load(full)
    with pytest.raises(MoesaicError, match="keeps 1 experts, but each token uses 2"):
        restrict(model, uneven)
    with restrict(model, uneven, top_k=1):
        _, weights, ids = model.model.layers[0].mlp.gate(torch.randn(7, 32))
        assert torch.equal(ids, torch.full((7, 1), 2))
        assert torch.equal(weights, torch.ones(7, 1))
        assert torch.isfinite(logits(model)).all()


def test_weights_that_change_are_seen_and_get_gradients(tmp_path):
    full = save_kind(tmp_path / "full", "qwen3_moe")
    selection = random_selection(full)
    model = load(full)
    with restrict(model, selection):
        model(IDS, labels=IDS).loss.backward()
    gradient = model.model.layers[0].mlp.gate.weight.grad
    used = gradient.abs().sum(dim=1) > 0
    assert used.nonzero().flatten().tolist() == list(selection.kept[0])


def test_a_selection_of_another_shape_is_refused(tmp_path):
    selection = random_selection(save_kind(tmp_path / "a", "olmoe"))
    model = load(save_kind(tmp_path / "b", "ours_topk"))
    with pytest.raises(MoesaicError, match="with 8 experts in 2 MoE layers, but MoesaicLlamaForCausalLM has 6 in 2"):
        restrict(model, selection)


@pytest.mark.parametrize("rule", [RuleConfig(), RuleConfig(rule="document_pool", pool_size=(4, 8))])
def test_a_recorded_rule_with_selection_bias_is_cut_as_well(tmp_path, rule):
    """Training's loss-free balancing keeps its bias in moesaic.json: it decides at inference too."""
    full = save_kind(tmp_path / "full", "olmoe")
    bias = torch.randn(2, 8, generator=torch.Generator().manual_seed(1)) * 0.05
    record = install(load(full), rule, selection_bias=bias).to_record()
    (full / "moesaic.json").write_text(json.dumps({"format": "moesaic/1", "verb": "train", "routing": record}))
    selection = random_selection(full)
    extract(full, selection, tmp_path / "cut")
    cut = json.loads((tmp_path / "cut/moesaic.json").read_text())["routing"]
    assert cut["selection_bias"] == [bias[layer][list(ids)].tolist() for layer, ids in enumerate(selection.kept)]
    model = load(full)
    with_rule = logits(model)
    expected = logits(load(tmp_path / "cut"))
    with restrict(model, selection):
        torch.testing.assert_close(logits(model), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(logits(model), with_rule)
