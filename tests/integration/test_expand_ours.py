"""Our own architecture grown: DivMoE's groups, copy groups, chains of expansions, every copy in use."""

import json
from typing import Any

import pytest
import torch

from moesaic import expand, load, upcycle
from moesaic.common.errors import MoesaicError
from moesaic.modeling.modeling_moesaic import ROUTING_WEIGHTINGS
from tests.tiny_models import VOCABULARY, save_tiny

TOKENS = torch.randint(3, VOCABULARY, (4, 32), generator=torch.Generator().manual_seed(5))
EXACT = 1e-12


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dense")
    for seed, name in enumerate(("base", "math", "code")):
        save_tiny(folder / name, "qwen3", seed=seed)
    return folder


@pytest.fixture
def divmoe(dense, tmp_path):
    specialists = {name: dense / name for name in ("math", "code", "base")}
    upcycle(dense / "base", tmp_path / "divmoe", method="divmoe", shards=2, specialists=specialists)
    return tmp_path / "divmoe"


@pytest.fixture(params=ROUTING_WEIGHTINGS)
def plain(request, dense, tmp_path):
    settings = {"experts": 6, "top_k": 2, "router_std": 0.3, "shared_experts": 1}
    upcycle(dense / "base", tmp_path / "plain", method="drop", layers="1", **settings)
    file = tmp_path / "plain" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"routing_weighting": request.param}))
    return tmp_path / "plain"


def logits_of(folder):
    model: Any = load(folder, dtype=torch.float64)
    with torch.no_grad():
        return model(TOKENS).logits


def distance(folder, reference):
    return ((logits_of(folder) - logits_of(reference)).norm() / logits_of(reference).norm()).item()


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def test_copies_join_the_group_of_their_source(divmoe, tmp_path):
    result = expand(divmoe, tmp_path / "out", experts=10, utility="weight_norm", delta=0)
    assert result.statement.code == "E2"
    assert distance(tmp_path / "out", divmoe) < EXACT
    assert result.copies is not None
    groups = config_of(divmoe)["expert_groups"]
    expected = [[groups[source] for source in result.plan.sources(list(c))] for c in result.copies.values()]
    found = config_of(tmp_path / "out")["expert_groups"]
    assert found == (expected[0] if expected[0] == expected[1] else expected)


def test_the_noise_is_small_where_logits_are_not_tied(dense, tmp_path):
    specialists = {name: dense / name for name in ("math", "code", "base")}
    settings = {"router_init": "random", "router_std": 0.5}
    upcycle(dense / "base", tmp_path / "random", method="divmoe", shards=2, specialists=specialists, **settings)
    result = expand(tmp_path / "random", tmp_path / "out", experts=10)
    assert "not exact by the noise of --delta 0.001" in result.statement.text
    before, after = logits_of(tmp_path / "random"), logits_of(tmp_path / "out")
    per_token = (after - before).norm(dim=-1) / before.norm(dim=-1)  # a few tokens go to other experts altogether
    assert 0 < per_token.median() < 0.01


def test_groups_and_copy_groups_cannot_both_be(divmoe, tmp_path):
    with pytest.raises(MoesaicError, match="routes to one expert per group already"):
        expand(divmoe, tmp_path / "out", experts=10, routing="one_per_copy_group")


def test_one_per_copy_group(plain, tmp_path):
    settings = {"experts": 11, "utility": "weight_norm", "routing": "one_per_copy_group"}
    result = expand(plain, tmp_path / "exact", delta=0, **settings)
    assert result.statement.code == "E2"
    assert distance(tmp_path / "exact", plain) < EXACT
    expand(plain, tmp_path / "noisy", **settings)
    assert distance(tmp_path / "noisy", plain) < 1e-4
    config = config_of(tmp_path / "noisy")
    assert (config["num_experts"], config["num_experts_per_tok"], config["group_score"]) == (11, 2, "log_mean_exp")
    with pytest.raises(MoesaicError, match="--top-k 7: one_per_copy_group uses at most one copy of each of 6"):
        expand(plain, tmp_path / "more", top_k=7, **settings)


def test_every_copy_is_used_with_the_noise_on(plain, tmp_path):
    expand(plain, tmp_path / "out", experts=18, routing="one_per_copy_group")
    model: Any = load(tmp_path / "out")
    used = []
    model.model.layers[1].mlp.gate.register_forward_hook(lambda _module, _inputs, output: used.append(output[2]))
    with torch.no_grad():
        model(torch.randint(3, VOCABULARY, (32, 64)))
    counts = used[0].flatten().bincount(minlength=18)
    of_source = torch.zeros(6, dtype=torch.int64).index_add(0, _sources(tmp_path / "out"), counts)
    assert (of_source > 0).all()
    assert (counts > 0).all()


def _sources(folder):
    return torch.tensor(json.loads((folder / "moesaic.json").read_text())["experts"]["sources"][0])


def test_ids_are_chained_through_repeated_expansions(plain, tmp_path):
    expand(plain, tmp_path / "first", experts=8)
    expand(tmp_path / "first", tmp_path / "second", experts=11)
    record = json.loads((tmp_path / "second" / "moesaic.json").read_text())["experts"]
    assert record["sources"] == [[0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2]]
    assert record["original"] == [[0, 1, 2, 3, 4, 5, 0, 1, 0, 1, 2]]
    assert record["layers"] == [1]


def test_uniform_copies_with_more_active_experts(plain, tmp_path):
    result = expand(plain, tmp_path / "out", experts=12, top_k=4, delta=0)
    assert result.statement.code == "E1"
    assert distance(tmp_path / "out", plain) < EXACT


def record_routing(folder, rule=None, bias=None):
    file = folder / "moesaic.json"
    known = {"rule": None, "pool_size": None, "pool_draw": "document_and_layer", "expert_groups": None}
    routing = {"rule": known | {"group_score": None} | (rule or {}), "selection_bias": bias}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"routing": routing}))


def test_uniform_copies_are_exact_with_a_selection_bias(plain, tmp_path):
    """It is added to probabilities, of which every copy has its share: so has the bias."""
    record_routing(plain, bias=[[0.1, 0.0, -0.1, 0.05, 0.0, -0.05]])
    biased = distance(plain, plain)
    result = expand(plain, tmp_path / "out", experts=12, top_k=4, delta=0)
    assert (result.statement.code, biased) == ("E1", 0)
    assert distance(tmp_path / "out", plain) < EXACT
    expand(plain, tmp_path / "uneven", experts=11, routing="one_per_copy_group", utility="weight_norm", delta=0)
    assert distance(tmp_path / "uneven", plain) < 1e-6  # the bias is in fp32


def test_nothing_is_promised_of_own_groups_with_a_selection_bias(divmoe, tmp_path):
    record_routing(divmoe, bias=[[0.1, -0.1, 0.0, 0.0, 0.1, -0.1]] * 2)
    result = expand(divmoe, tmp_path / "out", experts=10, delta=0)
    assert result.statement.code == "none"
    assert "selection bias" in result.statement.text


@pytest.mark.parametrize(
    ("experts", "top_k", "size", "expected"),
    [(12, 4, [2, 6], [4, 12]), (12, 4, 3, 6), (8, 3, [2, 6], [3, 6]), (8, None, [2, 6], [2, 6])],
)
def test_recorded_pools_grow_so_that_the_model_loads(plain, tmp_path, experts, top_k, size, expected):
    record_routing(plain, rule={"rule": "document_pool", "pool_size": size})
    expand(plain, tmp_path / "out", experts=experts, top_k=top_k, utility="uniform")
    assert json.loads((tmp_path / "out" / "moesaic.json").read_text())["routing"]["rule"]["pool_size"] == expected
    load(tmp_path / "out")


def test_settings_of_a_pass_over_text_that_does_not_happen_are_said(plain, tmp_path):
    plan = expand(plain, tmp_path / "out", experts=8, utility_batches=3, dry_run=True).plan
    assert any("--utility-batches: without effect" in notice for notice in plan.notices)


def test_remote_code_comes_with_it(plain, tmp_path):
    expand(plain, tmp_path / "out", experts=8)
    assert (tmp_path / "out" / "modeling_moesaic.py").exists()
