"""Experiment trackers of `train`: TensorBoard's own files, and a stand-in for a package that is not installed here."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from moesaic.common.errors import MoesaicError
from moesaic.training.run import train
from tests.tiny_training import tiny_recipe

WANDB = """
import json, os

class Run:
    def log(self, values, step):
        with open(os.environ["FAKE_WANDB"], "a") as file:
            file.write(json.dumps([step, values]) + "\\n")

    def finish(self):
        with open(os.environ["FAKE_WANDB"], "a") as file:
            file.write(json.dumps(["finish"]) + "\\n")

def init(**given):
    if "FAKE_WANDB" not in os.environ:
        raise RuntimeError("no login")
    with open(os.environ["FAKE_WANDB"], "a") as file:
        file.write(json.dumps(given) + "\\n")
    return Run()
"""


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("MOESAIC_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def recipe(folder: Path, **changes: Any) -> dict[str, Any]:
    return tiny_recipe(folder, budget={"steps": 2}, **changes)


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def board(out: Path) -> EventAccumulator:
    return EventAccumulator(str(out / "state" / "tensorboard")).Reload()


def test_tensorboard_has_the_numbers_of_the_metrics(tmp_path):
    train(recipe(tmp_path / "in", trackers=["tensorboard"]), tmp_path / "out")
    found = board(tmp_path / "out")
    losses = [line["loss"] for line in lines(tmp_path / "out") if line["kind"] == "step"]
    assert [(event.step, event.value) for event in found.Scalars("loss")] == [
        (step, pytest.approx(loss, rel=1e-6)) for step, loss in enumerate(losses, 1)
    ]
    assert {"validation/math/loss", "domain_loss/code", "timing/seconds"} <= set(found.Tags()["scalars"])


def test_tensorboard_is_the_default_and_an_empty_list_is_none(tmp_path):
    train(recipe(tmp_path / "in"), tmp_path / "out")
    assert "loss" in board(tmp_path / "out").Tags()["scalars"]
    train(recipe(tmp_path / "in", trackers=[]), tmp_path / "without")
    assert not (tmp_path / "without" / "state" / "tensorboard").exists()


def test_another_tracker_gets_the_numbers_by_step_and_is_finished(tmp_path, monkeypatch):
    (tmp_path / "wandb.py").write_text(WANDB)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("FAKE_WANDB", str(tmp_path / "said"))
    train(recipe(tmp_path / "in", trackers=["wandb"]), tmp_path / "out")
    first, *said, last = map(json.loads, (tmp_path / "said").read_text().splitlines())
    assert first == {"project": "moesaic", "name": "out", "dir": str(tmp_path / "out" / "state")}
    assert last == ["finish"]
    assert [step for step, _ in said] == [line["step"] for line in lines(tmp_path / "out")] == [0, 1, 2, 2]
    assert said[1][1]["loss"] == lines(tmp_path / "out")[1]["loss"]
    sys.modules.pop("wandb")


def test_a_tracker_that_does_not_start_is_one_line_and_leaves_nothing(tmp_path, monkeypatch):
    (tmp_path / "wandb.py").write_text(WANDB)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MoesaicError, match=r"^trackers: wandb does not start: RuntimeError: no login$"):
        train(recipe(tmp_path / "in", trackers=["wandb"]), tmp_path / "out")
    sys.modules.pop("wandb")


def test_a_tracker_that_is_not_installed_is_refused_before_training(tmp_path):
    expected = r"^trackers: mlflow needs mlflow, which is not installed; pip install mlflow$"
    with pytest.raises(MoesaicError, match=expected):
        train(recipe(tmp_path / "in", trackers=["mlflow"]), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(MoesaicError, match="trackers"):
        train(recipe(tmp_path / "in", trackers=["tensorbord"]), tmp_path / "out")
