"""What `train` refuses in one line before its first step, and before --overwrite removes anything."""

import json
from pathlib import Path
from typing import Any

import pytest

import moesaic
from moesaic.common.errors import MoesaicError
from moesaic.common.recipe import load_recipe
from moesaic.recipes import shipped_recipes
from moesaic.training import session
from moesaic.training.recipe import ScratchModel, TrainRecipe, load_train_recipe
from moesaic.training.run import train
from moesaic.training.start import refuse_unknown_keys
from moesaic.training.state import list_states, read_run
from tests.tiny_training import DENSE, MOE, tiny_recipe


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("MOESAIC_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def run(values: dict[str, Any], out: Path, **options: Any) -> None:
    train(load_recipe(TrainRecipe, values), out, quiet=True, **options)


def refusal(values: dict[str, Any], out: Path, **options: Any) -> str:
    with pytest.raises(MoesaicError) as error:
        run(values, out, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("key", ["sources", "validation"])
def test_data_in_which_nothing_is_predicted_leave_the_old_run(tmp_path, key):
    recipe = tiny_recipe(tmp_path / "in", budget={"steps": 2})
    run(recipe, tmp_path / "out")
    empty = tmp_path / "in" / "empty.jsonl"
    empty.write_text('{"ids": [1]}\n' * 3)  # the end of a document alone
    source = {"path": str(empty), "domain": "math", "tokens": "ids"}
    changed = recipe | {"data": recipe["data"] | {key: [source]}}
    message = refusal(changed, tmp_path / "out", overwrite=True)
    assert "empty.jsonl: no document has a token to predict" in message
    moesaic.load(tmp_path / "out")


@pytest.mark.parametrize(("file", "harm"), [("code.jsonl", "tokens would"), ("math.valid.jsonl", "held-out")])
def test_text_that_changed_is_refused_on_resume(tmp_path, file, harm):
    recipe = tiny_recipe(tmp_path / "in", budget={"steps": 2})
    run(recipe, tmp_path / "out")
    with (tmp_path / "in" / file).open("a") as opened:
        opened.write('{"text": "one more"}\n')
    message = refusal(recipe | {"budget": {"steps": 3}}, tmp_path / "out", resume=True)
    assert f"{file}: its content or the tokenizer changed since this run started, so {harm}" in message
    moesaic.load(tmp_path / "out")


def test_a_state_without_names_of_held_out_text_goes_on(tmp_path):
    recipe = tiny_recipe(tmp_path / "in", budget={"steps": 2})
    run(recipe, tmp_path / "out")
    (state,) = list_states(tmp_path / "out" / "state")
    values = json.loads((state / "run.json").read_text())
    del values["held_out"]
    (state / "run.json").write_text(json.dumps(values))
    run(recipe | {"budget": {"steps": 3}}, tmp_path / "out", resume=True)
    assert read_run(list_states(tmp_path / "out" / "state")[-1]).held_out is not None


def test_a_warmup_that_is_longer_than_the_data_is_refused(tmp_path):
    recipe = tiny_recipe(tmp_path / "in", budget={}, optimizer={"lr": 1e-2, "warmup_steps": 1000})
    recipe["data"] = recipe["data"] | {"epochs": 1}
    message = refusal(recipe, tmp_path / "out")
    assert message == "optimizer.warmup_steps (1000) exceeds data.epochs (34 steps); lower it"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("moe", [None, MOE])
@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("num_attention_heads", 5, "makes no llama model ("),
        ("num_key_value_heads", 3, "makes no llama model (RuntimeError: The size of tensor a"),
        ("rms_norm_eps", "abc", "Validation error for field 'rms_norm_eps'"),
        ("attention_bias", 7, "Field 'attention_bias' expected bool, got int (value: 7)"),
        ("rope_scaling", {"rope_type": "foo"}, "(KeyError: 'foo'); correct it"),
        ("rope_theta", "abc", "(TypeError: "),
        ("hidden_size", 0, "(ZeroDivisionError: "),
        ("pad_token_id", 4000, "(AssertionError: Padding_idx must be within num_embeddings); correct it"),
    ],
)
def test_a_configuration_that_makes_no_model_is_one_line(tmp_path, moe, key, value, words):
    model = {"family": "llama", "config": DENSE | {key: value}} | ({} if moe is None else {"moe": moe})
    message = refusal(tiny_recipe(tmp_path / "in", model=model, losses={}), tmp_path / "out")
    assert message.startswith("model.config: makes no ")
    assert words in message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("moe", [None, MOE])
def test_a_key_that_the_configuration_does_not_know_is_refused_with_the_nearest_one(tmp_path, moe):
    model = {"family": "llama", "config": DENSE | {"num_key_value_head": 2}} | ({} if moe is None else {"moe": moe})
    message = refusal(tiny_recipe(tmp_path / "in", model=model, losses={}), tmp_path / "out")
    assert message == "model.config.num_key_value_head: llama has no such key; did you mean 'num_key_value_heads'?"


def test_a_run_that_began_with_an_unknown_key_goes_on(tmp_path, monkeypatch):
    model = {"family": "llama", "config": DENSE | {"num_key_value_head": 2}, "moe": MOE}
    recipe = tiny_recipe(tmp_path / "in", model=model, budget={"steps": 2})
    with monkeypatch.context() as earlier:
        earlier.setattr(session, "refuse_unknown_keys", lambda _: None)
        run(recipe, tmp_path / "out")
    run(recipe | {"budget": {"steps": 3}}, tmp_path / "out", resume=True)


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("llama", {"rope_theta": 1e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}, "head_dim": 8}),
        ("qwen2", {"head_dim": 8, "torch_dtype": "bfloat16", "attn_implementation": "eager"}),
        ("gemma3_text", {"sliding_window_pattern": 2, "query_pre_attn_scalar": 8}),
        ("glm4_moe", {"partial_rotary_factor": 0.5, "num_nextn_predict_layers": 0}),
        ("gpt2", {"n_embd": 32, "num_hidden_layers": 1}),
    ],
)
def test_keys_that_are_read_though_no_field_has_their_name_are_known(family, config):
    refuse_unknown_keys(ScratchModel(family=family, config=config))


def test_the_models_of_the_recipes_in_the_package_have_known_keys():
    for shipped in shipped_recipes():
        if shipped.name.startswith("train/"):
            model = load_train_recipe(shipped.name).model
            if isinstance(model, ScratchModel):
                refuse_unknown_keys(model)


@pytest.mark.parametrize("part", ["model", "optimizer"])
def test_a_damaged_state_is_one_line(tmp_path, part):
    recipe = tiny_recipe(tmp_path / "in", budget={"steps": 2})
    run(recipe, tmp_path / "out")
    (state,) = list_states(tmp_path / "out" / "state")
    (file,) = (state / part).glob("*.safetensors")
    whole = file.read_bytes()
    for content, message in (
        (whole[: len(whole) // 2], f"{file}: truncated"),
        (whole.replace(b"lm_head", b"lm_hxxx", 1), f"{state / part}: "),
    ):
        file.write_bytes(content)
        said = refusal(recipe | {"budget": {"steps": 3}}, tmp_path / "out", resume=True)
        assert said.startswith(message)
        assert said.endswith("remove the folder of this state to go on from the one before")
