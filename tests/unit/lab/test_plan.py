"""Plans: every recipe in them loads, steps come in order, and OUT takes no other experiment."""

import dataclasses
import json
from pathlib import Path
from typing import get_args

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from moesaic.cli.app import run
from moesaic.common.errors import MoesaicError
from moesaic.common.recipe import load_recipe
from moesaic.common.yaml_text import dump_yaml, parse_yaml
from moesaic.training.recipe import TrainRecipe
from moesaic.training.schedule import learning_rate
from moesaic_lab.experiments import EXPERIMENTS
from moesaic_lab.plan import Plan, Step, read_plan, write_plan
from moesaic_lab.report import find
from moesaic_lab.runs import dense_config
from moesaic_lab.scale import SCALES, EmoVariant, load_scale
from moesaic_lab.workflow import run_experiment

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


@pytest.mark.parametrize(("shares", "planned"), [(None, None), ((0.02, 0.05, 0.25), (0.11, 0.25))])
def test_matched_tokens_and_rates_before_and_after_an_expansion(shares, planned):
    """Both parts together have the steps of the fixed run, and its learning rates, however early the expansion."""
    scale = load_scale("tiny")
    shares = shares or scale.expand.shares
    expand = dataclasses.replace(scale.expand, shares=shares)
    plan = EXPERIMENTS["expand"].plan(dataclasses.replace(scale, expand=expand), None, 1)
    files = {name: text for step in plan.steps for name, text in step.files.items()}

    def rates(name: str) -> list[float]:
        recipe = load_recipe(TrainRecipe, parse_yaml(files[f"recipes/{name}.yaml"], name))
        steps = recipe.budget_steps
        assert steps is not None
        return [learning_rate(step, steps, recipe.optimizer) for step in range(steps)]

    whole = rates("fixed-16-0")
    assert len(whole) == scale.expand.train.steps
    for share in planned or shares:
        cut = rates(f"before-8-{share:g}-0") + rates(f"grown-8-{share:g}-exact-0")
        assert cut == pytest.approx(whole, rel=1e-12)
    found = {labels["share"] for step in plan.steps for labels in step.runs.values() if "share" in labels}
    assert found == set(planned or shares)
    said = [notice.partition(" of ")[0] for notice in plan.notices if notice != scale.undecided]
    assert said == (["shares: 0.02, 0.05"] if planned else [])


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_papers_scale_has_80_tokens_per_active_parameter(name):
    active, tokens = EXPERIMENTS[name].size(load_scale("papers"))
    assert tokens / active > 80
    small, seen = EXPERIMENTS[name].size(load_scale("small"))
    assert seen / small < 4


def test_active_parameters_are_those_of_the_dense_model(tmp_path):
    divmoe = load_scale("papers").divmoe
    config = LlamaConfig(**dense_config(divmoe.model, divmoe.intermediate_size))
    norms = (2 * divmoe.model.layers + 1) * divmoe.model.hidden_size
    parameters = sum(parameter.numel() for parameter in LlamaForCausalLM(config).parameters())
    assert divmoe.model.active_parameters(divmoe.intermediate_size) == parameters - norms


def test_every_scale_lists_its_tokens_per_parameter_and_minutes(capsys):
    assert run(["lab", "list", "--json"]) == 0
    scales = json.loads(capsys.readouterr().out)["scales"]
    assert list(scales) == list(SCALES)
    for name, scale in scales.items():
        assert list(scale["experiments"]) == list(EXPERIMENTS)
        assert bool(scale["undecided"]) == (name != "papers")
    minutes = sum(one["minutes"] for one in scales["papers"]["experiments"].values())
    assert minutes < 2 * 10 * 60, "ten hours of two cores"


@pytest.mark.parametrize("scale", ["papers", CI])
@pytest.mark.parametrize("name", ["emo", "life"])
def test_the_load_is_balanced_over_the_whole_batch(name, scale):
    """One micro-step a batch, but for the variant that balances locally on purpose."""
    for step in EXPERIMENTS[name].plan(load_scale(scale), None, 1).steps:
        for file, text in step.files.items():
            recipe = parse_yaml(text, file)
            if "batch" in recipe and recipe["losses"]["balance"]:
                local = recipe["losses"]["balance"]["scope"] == "local"
                assert (load_recipe(TrainRecipe, recipe, name=file).micro_steps == 1) != local


def test_an_expansion_right_after_a_warmup_of_whole_percents(tmp_path):
    scale = load_scale("tiny")
    train = dataclasses.replace(scale.expand.train, tokens=100 * 2048, warmup_steps=10)
    expand = dataclasses.replace(scale.expand, train=train, shares=(0.01, 0.1))
    plan = EXPERIMENTS["expand"].plan(dataclasses.replace(scale, expand=expand), None, 1)
    text = next(step.files["recipes/before-8-0.1-0.yaml"] for step in plan.steps if step.name == "before-8-0.1-0")
    recipe = load_recipe(TrainRecipe, parse_yaml(text, "before"))
    assert (recipe.budget_steps, recipe.optimizer.warmup_steps) == (10, 10)
    assert recipe.optimizer.min_lr == recipe.optimizer.lr


def _with_domains(folder: Path, number: int) -> str:
    for domain in "abcdef"[:number]:
        for part in ("train", "valid"):
            (folder / f"{domain}.{part}.jsonl").touch()
    return str(folder)


@pytest.mark.parametrize(
    ("domains", "left_out"),
    [
        (2, {"divmoe_m4"}),
        (4, set()),
        (6, {"divmoe_m4"}),
        (
            3,
            {
                "divmoe",
                "divmoe_topk",
                "divmoe_paper_scale",
                "divmoe_base_weights",
                "divmoe_random_weights",
                "divmoe_m4",
            },
        ),
    ],
)
def test_methods_without_a_latin_square_of_the_domains_are_left_out_and_named(tmp_path, domains, left_out):
    scale = load_scale(CI)
    plan = EXPERIMENTS["divmoe"].plan(scale, _with_domains(tmp_path, domains), 1)
    models = {labels["model"] for step in plan.steps for labels in step.runs.values() if labels["stage"] == "joint"}
    assert models == {"dense", *scale.divmoe.methods} - left_out
    named = plan.notices[0].partition(": ")[2].partition(" left out")[0].split(", ") if plan.notices else []
    assert set(named) == left_out
    write_plan(plan, tmp_path / "out")
    assert read_plan(tmp_path / "out").notices == plan.notices


def test_what_a_plan_leaves_out_is_said_by_lab_run_and_in_the_report(tmp_path, capsys):
    (tmp_path / "data").mkdir()
    data = Path(_with_domains(tmp_path / "data", 3))
    run_experiment("life", tmp_path / "out", data=data, scale=CI, seeds=1, dry_run=True)
    said = "an odd number of domains has no Latin square: the DivMoE starts with a random router"
    assert f"lab run life: {said}" in capsys.readouterr().err
    write_plan(EXPERIMENTS["life"].plan(load_scale(CI), str(data), 1), tmp_path / "out")
    find(tmp_path / "out")
    assert f"\n{said}.\n" in (tmp_path / "out" / "report.md").read_text()


def _plan(*steps: Step, experiment: str = "emo") -> Plan:
    return Plan(experiment=experiment, data=None, domains=("a",), seeds=1, scale={}, steps=steps)


def test_more_seeds_go_into_the_same_folder(tmp_path):
    scale = load_scale(CI)
    for seeds in (1, 2):
        write_plan(EXPERIMENTS["expand"].plan(scale, None, seeds), tmp_path)
    with pytest.raises(MoesaicError, match="other settings"):
        write_plan(EXPERIMENTS["expand"].plan(scale, None, 1), tmp_path)


def test_variants_go_into_the_folder_of_the_run_without_them(tmp_path):
    small, variants = load_scale("small"), get_args(EmoVariant)
    scale = dataclasses.replace(small, emo=dataclasses.replace(small.emo, variants=variants))
    for each in (small, scale):
        write_plan(EXPERIMENTS["emo"].plan(each, None, 1), tmp_path)
    assert {f"{variant}-0" for variant in variants} <= {step.name for step in read_plan(tmp_path).steps}
    with pytest.raises(MoesaicError, match="other settings"):
        write_plan(EXPERIMENTS["emo"].plan(small, None, 1), tmp_path)


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


class _Killed(BaseException):
    pass


@pytest.mark.parametrize("written", range(4))
def test_a_plan_whose_writing_was_stopped_is_written_again(tmp_path, monkeypatch, written):
    files = {f"recipes/{name}.yaml": f"{name}: 1" for name in "abc"}
    plan = _plan(Step(name="a", commands=(("recipes", "list"),), files=files))
    write_text, calls = Path.write_text, []

    def stopped(path: Path, text: str, **options: str) -> int:
        calls.append(path)
        if len(calls) > written:
            raise _Killed
        return write_text(path, text, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", stopped)
        with pytest.raises(_Killed):
            write_plan(plan, tmp_path / "out")
    with pytest.raises(MoesaicError, match="holds the experiment emo"):
        write_plan(_plan(experiment="life"), tmp_path / "out")
    write_plan(plan, tmp_path / "out")
    assert read_plan(tmp_path / "out") == plan
    assert {name: (tmp_path / "out" / name).read_text() for name in files} == files
    assert (tmp_path / "out" / "commands.sh").exists()


def test_what_a_kill_leaves_of_a_plan_is_taken_away_and_nothing_else(tmp_path):
    half = tmp_path / ".plan.json.moesaic-123-tmp"
    half.write_text("{")
    mine = tmp_path / "mine.txt"
    mine.touch()
    with pytest.raises(MoesaicError, match="holds no experiment"):
        write_plan(_plan(), tmp_path)
    assert half.exists()
    mine.unlink()
    write_plan(_plan(), tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"plan.json", "steps", "commands.sh"}


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


@pytest.mark.parametrize(
    ("part", "values", "message"),
    [
        ("data", {"documents": 0}, "documents: must be at least 1, got 0"),
        ("data", {"tasks": 0}, "tasks: must be at least 1, got 0"),
        ("data", {"held_out_size": 0}, "held_out_size: must be at least 1, got 0"),
        ("emo.model", {"heads": 3}, "heads: must divide half of hidden_size (16), got 3"),
        ("emo.model", {"heads": 16}, "heads: must divide half of hidden_size (16), got 16"),
        ("emo.model", {"layers": 0}, "layers: must be at least 1, got 0"),
        ("emo.model", {"vocabulary": 257}, "vocabulary: must be at least 258, the bytes and two more, got 257"),
        ("emo.model", {"sequence_length": 1}, "sequence_length: must be at least 2, got 1"),
        ("emo.train", {"tokens": 0}, "tokens: must be at least 1, got 0"),
        ("emo.train", {"lr": 0.0}, "lr: must be greater than 0, got 0.0"),
        ("emo.train", {"warmup_steps": -1}, "warmup_steps: must be at least 0, got -1"),
        ("emo", {"shares": [2.0]}, "shares: must be greater than 0 and less than 1, got 2"),
        ("emo", {"shares": [1.0]}, "shares: must be greater than 0 and less than 1, got 1"),
        ("emo", {"shares": []}, "shares: is empty; give at least one, such as [0.25]"),
        ("emo", {"shares": [0.5, 0.5]}, "shares: must have each value once, got [0.5, 0.5]"),
        (
            "emo",
            {"top_k": 2, "shares": [0.001], "variants": []},
            "shares: must leave the 2 experts that a token uses; 0.001 of 8 is 1",
        ),
        (
            "emo",
            {"variants": ["no_shared_expert"], "shares": [0.125]},
            "shares: must leave the 2 experts that a token uses; 0.125 of 8 is 1",
        ),
        ("emo", {"tune_shares": [0.3]}, "tune_shares: must be 1 or one of shares [0.5, 0.25], got 0.3"),
        ("emo", {"tune_shares": [1.5]}, "tune_shares: must be greater than 0 and at most 1, got 1.5"),
        ("emo", {"documents": [0]}, "documents: must be one or more numbers of at least 1, got [0]"),
        ("emo", {"documents": []}, "documents: must be one or more numbers of at least 1, got []"),
        ("emo", {"methods": ["random"]}, "methods: must hold router: parts are fine-tuned and compared as it"),
        ("emo", {"clusters": 1}, "clusters: must be at least 2, got 1"),
        ("emo", {"clusters": 1001}, "clusters: must be at most 1000, got 1001"),
        ("emo", {"experts": 1}, "experts: must be more than top_k (1), got 1"),
        ("emo", {"expert_size": 0}, "expert_size: must be at least 1, got 0"),
        ("expand", {"shares": [1.5]}, "shares: must be greater than 0 and less than 1, got 1.5"),
        ("expand", {"shares": [1.0]}, "shares: must be greater than 0 and less than 1, got 1"),
        ("expand", {"treatments": []}, "treatments: is empty; give at least one, such as [uniform]"),
        ("expand", {"other_experts": [4]}, "other_experts: must not hold experts (4), which belongs to them already"),
        ("expand", {"other_experts": [0]}, "other_experts: must be at least top_k (1), got 0"),
        ("expand", {"moe_layers": "1"}, "moe_layers: cannot be 1: the base has no layer 1; its 1 layers are 0 to 0"),
        ("expand", {"utility_batches": 0}, "utility_batches: must be at least 1, got 0"),
        ("expand", {"train": {"tokens": 512, "lr": 1, "batch_tokens": 512}}, "train: must have more tokens than one"),
        ("divmoe", {"intermediate_size": 30}, "intermediate_size: must be a multiple of 4, got 30"),
        ("divmoe", {"methods": ["btx", "btx"]}, "methods: must have each value once, got ['btx', 'btx']"),
        ("life", {"keep": 2.0}, "keep: must be greater than 0 and at most 1, got 2"),
        ("life", {"keep": 0}, "keep: must be greater than 0 and at most 1, got 0"),
    ],
)
def test_sizes_that_cannot_work_are_one_line_at_once(tmp_path, capsys, part, values, message):
    scale = inner = parse_yaml(CI.read_text(), "ci")
    for name in part.split("."):
        inner = inner[name]
    inner |= values
    file = tmp_path / "scale.yaml"
    file.write_text(dump_yaml(scale))
    assert run(["lab", "run", "emo", str(tmp_path / "out"), "--scale", str(file), "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert f"{file}: {part}.{message}" in error
    assert error.count("\n") == 1


def test_the_part_of_a_life_has_the_experts_that_its_tokens_use(tmp_path):
    data = _with_domains(tmp_path, 2)
    scale = load_scale(CI)
    for keep, fits in ((0.25, True), (0.125, False)):
        chosen = dataclasses.replace(scale, life=dataclasses.replace(scale.life, keep=keep))
        if fits:
            EXPERIMENTS["life"].plan(chosen, data, 1)
        else:
            with pytest.raises(MoesaicError, match=r"life.keep: 0.125 of 8 experts is 1, but tokens use 2"):
                EXPERIMENTS["life"].plan(chosen, data, 1)


def test_a_dry_run_writes_nothing(tmp_path):
    result = run_experiment("life", tmp_path / "out", scale=CI, seeds=1, dry_run=True)
    assert result.lines[0].endswith("measure-0, report")
    assert not (tmp_path / "out").exists()


def test_report_needs_an_experiment(tmp_path, capsys):
    assert run(["lab", "report", str(tmp_path)]) == 2
    assert "holds no experiment" in capsys.readouterr().err
    assert run(["lab", "report"]) == 2


def test_a_page_does_not_take_the_place_of_another_file(tmp_path, capsys):
    data = tmp_path / "data.jsonl"
    data.write_text("{}\n")
    assert run(["lab", "report", str(tmp_path), "--html", str(data)]) == 2
    assert "data.jsonl: exists and is no moesaic lab file" in capsys.readouterr().err
    assert data.read_text() == "{}\n"
