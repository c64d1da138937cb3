"""What `plan` says of memory and traffic, against what two ranks hold and send."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from moesaic.common.recipe import load_recipe
from moesaic.families.counting import config_shapes
from moesaic.training import run as run_module
from moesaic.training.planning import memory_per_device, traffic_per_step
from moesaic.training.recipe import ScratchModel, TrainRecipe, scratch_config
from moesaic.training.start import Trainable
from tests.distributed.ranks import run_ranks
from tests.tiny_training import tiny_recipe

LAYOUTS = {
    "fsdp": {"fsdp": 2},
    "fsdp and experts": {"fsdp": 2, "expert": 2},
    "replicas": {"fsdp": 1, "replicate": 2},
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MOESAIC_CACHE", str(tmp_path / "cache"))


class Counter(TorchDispatchMode):
    """Bytes that this rank sends in every collective, by what it is for. Two ranks: half of a tensor is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = dict.fromkeys(("gather", "reduce", "replicas", "experts"), 0)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().split("::")[-1]
        if name == "_allgather_base_":
            self.sent["gather"] += self._bytes(args[0]) // 2
        elif name == "_reduce_scatter_base_":
            self.sent["reduce"] += self._bytes(args[1]) // 2
        elif name == "allreduce_" and args[0][0].dtype == torch.float32 and args[0][0].numel() > 256:
            self.sent["replicas"] += self._bytes(args[0][0])  # gradients, not sums and counts
        elif name == "all_to_all_single":
            self.sent["experts"] += self._bytes(args[0])
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _bytes(tensor: torch.Tensor) -> int:
        return tensor.numel() * tensor.element_size()


def measure(values: dict[str, Any], out: Path, reports: Path) -> None:
    """Train two steps; write for each rank what the second one sent, and the bytes of its state."""
    step = run_module.run_step

    def counting(trainable, *args, **kwargs):
        with Counter() as counter:
            result = step(trainable, *args, **kwargs)
        report = {"state": held(trainable), **counter.sent}
        (reports / f"rank{trainable.world.rank}.json").write_text(json.dumps(report))
        return result

    run_module.run_step = counting
    run_module.train(load_recipe(TrainRecipe, values), out, quiet=True)


def held(trainable: Trainable) -> int:
    """Weights, gradients (as large as these) and moments of this rank."""
    tensors = []
    for parameter in trainable.masters.parameters.values():
        moments = trainable.optimizer.state[parameter]
        tensors += [parameter, parameter, moments["exp_avg"], moments["exp_avg_sq"]]
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum(tensor.numel() * tensor.element_size() for tensor in local)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_plan_against_two_ranks(layout, tmp_path):
    values = tiny_recipe(
        tmp_path / "in",
        parallel=LAYOUTS[layout],
        batch={"tokens": 256, "micro_sequences": 2},
        budget={"steps": 2},
    )
    recipe = load_recipe(TrainRecipe, values)
    assert isinstance(recipe.model, ScratchModel)
    config = scratch_config(recipe.model)
    shapes = config_shapes(config)
    run_ranks(2, measure, values, tmp_path / "out", tmp_path)
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    mean = {name: sum(rank[name] for rank in ranks) / 2 for name in ranks[0]}
    planned = traffic_per_step(recipe, shapes, config)

    assert recipe.micro_steps == 2
    assert memory_per_device(recipe, shapes, config).state == pytest.approx(mean["state"], rel=0.01)
    for name in ("gather", "reduce", "replicas"):
        assert getattr(planned, name) == pytest.approx(mean[name], rel=0.05), name
    assert planned.experts == mean["experts"] / 2  # half of all tokens stay on their rank where experts are balanced
