"""What `plan` and `train --dry-run` say about models from scratch, against real ones of the same config."""

import json

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

import moesaic
from moesaic.cli.app import run
from moesaic.training.planning import TrainPlan
from tests.tiny_models import save_tiny
from tests.tiny_moes import EXPERTS, MOE_FAMILIES, TOP_K, tiny_moe
from tests.tiny_training import tiny_recipe

_OWN = {"hidden_size": 32, "num_hidden_layers": 2, "num_experts_per_tok": TOP_K, "vocab_size": 96}


def _config(family: str) -> dict:
    """The fields of the tiny model that its family's defaults don't give."""
    return tiny_moe(family).config.to_diff_dict() | _OWN


def _model(family: str, config: dict) -> dict:
    drop = ("model_type", "transformers_version", "architectures", "dtype")
    return {"family": family, "config": {key: value for key, value in config.items() if key not in drop}}


@pytest.mark.parametrize("family", MOE_FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_a_native_family_from_scratch_has_the_figures_of_its_checkpoint(family, tied, tmp_path):
    config = _config(family) | {"tie_word_embeddings": tied}
    planned = moesaic.plan(tiny_recipe(tmp_path, model=_model(family, config), losses={}))
    assert isinstance(planned, TrainPlan)
    model = tiny_moe(family, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "model")
    saved = moesaic.plan(tmp_path / "model")
    assert planned.parameters == saved.parameters
    assert (planned.parameters.num_experts, planned.parameters.top_k) == (EXPERTS, TOP_K)
    buffers = {name for name, _ in model.named_buffers()} & set(model.state_dict())
    numbers = sum(parameter.numel() for parameter in model.parameters())
    assert planned.parameters.total == numbers + sum(model.state_dict()[name].numel() for name in buffers)
    assert planned.model_type == family
    routed = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    assert planned.parameters.routed == routed
    assert planned.flops_per_token == 3 * moesaic.plan(tmp_path / "model", context=32).flops_per_token


def test_a_family_outside_of_the_tables_is_planned_from_its_class(tmp_path):
    config = {"vocab_size": 48, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    planned = moesaic.plan(tiny_recipe(tmp_path, model={"family": "gpt2", "config": config}, losses={}))
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **config))
    assert planned.parameters.total == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            {"family": "olmo3e", "config": {}},
            "model.family: olmo3e is no model type of transformers; did you mean 'olmoe'?",
        ),
        ({"family": "clip", "config": {}}, "(ValueError: Unrecognized configuration class"),
        ({"family": "olmoe", "config": {"num_experts": "x"}}, "Field 'num_experts' expected int, got str"),
        ({"family": "olmoe", "config": {"num_attention_heads": 0}}, "(ZeroDivisionError: integer division"),
        ({"family": "mixtral", "config": {"hidden_act": "nope"}}, "(KeyError: 'nope')"),
    ],
)
def test_what_makes_no_model_is_refused(model, message, tmp_path, capsys):
    file = tmp_path / "recipe.yaml"
    file.write_text(json.dumps(tiny_recipe(tmp_path / "data", model=model, losses={})))
    assert run(["train", str(file), str(tmp_path / "out"), "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_dry_run_wants_the_local_files_of_sources_and_validation(tmp_path, capsys):
    file = tmp_path / "recipe.yaml"
    recipe = tiny_recipe(tmp_path / "data", model=_model("olmoe", _config("olmoe")))
    file.write_text(json.dumps(recipe))
    command = ["train", str(file), str(tmp_path / "out"), "--dry-run", "--quiet"]
    assert run(command) == 0
    for key in ("data.sources.1.path", "data.validation.0.path"):
        assert run([*command, "--set", f"{key}=nosuch.jsonl"]) == 2
        assert f"{key}: nosuch.jsonl: no such file or folder" in capsys.readouterr().err
    assert run([*command, "--set", "data.sources.0.path=hf://org/name"]) == 0
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("key", ["hidden_size", "vocab_size", "num_hidden_layers"])
@pytest.mark.parametrize("moe", [None, {"experts": 4, "top_k": 2, "intermediate_size": 24}])
def test_sizes_that_are_left_to_the_class_are_planned_with_its_own(tmp_path, key, moe):
    own = {
        "hidden_size": 32,
        "vocab_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
    }
    usual = {"hidden_size": 4096, "vocab_size": 32000, "num_hidden_layers": 32}[key]
    left_out = {name: value for name, value in own.items() if name != key}
    if moe is not None and key == "num_hidden_layers":
        with pytest.raises(moesaic.MoesaicError, match="num_hidden_layers is missing"):
            moesaic.plan(tiny_recipe(tmp_path, model={"family": "llama", "config": left_out, "moe": moe}, losses={}))
        return
    plans = [
        moesaic.plan(tiny_recipe(tmp_path / name, model={"family": "llama", "config": config, "moe": moe}, losses={}))
        for name, config in {"left_out": left_out, "said": {**own, key: usual}}.items()
    ]
    assert plans[0].to_dict() == plans[1].to_dict()


@pytest.mark.parametrize("key", ["hidden_size", "vocab_size"])
def test_sizes_that_a_checkpoints_config_leaves_out_are_those_of_its_tensors(tmp_path, key):
    save_tiny(tmp_path / "model", "llama")

    def planned(folder: str) -> TrainPlan:
        plan = moesaic.plan(tiny_recipe(tmp_path / folder, model=str(tmp_path / "model"), losses={}))
        assert isinstance(plan, TrainPlan)
        return plan

    whole = planned("whole")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps({name: value for name, value in json.loads(file.read_text()).items() if name != key}))
    assert planned("less").memory == whole.memory
