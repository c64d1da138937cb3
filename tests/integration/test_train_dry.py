"""A dry run and a plan refuse what the run would refuse about recipe and model, in the same words."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import moesaic
from moesaic.cli.app import run as cli
from moesaic.common.errors import MoesaicError
from moesaic.common.recipe import load_recipe
from moesaic.training import start
from moesaic.training.recipe import TrainRecipe
from moesaic.training.run import train
from tests.tiny_models import save_tiny
from tests.tiny_moes import save_tiny_moe
from tests.tiny_training import save_tokenizer, tiny_recipe


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_tokenizer(save_tiny(folder / "dense", "llama"))
    save_tokenizer(save_tiny_moe(folder / "olmoe", "olmoe", num_experts=6))
    save_tokenizer(save_tiny_moe(folder / "deepseek", "deepseek_v3"))
    moesaic.upcycle(folder / "dense", folder / "grouped", method="virtual_group", experts=4, shards=2)
    return folder


POOL = {"rule": "document_pool"}
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "ranks": (
        "olmoe", {"parallel": {"fsdp": 4, "expert": 4}, "batch": {"tokens": 256}},
        "parallel.expert (4) must divide the model's 6 experts; use 1, 2, 3, 6",
    ),
    "ranks-dense": ("dense", {"parallel": {"fsdp": 2, "expert": 2}}, "parallel.expert (2): llama has no experts"),
    "pool": ("olmoe", {"routing": POOL | {"pool_size": [8, 12]}}, "[8, 12] does not fit 2 active of 6 routed experts"),
    "pool-small": ("olmoe", {"routing": POOL | {"pool_size": 1}}, "within [2, 6]"),
    "pool-dense": ("dense", {"routing": POOL}, "routing.rule: llama has no router that training rules work on"),
    "balance": ("dense", {"losses": {"balance": {"coefficient": 0.1}}}, "losses.balance: llama has no router"),
    "z": ("dense", {"losses": {"router_z": 0.1}}, "losses.router_z: llama has no router"),
    "bias": ("dense", {"losses": {"bias_balancing": 0.1}}, "losses.bias_balancing: llama has no router"),
    "one-of-own": ("deepseek", {"routing": {"rule": "one_per_group"}}, "one_per_group needs routers with a softmax"),
    "no-groups": ("olmoe", {"routing": {"rule": "one_per_group"}}, "give them as routing.expert_groups"),
    "groups": (
        "olmoe", {"routing": {"rule": "one_per_group", "expert_groups": [0, 0, 1, 1]}}, "4 entries for 6 experts",
    ),
    "few-groups": (
        "olmoe", {"routing": {"rule": "one_per_group", "expert_groups": [0] * 6}}, "1 groups, but 2 experts per token",
    ),
}  # fmt: skip


def refused(call: Any) -> str:
    with pytest.raises(MoesaicError) as error:
        call()
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("case", CASES)
def test_the_run_the_dry_run_and_the_plan_refuse_alike(models, tmp_path, case, monkeypatch, capsys):
    name, changes, words = CASES[case]
    values = tiny_recipe(
        tmp_path / "in", **({"losses": {}} | changes | {"model": str(models / name), "tokenizer": None})
    )
    recipe = load_recipe(TrainRecipe, values)
    said = refused(lambda: start.check_start(recipe))
    assert words in said
    assert refused(lambda: moesaic.plan(values)) == said
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values))
    assert cli(["train", str(tmp_path / "recipe.yaml"), str(tmp_path / "out"), "--dry-run"]) == 2
    assert said in capsys.readouterr().err
    monkeypatch.setattr(start, "load", None)  # no weights are read
    if recipe.data_ranks == 1:
        assert refused(lambda: train(recipe, tmp_path / "out")) == said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_act": "nope"}, 'hidden_act is "nope", which is no activation of transformers'),
        ({"num_hiden_layers": 2}, "model.config.num_hiden_layers: llama has no such key"),
    ],
)
def test_a_dry_run_looks_at_a_model_from_scratch_as_the_run_does(tmp_path, changes, words, capsys):
    values = tiny_recipe(tmp_path / "in")
    values["model"] = values["model"] | {"config": values["model"]["config"] | changes}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values))
    assert cli(["train", str(tmp_path / "recipe.yaml"), str(tmp_path / "out"), "--dry-run", "--json"]) == 2
    said = json.loads(capsys.readouterr().out or "{}").get("error", {})
    assert words in str(said)


def test_what_fits_passes(models, tmp_path, capsys):
    values = tiny_recipe(tmp_path / "in", model=str(models / "olmoe"), tokenizer=None)
    values |= {"parallel": {"fsdp": 3, "expert": 3}, "routing": POOL | {"pool_size": [2, 6]}, "batch": {"tokens": 96}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values))
    assert cli(["train", str(tmp_path / "recipe.yaml"), str(tmp_path / "out"), "--dry-run"]) == 0
    assert "total parameters" in capsys.readouterr().out
