"""The schema of `train`: what is accepted, and which key a refusal names."""

import subprocess
import sys

import pytest

from moesaic.common.errors import MoesaicError
from moesaic.common.recipe import dump_recipe, load_recipe
from moesaic.training.recipe import TrainRecipe

FROM_THE_ISSUE = """
model: some/model
data:
  sequence_length: 4096
  sources:    [{path: math.jsonl, domain: math, weight: 1.0}]
  validation: [{path: math.valid.jsonl, domain: math}]
routing:   {rule: document_pool, pool_size: [8, 127], pool_draw: document_and_layer}
losses:    {balance: {scope: global, coefficient: 0.1}, router_z: 0.001, bias_balancing: null}
optimizer: {lr: 5e-4, min_lr: 5e-5, schedule: cosine, warmup_steps: 256, betas: [0.9, 0.95], weight_decay: 0.1,
             clip: 1.0}
batch:     {tokens: 2097152, micro_sequences: 4}
budget:    {steps: 1000}
precision: bf16
parallel:  {fsdp: 1, expert: 1, replicate: 1, cpu_offload: false}
checkpoint: {every_steps: 500, keep: 2}
seed: 0
"""
SCRATCH = {
    "model.family": "llama",
    "model.config": "{}",
    "model.moe": "{experts: 8, top_k: 2, intermediate_size: 32}",
    "tokenizer": "some/model",
    "routing": "{}",
}


def load(tmp_path, *overrides: str) -> TrainRecipe:
    path = tmp_path / "recipe.yaml"
    path.write_text(FROM_THE_ISSUE)
    return load_recipe(TrainRecipe, path, overrides)


def load_scratch(tmp_path, **overrides: str) -> TrainRecipe:
    return load(tmp_path, "model=null", *(f"{key}={value}" for key, value in (SCRATCH | overrides).items()))


def test_the_schema_of_the_issue_loads_and_round_trips(tmp_path):
    recipe = load(tmp_path)
    assert recipe.optimizer.lr == 5e-4
    assert recipe.routing.pool_size == (8, 127)
    assert (recipe.sequences_per_step, recipe.micro_steps, recipe.budget_steps) == (512, 128, 1000)
    (tmp_path / "again.yaml").write_text(dump_recipe(recipe))
    assert load_recipe(TrainRecipe, tmp_path / "again.yaml") == recipe


def test_token_budgets_are_rounded_up_to_whole_steps(tmp_path):
    recipe = load(tmp_path, "budget={tokens: 500e9}")
    assert recipe.budget_steps == 238419
    assert (recipe.budget_steps - 1) * recipe.batch.tokens < 500e9 <= recipe.budget_steps * recipe.batch.tokens


def test_epochs_take_the_place_of_a_budget(tmp_path):
    assert load(tmp_path, "budget={}", "data.epochs=1").budget_steps is None


def test_micro_steps_count_all_ranks(tmp_path):
    assert load(tmp_path, "parallel={fsdp: 4, replicate: 2, expert: 4}").micro_steps == 16


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("optimizer.lrr=1", "optimizer.lrr: unknown key; did you mean 'lr'"),
        ("optimizer.lr=0", "optimizer.lr: must be greater than 0, got 0"),
        ("optimizer.min_lr=1", "optimizer.min_lr: must not exceed lr"),
        ("optimizer.betas=[0.9, 1.0]", "optimizer.betas: must both be"),
        ("optimizer.warmup_steps=1001", "optimizer.warmup_steps (1001) exceeds the budget (1000 steps)"),
        ("optimizer.clip=-1", "optimizer.clip: must be greater than 0"),
        ("batch.tokens=2097153", "batch.tokens (2097153) must be a multiple of 16384"),
        ("budget={steps: 1, tokens: 5}", "budget.steps: and tokens are both given"),
        ("budget={}", "budget: is missing: give budget.steps"),
        ("budget={steps: 0}", "budget.steps: must be greater than 0"),
        ("routing={rule: topk, pool_size: 8}", "routing.pool_size: is only for"),
        ("losses.balance.coefficient=-1", "losses.balance.coefficient: must be at least 0"),
        ("losses.balance.scope=world", "losses.balance.scope: 'world' is not allowed"),
        ("parallel={fsdp: 4, expert: 3}", "parallel.expert: must divide fsdp (4), got 3"),
        ("parallel.cpu_offload=true", "parallel.cpu_offload: needs sharding"),
        ("precision=fp16", "precision: 'fp16' is not allowed"),
        ("seed=-1", "seed: must be at least 0"),
        ("seed=9223372036854775808", "seed: must be at least 0 and less than 2**63, got 9223372036854775808"),
    ],
)
def test_refusals_name_the_key(tmp_path, override: str, words: str):
    with pytest.raises(MoesaicError) as error:
        load(tmp_path, override)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_validating_without_held_out_sets_is_refused(tmp_path):
    with pytest.raises(MoesaicError, match=r"data\.validation names no held-out set"):
        load(tmp_path, "data.validation=[]", "validation.every_steps=5")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokenizer": "null"}, "tokenizer: is missing"),
        ({"model.moe.top_k": "9"}, "model.moe.top_k: must not exceed experts (8)"),
        ({"model.moe.groups": "4"}, "model.moe.groups: goes with `routing: one_per_group`"),
        ({"model.moe": "{experts: 8, top_k: 2, intermediate_size: 1, routing: one_per_group, groups: 3}"}, "divide"),
        (
            {"model.moe": "{experts: 8, top_k: 3, intermediate_size: 1, routing: one_per_group, groups: 2}"},
            "groups (2)",
        ),
        ({"routing": "{rule: document_pool, pool_size: [1, 8]}"}, "routing.pool_size: [1, 8] does not fit"),
        ({"routing": "{rule: document_pool, pool_size: [2, 9]}"}, "routing.pool_size: [2, 9] does not fit"),
        ({"parallel": "{fsdp: 3, expert: 3}", "batch.tokens": "49152"}, "parallel.expert (3) must divide"),
    ],
)
def test_refusals_of_models_from_scratch(tmp_path, changes: dict[str, str], words: str):
    with pytest.raises(MoesaicError) as error:
        load_scratch(tmp_path, **changes)
    assert words in str(error.value)


def test_a_model_from_scratch_loads(tmp_path):
    recipe = load_scratch(tmp_path, routing="{rule: document_pool, pool_size: [2, 8]}")
    assert not isinstance(recipe.model, str)
    assert recipe.model.moe is not None
    assert recipe.model.moe.experts == 8


def test_the_recipe_does_not_import_torch():
    code = "import sys, moesaic.training.recipe, moesaic.training.schedule; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
