"""Learning curves from metrics.jsonl."""

import json
import math

import pytest

from moesaic.common.errors import MoesaicError
from moesaic.reporting import payload as runs
from moesaic.reporting.payload import read_run
from tests.tiny_report import write_run


def test_curves_are_the_numbers_of_the_log(tmp_path):
    run = read_run(write_run(tmp_path / "run"), "run")
    assert (run["steps"], run["tokens"], run["seconds"], run["mean_over"]) == (40, 4000, 20.0, 1)
    assert run["at"]["steps"] == list(range(1, 41))
    assert run["curves"]["loss"] == pytest.approx([3 - 0.01 * step for step in range(1, 41)])
    assert run["curves"]["dead_experts"][:4] == [2, 1, 0, 0]
    assert run["domain_loss"].keys() == {"math", "code"}
    assert run["validation"]["steps"] == [0, 20, 40]
    assert list(run["validation"]["domains"]) == ["math", "code"]
    assert run["validation"]["domains"]["math"]["loss"] == pytest.approx([3.0, 2.8, 2.6])
    assert math.isnan(run["validation"]["domains"]["math"]["error"][0])


def test_long_runs_are_means_over_neighbours(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "_POINTS", 6)
    run = read_run(write_run(tmp_path / "run", steps=40), "run")
    assert run["mean_over"] == 7
    assert run["at"]["steps"] == [7, 14, 21, 28, 35, 40]
    assert run["at"]["tokens"] == [700, 1400, 2100, 2800, 3500, 4000]
    expected = [
        sum(range(start, min(start + 7, 41))) / len(range(start, min(start + 7, 41))) for start in range(1, 41, 7)
    ]
    assert run["curves"]["loss"] == pytest.approx([3 - 0.01 * mean for mean in expected])


def test_a_dense_run_has_no_curves_of_experts(tmp_path):
    run = read_run(write_run(tmp_path / "run", moe=False), "run")
    assert "load_entropy" not in run["curves"]
    assert "loss" in run["curves"]


def test_numbers_that_come_and_go_are_gaps(tmp_path):
    folder = write_run(tmp_path / "run", steps=3)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines[2]["domain_loss"] = {"math": 1.0, "late": 2.0}
    lines[3] |= {"lm_z_loss": 0.5}
    lines.append(lines[0] | {"step": 3, "validation": {"new": lines[0]["validation"]["math"]}})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = read_run(folder, "run")
    assert run["domain_loss"]["late"] == pytest.approx([math.nan, 2.0, math.nan], nan_ok=True)
    assert run["domain_loss"]["code"] == pytest.approx([2.99, math.nan, 2.97], nan_ok=True)
    assert run["curves"]["lm_z_loss"] == pytest.approx([math.nan, math.nan, 0.5], nan_ok=True)
    assert run["validation"]["domains"]["new"]["loss"] == pytest.approx([math.nan, 3.0], nan_ok=True)


def test_the_half_line_of_a_killed_run_is_left_out(tmp_path):
    folder = write_run(tmp_path / "run")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "step": 41, "tok')
    assert read_run(folder, "run")["steps"] == 40


def test_the_recipe_is_flat(tmp_path):
    recipe = read_run(write_run(tmp_path / "run"), "run")["recipe"]
    assert recipe == {"model.family": "llama", "model.moe.experts": "8", "routing": "none", "data.sources": "math"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has no step yet"),
        ('{"kind": "validation", "step": 0, "tokens": 0, "validation": {}}\n', "has no step yet"),
        ("not json\n", "metrics.jsonl:1: not JSON"),
        ("[1]\n", "metrics.jsonl:1: not a line of"),
        ('{"step": 1}\n', "metrics.jsonl:1: kind: this key is required"),
        ('{"kind": "step", "step": 1}\n', "metrics.jsonl:1: tokens: this key is required"),
        (
            '{"kind": "step", "step": 1, "tokens": 1, "domain_loss": 3, "timing": {"seconds": 1}}\n',
            "metrics.jsonl:1: loss: this key is required",
        ),
    ],
)
def test_a_log_of_something_else_is_refused(tmp_path, text, says):
    (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(MoesaicError, match=says) as caught:
        read_run(tmp_path, "run")
    assert "metrics.jsonl" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_recipe_that_is_not_yaml_is_refused(tmp_path):
    folder = write_run(tmp_path / "run")
    (folder / "recipe.yaml").write_text("a: [")
    with pytest.raises(MoesaicError, match="not valid YAML"):
        read_run(folder, "run")
