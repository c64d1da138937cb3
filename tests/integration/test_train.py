"""`train` from a recipe to a checkpoint: what is left in OUT, what stops a run, what may be resumed."""

import errno
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import moesaic
from moesaic.common.errors import MoesaicError
from moesaic.common.recipe import load_recipe
from moesaic.modeling.cross_entropy import DomainLoss
from moesaic.routing.install import find_installation
from moesaic.routing.own_bias import OWN_BIAS
from moesaic.training import run as run_module
from moesaic.training import state as state_module
from moesaic.training.recipe import TrainRecipe
from moesaic.training.result import TrainResult
from moesaic.training.run import train
from moesaic.training.state import list_states
from tests.tiny_models import save_tiny
from tests.tiny_moes import MOE_FAMILIES
from tests.tiny_training import DENSE, MOE, VOCABULARY, tiny_recipe


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MOESAIC_CACHE", str(tmp_path / "cache"))


def run(values: dict[str, Any], out: Path, **options: Any) -> TrainResult:
    return train(load_recipe(TrainRecipe, values), out, quiet=True, **options)


def lines(out: Path, kind: str = "step") -> list[dict[str, Any]]:
    every = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in every if line["kind"] == kind]


def without_timing(out: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if key != "timing"} for line in lines(out)]


def weights(out: Path) -> dict[str, torch.Tensor]:
    return moesaic.load(out).state_dict()


def assert_same_weights(one: Path, other: Path) -> None:
    expected = weights(other)
    for name, tensor in weights(one).items():
        assert torch.equal(tensor, expected[name]), name


def test_a_run_leaves_a_plain_checkpoint_and_its_log(tmp_path):
    recipe = tiny_recipe(tmp_path / "in", validation={"every_steps": 4}, budget={"steps": 30})
    result = run(recipe, tmp_path / "out")
    assert (result.steps, result.tokens) == (30, 30 * 128)

    assert [line["step"] for line in lines(tmp_path / "out")] == list(range(1, 31))
    first, last = lines(tmp_path / "out")[0], lines(tmp_path / "out")[-1]
    assert last["loss"] < first["loss"] - 0.5
    assert set(first["domain_loss"]) == {"math", "code"}
    assert first["tokens"] == 128
    assert 0.9 < first["balance_loss"] < 1.5
    assert first["load_entropy"] > 0.5
    held_out = lines(tmp_path / "out", "validation")
    assert [line["step"] for line in held_out] == [0, 4, 8, 12, 16, 20, 24, 28, 30]
    before, after = held_out[0]["validation"]["math"], held_out[-1]["validation"]["math"]
    assert after["loss"] < before["loss"] - 3 * (before["standard_error"] + after["standard_error"])
    assert result.validation["math"].loss == after["loss"]

    model = moesaic.load(tmp_path / "out")
    assert model.dtype == torch.float32
    assert not find_installation(model)
    assert moesaic.plan(tmp_path / "out").parameters.total == sum(p.numel() for p in model.parameters())
    record = json.loads((tmp_path / "out" / "moesaic.json").read_text())
    assert (record["verb"], record["steps"], record["routing"]) == ("train", 30, None)
    assert load_recipe(TrainRecipe, tmp_path / "out" / "recipe.yaml") == load_recipe(TrainRecipe, recipe)


def test_a_model_with_sigmoid_weights_trains_and_routes_with_them(tmp_path):
    model = {"family": "llama", "config": DENSE, "moe": MOE | {"weighting": "sigmoid"}}
    losses = {"balance": {"coefficient": 0.1}, "bias_balancing": 0.01}
    run(tiny_recipe(tmp_path / "in", model=model, losses=losses, budget={"steps": 12}), tmp_path / "out")
    found = lines(tmp_path / "out")
    assert found[-1]["loss"] < found[0]["loss"]
    routed = []
    trained: Any = moesaic.load(tmp_path / "out")
    trained.model.layers[1].mlp.gate.register_forward_hook(lambda _module, _inputs, output: routed.append(output))
    with torch.no_grad():
        trained(torch.arange(3, 20)[None])
    logits_TE, weights_TK, ids_TK = routed[0]
    sigmoids_TK = logits_TE.gather(1, ids_TK).sigmoid()
    torch.testing.assert_close(weights_TK, sigmoids_TK / sigmoids_TK.sum(dim=-1, keepdim=True))


def test_the_same_recipe_gives_the_same_bytes(tmp_path):
    recipe = tiny_recipe(tmp_path / "in", budget={"steps": 3})
    run(recipe, tmp_path / "one")
    run(recipe, tmp_path / "two")
    assert without_timing(tmp_path / "one") == without_timing(tmp_path / "two")
    for name in ("model.safetensors", "moesaic.json", "config.json", "README.md"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_a_larger_budget_goes_on_where_the_first_ended(tmp_path):
    """With one learning rate throughout, 3 steps and 3 more are 6 steps."""
    recipe = tiny_recipe(tmp_path / "in", optimizer={"lr": 1e-2, "min_lr": 1e-2}, precision="bf16")
    run(recipe | {"budget": {"steps": 3}}, tmp_path / "out")
    run(recipe | {"budget": {"steps": 6}}, tmp_path / "out", resume=True)
    run(recipe | {"budget": {"steps": 6}}, tmp_path / "whole")
    assert_same_weights(tmp_path / "out", tmp_path / "whole")
    assert without_timing(tmp_path / "out") == without_timing(tmp_path / "whole")
    result = run(recipe | {"budget": {"steps": 6}}, tmp_path / "out", resume=True)
    assert (result.steps, result.loss) == (6, None)


def test_bf16_keeps_fp32_masters_and_writes_bf16(tmp_path):
    run(tiny_recipe(tmp_path / "in", precision="bf16"), tmp_path / "out")
    model = moesaic.load(tmp_path / "out")
    assert model.dtype == torch.bfloat16
    masters = moesaic.load(list_states(tmp_path / "out" / "state")[-1] / "model", dtype="float32").state_dict()
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in masters.values())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, masters[name].bfloat16()), name


def test_resume_starts_fresh_where_nothing_is_and_refuses_another_recipe(tmp_path):
    recipe = tiny_recipe(tmp_path / "in", budget={"steps": 2})
    run(recipe, tmp_path / "out", resume=True)
    changed = recipe | {"optimizer": recipe["optimizer"] | {"lr": 0.5}}
    with pytest.raises(MoesaicError, match=r"optimizer\.lr: was 0\.01 when this run started and is 0\.5 now"):
        run(changed, tmp_path / "out", resume=True)
    run(recipe | {"checkpoint": {"every_steps": 1}, "budget": {"steps": 3}}, tmp_path / "out", resume=True)


def test_an_existing_run_is_refused_and_replaced_only_when_asked(tmp_path):
    recipe = tiny_recipe(tmp_path / "in", budget={"steps": 2})
    run(recipe, tmp_path / "out")
    with pytest.raises(MoesaicError, match="--resume goes on with a run, --overwrite starts it again"):
        run(recipe, tmp_path / "out")
    run(recipe | {"budget": {"steps": 3}}, tmp_path / "out", overwrite=True)
    assert len(lines(tmp_path / "out")) == 3
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("no run")
    with pytest.raises(MoesaicError, match="holds no run and no checkpoint"):
        run(recipe, tmp_path / "mine", overwrite=True)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "no run"


def test_resume_removes_nothing_where_no_state_is(tmp_path):
    recipe = tiny_recipe(tmp_path / "in", budget={"steps": 2})
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("no run")
    with pytest.raises(MoesaicError, match="mine: has no run state to go on with and holds other files"):
        run(recipe, tmp_path / "mine", resume=True)
    with pytest.raises(MoesaicError, match="holds no run and no checkpoint"):
        run(recipe, tmp_path / "mine", resume=True, overwrite=True)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "no run"
    run(recipe, tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / "state")  # to save disk
    with pytest.raises(MoesaicError, match="has no run state to go on with"):
        run(recipe, tmp_path / "out", resume=True)
    unfinished = tmp_path / "out" / "state" / "step-00000001.tmp"  # of a run that was killed while it saved
    unfinished.mkdir(parents=True)
    (unfinished / "run.json").write_text("{}")
    with pytest.raises(MoesaicError, match="has no run state to go on with"):
        run(recipe, tmp_path / "out", resume=True)
    moesaic.load(tmp_path / "out")


def test_a_result_that_was_half_moved_is_written_again(tmp_path):
    recipe = tiny_recipe(tmp_path / "in", budget={"steps": 2})
    run(recipe, tmp_path / "out")
    expected = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir() if path.suffix == ".json"}
    for name in ("config.json", "tokenizer.json"):  # config.json comes last
        (tmp_path / "out" / name).unlink()
    assert run(recipe, tmp_path / "out", resume=True).loss is None
    found = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir() if path.suffix == ".json"}
    assert found.keys() == expected.keys()
    assert found["config.json"] == expected["config.json"]
    moesaic.load(tmp_path / "out")


def test_a_model_that_transformers_does_not_know_is_refused_before_its_code_or_data_is_looked_at(tmp_path):
    folder = save_tiny(tmp_path / "foreign", "llama")
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "foreign"}
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoConfig": "code.Config"}}))
    (folder / "code.py").write_text("raise SystemExit('remote code ran')")
    recipe = tiny_recipe(tmp_path / "in", model=str(folder))
    (tmp_path / "in" / "math.jsonl").unlink()
    with pytest.raises(MoesaicError, match=r"model_type 'foreign' in config\.json is unknown to transformers"):
        run(recipe, tmp_path / "out")


def test_overwrite_keeps_the_old_run_until_the_new_one_can_start(tmp_path):
    recipe = tiny_recipe(tmp_path / "in", budget={"steps": 2})
    run(recipe, tmp_path / "out")
    with pytest.raises(MoesaicError, match="tokenizer"):
        run(recipe | {"tokenizer": str(tmp_path / "nowhere")}, tmp_path / "out", overwrite=True)
    moesaic.load(tmp_path / "out")


@pytest.mark.parametrize("out", ["start", "start/run", "."])
def test_what_the_recipe_reads_is_never_overwritten(tmp_path, out):
    recipe = tiny_recipe(tmp_path / "in", budget={"steps": 2})
    run(recipe, tmp_path / "start")
    (tmp_path / "recipe.yaml").write_text("looks like a run")
    with pytest.raises(MoesaicError, match="which the recipe reads; choose another OUT"):
        run(recipe | {"model": str(tmp_path / "start"), "tokenizer": None}, tmp_path / out, overwrite=True)
    moesaic.load(tmp_path / "start")


def test_a_mistake_leaves_no_new_folder(tmp_path):
    recipe = tiny_recipe(tmp_path / "in", optimizer={"lr": 1e-3, "frozen": ["*.typo.*"]})
    with pytest.raises(MoesaicError, match=r"optimizer\.frozen: '\*\.typo\.\*' matches no parameter"):
        run(recipe, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_loss_that_is_not_finite_stops_the_run_and_leaves_the_last_good_state(tmp_path, monkeypatch):
    def poisoned(trainable, batches, *, step, **more):
        if step == 3:
            next(iter(trainable.model.parameters())).data.fill_(torch.nan)
        return step_before(trainable, batches, step=step, **more)

    step_before = run_module.run_step
    monkeypatch.setattr(run_module, "run_step", poisoned)
    recipe = tiny_recipe(tmp_path / "in", checkpoint={"every_steps": 1})
    with pytest.raises(
        MoesaicError,
        match=r"step 4: loss nan .*\(model\.embed_tokens gives NaN.* the last good state is .*step-00000003",
    ) as error:
        run(recipe, tmp_path / "out")
    assert "\n" not in str(error.value)
    assert [line["step"] for line in lines(tmp_path / "out")] == [1, 2, 3]
    monkeypatch.undo()
    monkeypatch.setenv("MOESAIC_CACHE", str(tmp_path / "cache"))
    run(recipe, tmp_path / "out", resume=True)
    run(recipe, tmp_path / "whole")
    assert_same_weights(tmp_path / "out", tmp_path / "whole")


def test_a_full_disk_stops_the_run_and_leaves_the_last_good_state(tmp_path, monkeypatch):
    def full(tensors, **more):
        if (tmp_path / "out" / "state" / "step-00000002").exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        return save_before(tensors, **more)

    save_before = state_module.save
    monkeypatch.setattr(state_module, "save", full)
    recipe = tiny_recipe(tmp_path / "in", checkpoint={"every_steps": 2})
    with pytest.raises(MoesaicError, match=r"step 4: .*the disk is full.*the last good state is .*step-00000002"):
        run(recipe, tmp_path / "out")
    assert [state.name for state in list_states(tmp_path / "out" / "state")] == ["step-00000002"]


def test_sigterm_saves_the_state_and_leaves_with_143(tmp_path, monkeypatch):
    def interrupted(*args, step, **more):
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return step_before(*args, step=step, **more)

    step_before = run_module.run_step
    monkeypatch.setattr(run_module, "run_step", interrupted)
    recipe = tiny_recipe(tmp_path / "in")
    with pytest.raises(SystemExit) as exit_status:
        run(recipe, tmp_path / "out")
    assert exit_status.value.code == 143
    assert [state.name for state in list_states(tmp_path / "out" / "state")] == ["step-00000003"]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    monkeypatch.undo()
    monkeypatch.setenv("MOESAIC_CACHE", str(tmp_path / "cache"))
    run(recipe, tmp_path / "out", resume=True)
    assert [line["step"] for line in lines(tmp_path / "out")] == list(range(1, 9))


def test_the_last_states_and_the_best_are_kept(tmp_path, monkeypatch):
    losses = iter([3.0, 2.0, 1.0, 2.5, 2.4, 2.3])  # before the first step and after each of the five

    def measured(*_):
        return {"math": DomainLoss(loss=next(losses), standard_error=0.1, documents=2, tokens=9)}

    monkeypatch.setattr(run_module, "validate", measured)
    recipe = tiny_recipe(
        tmp_path / "in", budget={"steps": 5}, checkpoint={"every_steps": 1, "keep": 2}, validation={"every_steps": 1}
    )
    run(recipe, tmp_path / "out")
    kept = [state.name for state in list_states(tmp_path / "out" / "state")]
    assert kept == ["step-00000002", "step-00000004", "step-00000005"]


def test_a_dense_model_trains_and_keeps_its_tokenizer(tmp_path):
    recipe = tiny_recipe(tmp_path / "in", losses={}, budget={"steps": 2})
    base = save_tiny(tmp_path / "base", "qwen3", vocab_size=VOCABULARY)
    for file in (tmp_path / "in" / "tokenizer").iterdir():
        (base / file.name).write_bytes(file.read_bytes())
    run(recipe | {"model": str(base), "tokenizer": None}, tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    assert moesaic.load(tmp_path / "out").config.model_type == "qwen3"
    record = json.loads((tmp_path / "out" / "moesaic.json").read_text())
    assert record["sources"][0]["name"] == str(base)
    assert "balance_loss" not in lines(tmp_path / "out")[0]


def test_a_routing_loss_on_a_dense_model_is_refused(tmp_path):
    recipe = tiny_recipe(tmp_path / "in", model={"family": "llama", "config": DENSE})
    with pytest.raises(MoesaicError, match="has no router"):
        run(recipe, tmp_path / "out")


def test_text_with_tokens_that_the_model_lacks_is_refused(tmp_path):
    recipe = tiny_recipe(tmp_path / "in")
    recipe["model"] = recipe["model"] | {"config": DENSE | {"vocab_size": 20}}
    with pytest.raises(MoesaicError, match=r"math\.jsonl: its tokenizer gives token 39, but the model has only 20"):
        run(recipe, tmp_path / "out")


@pytest.mark.parametrize("family", ["olmoe", "qwen2_moe", "qwen3_moe", "mixtral"])
def test_native_families_train_with_pools_and_reload(tmp_path, family):
    config = DENSE | MOE_FAMILIES[family] | {"num_experts_per_tok": 2}
    recipe = tiny_recipe(
        tmp_path / "in",
        model={"family": family, "config": config},
        routing={"rule": "document_pool", "pool_size": [2, 5]},
        losses={"balance": {"coefficient": 0.1}, "bias_balancing": 0.01},
        budget={"steps": 2},
    )
    run(recipe, tmp_path / "out")
    model = moesaic.load(tmp_path / "out")
    trained = moesaic.load(list_states(tmp_path / "out" / "state")[-1] / "model").state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, trained[name]), name
    record = json.loads((tmp_path / "out" / "moesaic.json").read_text())["routing"]
    assert record["rule"]["rule"] == "document_pool"
    assert any(value != 0 for layer in record["selection_bias"] for value in layer)
    installation = find_installation(model)
    assert installation is not None
    assert json.loads(json.dumps(installation.to_record())) == record


def test_a_further_run_goes_on_with_the_selection_bias(tmp_path):
    recipe = tiny_recipe(tmp_path / "in", losses={"bias_balancing": 0.01}, budget={"steps": 3})
    run(recipe, tmp_path / "first")
    run(recipe | {"model": str(tmp_path / "first"), "tokenizer": None, "losses": {}}, tmp_path / "second")
    records = [json.loads((tmp_path / out / "moesaic.json").read_text()) for out in ("first", "second")]
    biases = [
        {
            name: value.tolist()
            for name, value in load_file(tmp_path / out / "model.safetensors").items()
            if OWN_BIAS in name
        }
        for out in ("first", "second")
    ]
    assert len(biases[0]) == 2
    assert biases[0] == biases[1]
    assert records[1]["sources"][0]["weights_hash"] == records[0]["weights_hash"]


def test_a_rule_for_inference_holds_in_the_config_and_in_further_runs(tmp_path):
    """The constraint is dropped once: engines that read config.json alone, and the next run, route as this one did."""
    moe = MOE | {"routing": "one_per_group", "groups": 4}
    recipe = tiny_recipe(tmp_path / "in", model={"family": "llama", "config": DENSE, "moe": moe}, budget={"steps": 2})
    run(recipe, tmp_path / "grouped")
    further = recipe | {"tokenizer": None, "model": str(tmp_path / "grouped"), "routing": {"rule": "topk"}}
    run(further, tmp_path / "free")
    config = json.loads((tmp_path / "free" / "config.json").read_text())
    assert (config["routing_rule"], config["expert_groups"]) == ("topk", None)
    run(further | {"model": str(tmp_path / "free"), "routing": {}}, tmp_path / "further")
    assert json.loads((tmp_path / "further" / "config.json").read_text())["routing_rule"] == "topk"
    tokens = torch.arange(3, 30)[None]
    for name in ("free", "further"):
        bare = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        torch.testing.assert_close(bare(tokens).logits, moesaic.load(tmp_path / name)(tokens).logits)


def test_a_recorded_rule_of_a_native_family_holds_in_further_runs(tmp_path):
    model = {"family": "qwen3_moe", "config": DENSE | MOE_FAMILIES["qwen3_moe"] | {"num_experts_per_tok": 2}}
    grouped = {"rule": "one_per_group", "expert_groups": [0, 0, 1, 1, 2, 2, 3, 3]}
    recipe = tiny_recipe(tmp_path / "in", model=model, routing=grouped, budget={"steps": 2})
    run(recipe, tmp_path / "first")
    run(recipe | {"model": str(tmp_path / "first"), "tokenizer": None, "routing": {}}, tmp_path / "second")
    records = [json.loads((tmp_path / out / "moesaic.json").read_text())["routing"] for out in ("first", "second")]
    assert records[0] == records[1]
    assert records[0]["rule"]["rule"] == "one_per_group"


def test_a_family_whose_documents_attend_to_each_other_has_one_a_row(tmp_path, capsys):
    config = DENSE | MOE_FAMILIES["gpt_oss"] | {"num_experts_per_tok": 2}
    recipe = tiny_recipe(tmp_path / "in", model={"family": "gpt_oss", "config": config}, losses={})
    train(load_recipe(TrainRecipe, recipe | {"budget": {"steps": 2}}), tmp_path / "out", quiet=False)
    assert "gpt_oss looks back into the document before, so each document has a row" in capsys.readouterr().err


def test_frozen_parameters_stay(tmp_path):
    recipe = tiny_recipe(tmp_path / "in", budget={"steps": 2})
    run(recipe, tmp_path / "start")
    frozen = {"lr": 1e-2, "frozen": ["*.self_attn.*", "*embed*"]}
    values = recipe | {"model": str(tmp_path / "start"), "tokenizer": None, "optimizer": frozen, "precision": "bf16"}
    run(values, tmp_path / "out")
    before, after = weights(tmp_path / "start"), weights(tmp_path / "out")
    for name, tensor in after.items():
        is_frozen = ".self_attn." in name or "embed" in name
        assert torch.equal(tensor, before[name].bfloat16()) == is_frozen, name


def test_epochs_end_the_run(tmp_path):
    recipe = tiny_recipe(tmp_path / "in", budget={})
    recipe["data"] = recipe["data"] | {"epochs": 1}
    result = run(recipe, tmp_path / "out")
    characters = sum(
        len(json.loads(line)["text"]) + 1
        for domain in ("math", "code")
        for line in (tmp_path / "in" / f"{domain}.jsonl").read_text().splitlines()
    )
    assert sum(line["step_tokens"] for line in lines(tmp_path / "out")) == characters
    assert result.steps == len(lines(tmp_path / "out"))
