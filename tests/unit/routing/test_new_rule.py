"""A new rule is one file and one line: done here in a copy of the package."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import moesaic

RULE = '''
"""The K experts with the lowest scores."""

from torch import Tensor

from moesaic.modeling.modeling_moesaic import route_topk
from moesaic.routing.rules import Rule


class Lowest(Rule):
    """The opposite of top-k."""

    def choose(self, scores_TE: Tensor) -> tuple[Tensor, Tensor]:
        """The K worst."""
        return route_topk(-scores_TE, self.settings.top_k, self.settings.weighting)
'''
LINE = '    "lowest": "moesaic.routing.lowest:Lowest",\n'
USE = """
import moesaic
from moesaic.common.errors import MoesaicError
from moesaic.common.recipe import load_recipe
from moesaic.routing.config import RuleConfig
from moesaic.routing.install import find_routers, install
from tests.unit.routing.routed_models import native_model
import torch

model = native_model("olmoe")
install(model, load_recipe(RuleConfig, {"rule": "lowest"}), selection_bias=True)
hidden = torch.randn(40, 32)
logits, _, ids = find_routers(model)[0][0](hidden)
assert torch.equal(ids.sort().values, (-logits).topk(ids.shape[1]).indices.sort().values)
try:
    load_recipe(RuleConfig, {"rule": "lowst"})
except MoesaicError as error:
    print(moesaic.__file__, error)
"""


def test_a_class_and_a_line_make_a_rule(tmp_path):
    shutil.copytree(Path(moesaic.__file__).parent, tmp_path / "moesaic", ignore=shutil.ignore_patterns("__pycache__"))
    routing = tmp_path / "moesaic" / "routing"
    (routing / "lowest.py").write_text(RULE)
    table = (routing / "config.py").read_text()
    assert table.count("RULES = {\n") == 1
    (routing / "config.py").write_text(table.replace("RULES = {\n", "RULES = {\n" + LINE))
    root = Path(__file__).parents[3]
    path = os.pathsep.join((str(tmp_path), str(root)))
    found = subprocess.run(
        [sys.executable, "-c", USE], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith(str(tmp_path))
    assert "lowest" in found.stdout
