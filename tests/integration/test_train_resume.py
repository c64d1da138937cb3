"""kill -9 at random moments, resumed until the run is through: the uninterrupted run's result, bit for bit."""

import json
import multiprocessing
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.tiny_training import tiny_recipe

KILLS = 10
STEPS = 24


def run(recipe: dict[str, Any], out: Path, kill_after: int | None) -> None:
    """Train; die without warning at the `kill_after`-th of the moments that could tear something."""
    import torch

    from moesaic.common.recipe import load_recipe
    from moesaic.training import metrics, session, state
    from moesaic.training import run as module
    from moesaic.training.recipe import TrainRecipe

    torch.set_num_threads(1)
    moments = 0

    def dying(function):
        def call(*args, **kwargs):
            nonlocal moments
            moments += 1
            if moments == kill_after:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    metrics.MetricsLog.write = dying(metrics.MetricsLog.write)  # before every line
    state.save = dying(state.save)  # between the metrics and the tensors, and between weights and moments
    state.sync_path = dying(state.sync_path)  # after run.json, before and after the rename
    session.prune_states = dying(session.prune_states)
    module.train(load_recipe(TrainRecipe, recipe), out, resume=True, quiet=True)


def in_process(recipe: dict[str, Any], out: Path, kill_after: int | None) -> int | None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["moesaic.training.run", "torch.utils.tensorboard"])
    process = context.Process(target=run, args=(recipe, out, kill_after))
    process.start()
    process.join()
    return process.exitcode


def log_without_timing(out: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "timing"} for line in lines]


def content(out: Path) -> dict[str, bytes]:
    """All files of the result."""
    return {path.name: path.read_bytes() for path in out.iterdir() if path.is_file() and path.name != "metrics.jsonl"}


def state_tensors(out: Path) -> dict[str, dict[str, bytes]]:
    """All tensors of all states (safetensors orders the keys of its header's metadata anew in every process)."""
    return {
        str(file.relative_to(out)): {name: tensor.numpy().tobytes() for name, tensor in load_file(file).items()}
        for file in (out / "state").rglob("*.safetensors")
    }


@pytest.mark.slow
def test_killed_and_resumed_runs_end_with_the_same_bits(tmp_path, monkeypatch):
    recipe = tiny_recipe(
        tmp_path / "in",
        routing={"rule": "document_pool", "pool_size": [2, 6]},
        losses={"balance": {"coefficient": 0.1, "scope": "batch"}, "router_z": 0.001, "bias_balancing": 0.01},
        budget={"steps": STEPS},
        checkpoint={"every_steps": 3, "keep": 2},
        validation={"every_steps": 4},
        precision="bf16",
        activation_checkpointing=True,
    )
    monkeypatch.setenv("MOESAIC_CACHE", str(tmp_path / "cache"))
    assert in_process(recipe, tmp_path / "whole", None) == 0
    draw = random.Random(0)
    killed = tmp_path / "killed"
    for _ in range(KILLS):
        assert in_process(recipe, killed, draw.randint(1, 24)) in (-signal.SIGKILL, 0)
    assert in_process(recipe, killed, None) == 0

    log = log_without_timing(killed)
    assert [line["step"] for line in log if line["kind"] == "step"] == list(range(1, STEPS + 1))
    assert log == log_without_timing(tmp_path / "whole")
    assert content(killed) == content(tmp_path / "whole")
    assert state_tensors(killed) == state_tensors(tmp_path / "whole")
    assert not list(killed.rglob("*.tmp"))
