"""Plans without a run: layers that have no gradients, copies per layer in words, the card's command, configs."""

import json
import shlex

import pytest
import torch
from safetensors.torch import load_file, save_file

from moesaic.checkpoint.source import open_checkpoint
from moesaic.cli import app as cli
from moesaic.expansion.recipe import ExpandRecipe
from moesaic.expansion.resolve import resolve
from moesaic.expansion.run import copies_lines, expand
from moesaic.families.moe import detect_moe
from moesaic.families.moe_table import MOE_FAMILIES
from tests.tiny_moes import save_tiny_moe, tiny_moe


def plan_of(source, **settings):
    return resolve(ExpandRecipe(checkpoint=str(source), **settings))


def test_every_family_converts_or_has_a_reason():
    for family, row in MOE_FAMILIES.items():
        assert row.twin is not None or row.no_twin, family


def test_layers_for_multi_token_prediction_grow_evenly(tmp_path):
    source = save_tiny_moe(tmp_path / "m", "deepseek_v3")
    tensors = load_file(source / "model.safetensors")
    more = {n.replace("layers.1.", "layers.2."): t.clone() for n, t in tensors.items() if "layers.1." in n}
    save_file(tensors | more, source / "model.safetensors", metadata={"format": "pt"})
    plan = plan_of(source, experts=16, utility="weight_norm")
    assert any("layer 2 is for multi-token prediction" in line for line in plan.notices)
    copies = plan.copies({1: (1.0, 9.0, 1.0, 9.0, 9.0, 1.0, 9.0, 1.0)})
    assert copies == {1: [0, 2, 0, 2, 2, 0, 2, 0], 2: [1] * 8}
    expand(source, tmp_path / "out", experts=16)
    assert [layer.layer for layer in detect_moe(open_checkpoint(tmp_path / "out")).layers] == [1, 2]


def test_unnormalised_sigmoid_weights_get_a_smaller_factor(tmp_path):
    source = save_tiny_moe(tmp_path / "m", "glm4_moe", norm_topk_prob=False, routed_scaling_factor=3.0)
    expand(source, tmp_path / "out", experts=24, top_k=6)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["routed_scaling_factor"], config["n_group"], config["topk_group"]) == (1.0, 12, 6)


def test_every_key_that_holds_the_number_of_experts_is_updated(tmp_path):
    source = save_tiny_moe(tmp_path / "m", "gpt_oss")
    config = json.loads((source / "config.json").read_text()) | {"num_experts": 8, "experts_per_token": 2}
    (source / "config.json").write_text(json.dumps(config))
    expand(source, tmp_path / "out", experts=12, top_k=3)
    grown = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {key for key in config if config[key] != grown[key]} == {
        "num_experts", "num_local_experts", "num_experts_per_tok", "experts_per_token",
    }  # fmt: skip
    assert (grown["num_local_experts"], grown["experts_per_token"]) == (12, 3)


def test_sharded_in_and_out(tmp_path):
    tiny_moe("olmoe").save_pretrained(tmp_path / "sharded", max_shard_size="40KB")
    assert not (tmp_path / "sharded" / "model.safetensors").exists()
    save_tiny_moe(tmp_path / "single", "olmoe")
    expand(tmp_path / "sharded", tmp_path / "a", experts=11, shard_size="40KB")
    expand(tmp_path / "single", tmp_path / "b", experts=11)
    files = sorted((tmp_path / "a").glob("*.safetensors"))
    assert len(files) > 3
    parts = {name: tensor for file in files for name, tensor in load_file(file).items()}
    whole = load_file(tmp_path / "b" / "model.safetensors")
    assert parts.keys() == whole.keys()
    assert all(torch.equal(parts[name], tensor) for name, tensor in whole.items())


def test_the_cards_command_makes_the_same_again(tmp_path, capsys):
    source = save_tiny_moe(tmp_path / "m", "mixtral")
    expand(source, tmp_path / "out", experts=11, utility="weight_norm", seed=4, router_op="interpolate")
    card = (tmp_path / "out" / "README.md").read_text()
    (line,) = [line for line in card.splitlines() if line.startswith("moesaic expand")]
    again = str(tmp_path / "again")
    assert cli.run([again if word == "OUT" else word for word in shlex.split(line)[1:]]) == 0
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (
        tmp_path / "out" / "model.safetensors"
    ).read_bytes()


def test_copies_in_words():
    copies = {1: [1, 0], 2: [1, 0], 3: [0, 1], 5: [1, 0]}
    assert copies_lines(copies) == ["copies added in layer 1-2,5: 1 0", "copies added in layer 3: 0 1"]


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"experts": 16, "top_k": 4}, "E1"),
        ({"experts": 16, "top_k": 4, "utility": "weight_norm"}, "none"),
        ({"experts": 15, "top_k": 4}, "none"),
        ({"experts": 9, "routing": "one_per_copy_group"}, "E2"),
        ({"experts": 9, "routing": "one_per_copy_group", "router_op": "scaled_copy"}, "none"),
        ({"experts": 16}, "none"),
    ],
)
def test_statements(tmp_path, settings, code):
    source = save_tiny_moe(tmp_path / "m", "mixtral")
    result = expand(source, tmp_path / "out", dry_run=True, **settings)
    assert (result.statement.code, result.statement.preserves) == (code, code != "none")


def test_one_expert_per_token_is_exact(tmp_path):
    source = save_tiny_moe(tmp_path / "m", "mixtral", num_experts_per_tok=1)
    assert expand(source, tmp_path / "out", experts=11, delta=0, dry_run=True).statement.code == "E3"
    source = save_tiny_moe(tmp_path / "n", "olmoe", num_experts_per_tok=1)  # the weight is a share of all experts
    assert expand(source, tmp_path / "out", experts=11, delta=0, dry_run=True).statement.code == "none"
