"""What `train` refuses in one line before its first step, and before --overwrite removes anything."""

import json
from pathlib import Path
from typing import Any

import pytest

import moesaic
from moesaic.errors import MoesaicError
from moesaic.recipe import load_recipe
from moesaic.training.recipe import TrainRecipe
from moesaic.training.run import train
from moesaic.training.state import list_states, read_run
from tests.tiny_training import tiny_recipe


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


def test_held_out_text_that_changed_is_refused_on_resume(tmp_path):
    recipe = tiny_recipe(tmp_path / "in", budget={"steps": 2})
    run(recipe, tmp_path / "out")
    with (tmp_path / "in" / "math.valid.jsonl").open("a") as file:
        file.write('{"text": "one more"}\n')
    longer = recipe | {"budget": {"steps": 3}}
    message = refusal(longer, tmp_path / "out", resume=True)
    assert "math.valid.jsonl: its content or the tokenizer changed since this run started, so held-out" in message


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
