"""kill -9 during and right after an expansion in mid-training, resumed: the uninterrupted run's result, bit for bit."""

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_train_resume import content, log_without_timing, state_tensors
from tests.tiny_training import tiny_recipe

STEPS = 5
KILLS = (
    ("utilities", 1),  # before anything of the first expansion is written
    ("weights", 1),  # the model is written, its expansion is not
    ("weights", 2),  # the model is expanded, the first moments are not
    ("model", 1),  # all is written, nothing of it is in memory
    ("state", 2),  # of the state right after, the weights are written and the moments are not
    ("cleared", 1),  # the state right after is there, its files are still there
    ("step", 1),  # right after, in the first step
    ("logged", 1),  # the line of the second expansion is written, its state is not
    ("step", 1),  # right after the second
)


def run(recipe: dict[str, Any], out: Path, kill: tuple[str, int] | None) -> None:
    """Train; die without warning at the n-th call of what `kill` names."""
    import torch

    from moesaic.common.recipe import load_recipe
    from moesaic.training import growth, state
    from moesaic.training import run as module
    from moesaic.training.recipe import TrainRecipe

    torch.set_num_threads(1)
    calls: dict[str, int] = {}

    def dying(name, function):
        def call(*args, **kwargs):
            calls[name] = calls.get(name, 0) + 1
            if (name, calls[name]) == kill:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    growth.find_utilities = dying("utilities", growth.find_utilities)
    growth.write = dying("weights", growth.write)
    growth.build_trainable = dying("model", growth.build_trainable)
    growth._say = dying("logged", growth._say)
    state.save = dying("state", state.save)
    module.run_step = dying("step", module.run_step)
    module.clear_expansion = dying("cleared", module.clear_expansion)
    module.train(load_recipe(TrainRecipe, recipe), out, resume=True, quiet=True)


def in_process(recipe: dict[str, Any], out: Path, kill: tuple[str, int] | None) -> int | None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["moesaic.training.run", "torch.utils.tensorboard"])
    process = context.Process(target=run, args=(recipe, out, kill))
    process.start()
    process.join()
    return process.exitcode


@pytest.mark.slow
def test_killed_in_expansions_and_resumed(tmp_path, monkeypatch):
    recipe = tiny_recipe(
        tmp_path / "in",
        losses={"balance": {"coefficient": 0.1}, "bias_balancing": 0.01},
        budget={"steps": STEPS},
        checkpoint={"keep": 3},
        precision="bf16",
        expand=[
            {"step": 2, "experts": 12, "optimizer": "scale", "utility_batches": 2},
            {"step": 4, "experts": 18, "utility": "approx_fisher", "allocation": "sample"},
        ],
    )
    monkeypatch.setenv("MOESAIC_CACHE", str(tmp_path / "cache"))
    assert in_process(recipe, tmp_path / "whole", None) == 0
    killed = tmp_path / "killed"
    for kill in KILLS:
        assert in_process(recipe, killed, kill) == -signal.SIGKILL, kill
    assert in_process(recipe, killed, None) == 0

    log = log_without_timing(killed)
    assert [line["step"] for line in log if line["kind"] == "step"] == list(range(1, STEPS + 1))
    assert [line["experts"] for line in log if line["kind"] == "expansion"] == [12, 18]
    assert log == log_without_timing(tmp_path / "whole")
    assert content(killed) == content(tmp_path / "whole")
    assert state_tensors(killed) == state_tensors(tmp_path / "whole")
    assert not list(killed.rglob("*.tmp"))
