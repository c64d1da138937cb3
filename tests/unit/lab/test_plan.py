"""Plans: every recipe in them loads, steps come in order, and OUT takes no other experiment."""

import dataclasses
import json
from pathlib import Path

import pytest

from moesaic.cli.app import run
from moesaic.errors import MoesaicError
from moesaic.lab.experiments import EXPERIMENTS
from moesaic.lab.plan import Plan, Step, read_plan, write_plan
from moesaic.lab.run import run_experiment
from moesaic.lab.scale import SCALES, load_scale
from moesaic.lab.writing import steps_of

CI = Path(__file__).with_name("ci.yaml")


@pytest.mark.parametrize("scale", [*SCALES, CI])
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_scale_plans_every_experiment(name, scale, tmp_path):
    plan = EXPERIMENTS[name].plan(load_scale(scale), None, 2)  # loads every training recipe
    write_plan(plan, tmp_path / "out")
    assert read_plan(tmp_path / "out") == dataclasses.replace(plan, scale=json.loads(json.dumps(plan.scale)))
    produced = {folder for step in plan.steps for folder in step.runs}
    for step in plan.steps:
        for command in step.commands:
            if command[0] == "train":
                assert command[1] in step.files
                assert command[2] in produced


def test_matched_tokens_and_rates_before_and_after_an_expansion():
    """Both parts together have the steps of the fixed run, and its learning rates."""
    from moesaic.recipe import load_recipe
    from moesaic.recipe_yaml import parse_yaml
    from moesaic.training.recipe import TrainRecipe
    from moesaic.training.schedule import learning_rate

    scale = load_scale("tiny")
    plan = EXPERIMENTS["expand"].plan(scale, None, 1)
    files = {name: text for step in plan.steps for name, text in step.files.items()}

    def rates(name: str) -> list[float]:
        recipe = load_recipe(TrainRecipe, parse_yaml(files[f"recipes/{name}.yaml"], name))
        steps = recipe.budget_steps
        assert steps is not None
        return [learning_rate(step, steps, recipe.optimizer) for step in range(steps)]

    whole = rates("fixed-16-0")
    assert len(whole) == steps_of(scale.expand.train)
    for share in scale.expand.shares:
        cut = rates(f"before-8-{share:g}-0") + rates(f"grown-8-{share:g}-exact-0")
        assert cut == pytest.approx(whole, rel=1e-12)


def _plan(*steps: Step, experiment: str = "emo") -> Plan:
    return Plan(experiment=experiment, data=None, domains=("a",), seeds=1, scale={}, steps=steps)


def test_more_seeds_go_into_the_same_folder(tmp_path):
    scale = load_scale(CI)
    for seeds in (1, 2):
        write_plan(EXPERIMENTS["expand"].plan(scale, None, seeds), tmp_path)
    with pytest.raises(MoesaicError, match="other settings"):
        write_plan(EXPERIMENTS["expand"].plan(scale, None, 1), tmp_path)


def test_other_experiments_and_settings_are_refused(tmp_path):
    write_plan(_plan(Step(name="a", commands=(("recipes", "list"),))), tmp_path / "out")
    with pytest.raises(MoesaicError, match="holds the experiment emo"):
        write_plan(_plan(experiment="life"), tmp_path / "out")
    with pytest.raises(MoesaicError, match="step a"):
        write_plan(_plan(Step(name="a", commands=(("recipes", "show"),))), tmp_path / "out")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").touch()
    with pytest.raises(MoesaicError, match="holds no experiment"):
        write_plan(_plan(), tmp_path / "other")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["emmo", "OUT"], "did you mean 'emo'"),
        (["emo", "OUT", "--scale", "tinny"], "no such file"),
        (["emo", "OUT", "--seeds", "0"], "--seeds 0: must be at least 1"),
        (["emo", "OUT", "--jobs", "0"], "--jobs 0: must be at least 1"),
        (["emo", "OUT", "--data", "nowhere"], "no such folder"),
        (["emo", "OUT", "--data", "empty"], "has 0 domains"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    assert run(["lab", "run", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not Path("OUT").exists()


def test_unknown_keys_of_a_scale_are_refused(tmp_path):
    file = tmp_path / "scale.yaml"
    file.write_text(CI.read_text().replace("top_k:", "topk:", 1))
    with pytest.raises(MoesaicError, match="top_k"):
        load_scale(file)


def test_a_dry_run_writes_nothing(tmp_path):
    result = run_experiment("life", tmp_path / "out", scale=CI, seeds=1, dry_run=True)
    assert result.lines[0].endswith("measure-0, report")
    assert not (tmp_path / "out").exists()


def test_report_needs_an_experiment(tmp_path, capsys):
    assert run(["lab", "report", str(tmp_path)]) == 2
    assert "holds no experiment" in capsys.readouterr().err
    assert run(["lab", "report"]) == 2
