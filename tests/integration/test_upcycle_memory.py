"""Peak memory is a few blocks beyond the interpreter: it grows neither with layers nor with experts."""

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.tiny_models import save_tiny

PROGRAM = """
import json, resource, sys
from moesaic.upcycling.recipe import Specialist, UpcycleRecipe
from moesaic.upcycling.run import upcycle

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

before = peak()
base, out, method, experts = sys.argv[1:]
specialists = tuple(Specialist(name=f"s{i}", path=base) for i in range(int(experts))) if method == "divmoe" else ()
recipe = UpcycleRecipe(
    base=base, method=method, specialists=specialists, experts=None if specialists else int(experts), shard_size="20MB"
)
result = upcycle(recipe, out, quiet=True, workers=2)
print(json.dumps({"before": before, "after": peak(), "written": result.plan.files.nbytes / 2**20}))
"""


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """FFNs of 3 MB per layer; the second base has six times the layers."""
    root = tmp_path_factory.mktemp("bases")
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 1024, "head_dim": 64}
    return {layers: save_tiny(root / str(layers), "llama", num_layers=layers, **sizes) for layers in (2, 12)}


def measure(*arguments: object) -> dict[str, float]:
    command = [sys.executable, "-c", PROGRAM, *map(str, arguments)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["virtual_group", "divmoe", "drop"])
def test_peak_memory_does_not_grow_with_layers(bases, tmp_path, method):
    few = measure(bases[2], tmp_path / "few", method, 4)
    many = measure(bases[12], tmp_path / "many", method, 4)
    assert many["written"] > few["written"] + 60
    assert many["after"] - few["after"] < 30
    assert many["after"] - many["before"] < 120
