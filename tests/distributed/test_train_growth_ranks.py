"""Two processes grow a sharded model as one process grows it whole, and their run goes on anywhere."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from moesaic.common.recipe import load_recipe
from moesaic.training.recipe import TrainRecipe
from moesaic.training.run import train
from tests.distributed.ranks import run_ranks
from tests.tiny_training import tiny_recipe

EXPAND = [
    {"step": 3, "experts": 12, "optimizer": "scale"},
    {"step": 5, "experts": 20, "utility": "approx_fisher", "optimizer": "copy", "delta": 0.01},
]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("MOESAIC_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def run(values: dict[str, Any], out: Path) -> None:
    train(load_recipe(TrainRecipe, values), out, resume=True, quiet=True)


def lines(out: Path, kind: str) -> list[dict[str, Any]]:
    read = (json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines())
    return [line for line in read if line["kind"] == kind]


def losses(out: Path) -> torch.Tensor:
    names = ("loss", "balance_loss", "grad_norm")
    return torch.tensor([[line[name] for name in names] for line in lines(out, "step")], dtype=torch.float64)


@pytest.mark.slow
def test_two_processes_grow_what_one_grows(tmp_path):
    values = tiny_recipe(
        tmp_path / "in",
        losses={"balance": {"coefficient": 0.1}, "bias_balancing": 0.001},
        optimizer={"lr": 1e-3},
        batch={"tokens": 128, "micro_sequences": 4},
        budget={"steps": 7},
        checkpoint={"keep": 10},
        expand=EXPAND,
    )
    run(values, tmp_path / "one")
    sharded = values | {"parallel": {"fsdp": 2}, "batch": {"tokens": 128, "micro_sequences": 2}}
    two = tmp_path / "two"
    run_ranks(2, run, sharded, two)
    expansions = lines(tmp_path / "one", "expansion")
    assert [line["copies"] for line in lines(two, "expansion")] == [line["copies"] for line in expansions]
    assert [line["zero_token_experts"] for line in lines(two, "expansion")] == [
        line["zero_token_experts"] for line in expansions
    ]
    torch.testing.assert_close(losses(two), losses(tmp_path / "one"), rtol=0, atol=1e-5)

    for name in ("step-00000007", "step-00000005-expanded"):  # as if it had been killed in the second
        (two / "state" / name / "run.json").unlink()
    (two / "config.json").unlink()
    run_ranks(2, run, sharded | {"parallel": {"fsdp": 2, "expert": 2}}, two)
    assert [line["copies"] for line in lines(two, "expansion")] == [line["copies"] for line in expansions]
    torch.testing.assert_close(losses(two), losses(tmp_path / "one"), rtol=0, atol=1e-5)
