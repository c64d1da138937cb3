"""Two gloo processes against one on the same global micro-batches: losses and gradients."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
WORLD = 2


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    folder = tmp_path_factory.mktemp("ranks")
    path = os.pathsep.join((str(ROOT / "src"), str(ROOT)))  # the code of this checkout, wherever another is installed
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "tests.unit.routing.distributed_worker"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(WORLD), str(folder)],
            cwd=ROOT,
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD)
    ]
    try:
        messages = [rank.communicate()[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * WORLD, "\n".join(messages)
    found = [json.loads((folder / f"errors-{rank}.json").read_text()) for rank in range(WORLD)]
    return {name: max(each[name] for each in found) for name in found[0]}


@pytest.mark.parametrize("rule", ["topk", "one_per_group", "document_pool"])
@pytest.mark.parametrize("scope", ["global", "batch"])
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-6), ("float64", 1e-12)])
def test_ranks_add_up_to_one_process(errors, rule, scope, dtype, bound):
    assert errors[f"{scope}-{rule}-{dtype}"] < bound


def test_local_scope_is_the_mean_over_ranks(errors):
    assert errors["local"] < 1e-12
    assert errors["local-differs"] > 1e-3  # and so depends on the cut, unlike the others


def test_a_sharded_model_has_the_pools_losses_and_gradients_of_one_process(errors):
    assert errors["sharded"] < 1e-5
