"""A new method is one file and its line in the registry, in a copy of the package."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import moesaic

METHOD = '''
"""Every expert is the mean of all specialists."""

from moesaic.upcycling.method import DenseLayer, Method


def experts(layer: DenseLayer) -> list:
    """Expert e is the mean of the specialists' FFNs, made when it is written."""
    whole = layer.specialists[0]

    def averaged():
        read = [one.read() for one in layer.specialists]
        return read[0].map(lambda name, _: sum(getattr(one, name) for one in read) / len(read))

    return [whole.made(averaged, layer.specialists) for _ in range(layer.experts)]


AVERAGE = Method(
    name="average", description="the mean of all specialists", paper="none", needs_specialists=True, cuts=False,
    default_shards=1, whole_groups=True, default_routing="topk",
    auto_router={"topk": "random", "one_per_group": "random"}, scaled=True, reinit=False, preserves=False,
    experts=experts,
)
'''

USE = """
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

import pytest

import moesaic
from moesaic.cli import app
from tests.tiny_models import save_tiny

assert app.run(["upcycle", "--help"]) == 0
folder = Path(sys.argv[1])
names = [str(save_tiny(folder / str(seed), "llama", seed=seed)) for seed in range(3)]
specialists = {"a": names[1], "b": names[2]}
moesaic.upcycle(names[0], folder / "moe", method="average", specialists=specialists)
made = load_file(folder / "moe/model.safetensors")["model.layers.1.mlp.experts.down_proj"]
stored = [load_file(Path(name) / "model.safetensors")["model.layers.1.mlp.down_proj.weight"] for name in names]
assert torch.equal(made, torch.stack([(stored[1] + stored[2]) / 2] * 2))
"""


@pytest.mark.slow
def test_one_file_and_one_line_make_a_method(tmp_path):
    package = Path(moesaic.__file__).parent
    shutil.copytree(package, tmp_path / "src/moesaic", ignore=shutil.ignore_patterns("__pycache__"))
    methods = tmp_path / "src/moesaic/upcycling/methods"
    (methods / "average.py").write_text(METHOD.lstrip())
    registry = (methods / "__init__.py").read_text()
    registry = registry.replace(
        "import Method\n", "import Method\nfrom moesaic.upcycling.methods.average import AVERAGE\n"
    )
    (methods / "__init__.py").write_text(
        registry.replace('    "btx": BTX,\n', '    "btx": BTX,\n    "average": AVERAGE,\n')
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path / 'src'}{os.pathsep}{Path(__file__).parents[3]}"}
    done = subprocess.run(
        [sys.executable, "-c", USE, str(tmp_path)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "average" in done.stdout
