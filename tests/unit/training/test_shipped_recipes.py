"""Every training recipe in the package loads, and its plan says what arithmetic on the paper's figures gives."""

import json
import math
from pathlib import Path

import pytest

from moesaic.checkpoint.writer import OutputTensor, plan_files
from moesaic.common.yaml_text import parse_yaml
from moesaic.families.counting import config_shapes
from moesaic.modeling.names import class_names
from moesaic.planning.run import plan
from moesaic.recipes import read_recipe, shipped_recipes
from moesaic.training.planning import PEAK_FLOPS, TrainPlan
from moesaic.training.recipe import ScratchModel, load_train_recipe, scratch_config

NAMES = [recipe.name for recipe in shipped_recipes() if recipe.verb == "train"]
QWEN = {"model_type": "qwen3", "head_dim": 128, "num_key_value_heads": 8, "vocab_size": 151936}
TIED = {"tie_word_embeddings": True}
DENSE = {
    "qwen3-4b": QWEN
    | TIED
    | {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    "qwen3-1.7b": QWEN
    | TIED
    | {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "llama-3.2-1b": TIED
    | {"model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
    | {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256},
    "smollm2": TIED
    | {"model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
    | {"num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152},
}


def moe_config(dense: dict, *, experts: int, top_k: int) -> dict:
    """DivMoE's: 2 shards of 4 specialists."""
    return {
        **dense,
        **class_names(dense["model_type"]),
        "num_experts": experts,
        "num_experts_per_tok": top_k,
        "moe_intermediate_size": dense["intermediate_size"] // 2,
        "moe_layers": list(range(dense["num_hidden_layers"])),
        "num_shared_experts": 0,
        "expert_mlp_bias": False,
    }


def scratch(name: str, **changes: int) -> dict:
    model = load_train_recipe(name).model
    assert isinstance(model, ScratchModel)
    return scratch_config(model) | changes


def source_config(name: str, model: str) -> dict:
    """What `model` of a recipe is: a released one, or the result of another recipe."""
    for size, dense in DENSE.items():
        if size in name:
            return dense if "stage1" in name else moe_config(dense, experts=8, top_k=2)
    return {
        "./base": DENSE["smollm2"],
        "./moe": moe_config(DENSE["smollm2"], experts=8, top_k=2),
        "./emo-1b14b": scratch("train/emo-pretrain-1b14b"),
        "./emo-1b14b-gsm8k-32": scratch("train/emo-pretrain-1b14b", num_experts=32),
        "./emo": scratch("train/laptop-emo-pretrain"),
        "./subset": scratch("train/laptop-emo-pretrain", num_experts=8),
    }[model]


def save_headers(folder: Path, config: dict) -> None:
    """A checkpoint of the real size whose tensors are holes in the file."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    tensors = [OutputTensor(name=name, dtype="BF16", shape=shape) for name, shape in config_shapes(config).items()]
    (file,) = plan_files(tensors, 10**12).files
    with (folder / file.name).open("wb") as handle:
        handle.write(file.header)
        handle.truncate(file.nbytes)


def plan_of(name: str, tmp_path: Path) -> TrainPlan:
    values = parse_yaml(read_recipe(name), name)
    if isinstance(values["model"], str):
        save_headers(tmp_path / "model", source_config(name, values["model"]))
        values["model"] = str(tmp_path / "model")
    report = plan(values)
    assert isinstance(report, TrainPlan)
    return report


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_loads_and_is_planned(name, tmp_path):
    recipe = load_train_recipe(name)
    report = plan_of(name, tmp_path)
    assert report.devices == recipe.data_ranks
    assert report.steps == recipe.budget_steps
    if report.growth is None:
        assert report.flops == report.flops_per_token * report.tokens > 0
    else:
        assert 0.9 * report.flops_per_token * report.tokens < report.flops < report.flops_per_token * report.tokens
    assert 6 * report.parameters.active_without_embeddings < report.flops_per_token < 20 * report.parameters.active
    if report.devices > 1:
        assert report.memory.total < 75e9  # of the 80 GB of an H100
        assert report.traffic.gather > 0
    else:
        assert report.memory.total < 12e9
        assert report.traffic.total == 0
    assert all("\n" not in line for line in report.lines())
    json.dumps(report.to_dict())


@pytest.mark.parametrize("base", ["qwen3-4b", "qwen3-1.7b", "llama-3.2-1b"])
def test_divmoe_follows_table_8(base):
    stages = [load_train_recipe(f"train/divmoe-stage{stage}-{base}") for stage in (1, 2, 3)]
    assert [(s.optimizer.lr, s.optimizer.min_lr, s.optimizer.warmup_steps) for s in stages] == [
        (5e-5, 5e-6, 50),
        (5e-4, 5e-5, 256),
        (2e-5, 2e-6, 500),
    ]
    assert [s.data.sequence_length for s in stages] == [4096, 4096, 16384]
    assert [s.budget.tokens for s in stages] == [10_000_000_000, 500_000_000_000, None]
    for stage in stages:
        assert stage.batch.tokens == 2**21
        assert stage.optimizer.betas == (0.9, 0.95)
        assert (stage.optimizer.schedule, stage.optimizer.weight_decay, stage.precision) == ("cosine", 0.1, "bf16")
        assert stage.activation_checkpointing


def test_divmoe_hours_come_near_the_papers(tmp_path):
    """Table 9: 26,500 hours of an H20 for stage 2 of Qwen3-1.7B; at our utilisation they are within a tenth."""
    report = plan_of("train/divmoe-stage2-qwen3-1.7b", tmp_path)
    assert report.device_hours * PEAK_FLOPS["H100"] / PEAK_FLOPS["H20"] == pytest.approx(26_500, rel=0.1)


def test_emo_is_1b14b_with_the_papers_routing(tmp_path):
    recipe = load_train_recipe("train/emo-pretrain-1b14b")
    report = plan_of("train/emo-pretrain-1b14b", tmp_path)
    assert (report.parameters.num_experts, report.parameters.top_k) == (127, 7)
    assert report.parameters.total == pytest.approx(13.57e9, rel=0.01)
    assert report.parameters.active == pytest.approx(1.489e9, rel=0.01)
    assert recipe.routing.pool_range(top_k=7, num_experts=127) == (8, 127)
    assert recipe.losses.balance is not None
    assert (recipe.optimizer.lr, recipe.losses.balance.coefficient, recipe.losses.router_z) == (4e-3, 0.1, 1e-3)
    standard = load_train_recipe("train/standard-pretrain-1b14b")
    assert standard.routing.rule is None
    assert (standard.model, standard.data, standard.losses) == (recipe.model, recipe.data, recipe.losses)
    assert (standard.optimizer, standard.batch, standard.budget) == (recipe.optimizer, recipe.batch, recipe.budget)


@pytest.mark.parametrize("name", ["train/emo-pretrain-1b14b", "train/standard-pretrain-1b14b"])
def test_emo_follows_its_public_code(name):
    """Row 9 of docs/peers.md; the embeddings of 100,278 tokens are padded to a multiple of 128."""
    recipe = load_train_recipe(name)
    assert isinstance(recipe.model, ScratchModel)
    config = recipe.model.config
    assert recipe.tokenizer == "allenai/dolma2-tokenizer"
    assert config["vocab_size"] == 128 * math.ceil(100_278 / 128)
    assert (config["eos_token_id"], config["pad_token_id"]) == (100_257, 100_277)
    assert config["rope_parameters"]["rope_theta"] == 5e5
    assert recipe.losses.lm_z == 1e-5
    assert recipe.optimizer.no_decay == ("*embed_tokens*",)


def test_shipped_recipes_balance_over_the_whole_batch():
    """Row 10 of docs/peers.md."""
    scopes = {recipe.losses.balance.scope for name in NAMES if (recipe := load_train_recipe(name)).losses.balance}
    assert scopes == {"step"}


def test_btx_uses_two_experts():
    """Row 14 of docs/peers.md, as in DivMoE's tables."""
    names = [recipe.name for recipe in shipped_recipes() if "btx" in recipe.name]
    assert names
    assert {parse_yaml(read_recipe(name), name)["top_k"] for name in names} == {2}


def test_expert_upcycling_is_7b_and_13b(tmp_path):
    report = plan_of("train/expert-upcycling-7b-13b", tmp_path)
    assert report.growth is not None
    small, large = report.growth.phases
    assert (small.parameters.num_experts, large.parameters.num_experts) == (32, 64)
    assert small.parameters.total == pytest.approx(7.2e9, rel=0.01)
    assert large.parameters.total == pytest.approx(13.2e9, rel=0.01)
    assert large.parameters.active_without_embeddings == pytest.approx(1.0e9, rel=0.02)
    assert report.parameters == large.parameters
    assert small.steps is not None
    assert report.steps is not None
    assert small.steps / report.steps == pytest.approx(2 / 3, abs=1e-4)
    assert report.growth.ratios["parameters"] == pytest.approx(7.2 / 13.2, rel=0.01)
    saved = report.growth.savings
    assert saved["parameters"] == pytest.approx(2 / 3 * (1 - 7.2 / 13.2), rel=0.02)  # the paper's hours: 32%
    assert saved["flops"] == pytest.approx(0, abs=1e-3)  # the same active parameters, but for the router
    assert any("this run   0.67  100.0%       69.6%" in line for line in report.lines())
