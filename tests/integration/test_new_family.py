"""A family of transformers that is unknown here becomes usable by one row, in a copy of the package."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import moesaic

ROW = """
    MoEFamily(
        model_type="dots1", about="dots.llm1", experts_key="n_routed_experts", scoring="sigmoid",
        weighting="norm_topk_prob", scaling_key="routed_scaling_factor", group_keys=_GROUPS, selection_bias=True,
        layouts=QWEN_LAYOUTS, no_twin="no dense model has its attention",
    ),
"""

USE = """
import sys
from pathlib import Path

import torch

import moesaic
from moesaic.checkpoint.source import open_checkpoint
from moesaic.cli import app
from moesaic.families.moe import detect_moe
from tests.tiny_moes import MOE_FAMILIES, save_tiny_moe
from tests.tiny_training import VOCABULARY, save_tokenizer, write_documents

folder = Path(sys.argv[1])
MOE_FAMILIES["dots1"] = MOE_FAMILIES["glm4_moe"]
model = save_tokenizer(save_tiny_moe(folder / "model", "dots1", vocab_size=VOCABULARY))


def experts(name):
    return detect_moe(open_checkpoint(folder / name)).num_experts


def logits(name):
    return moesaic.load(folder / name)(torch.arange(3, 19)[None], use_cache=False).logits


moesaic.expand(model, folder / "large", experts=16, utility="uniform")
assert experts("large") == 16 and logits("large").isfinite().all()
text = write_documents(folder / "t.jsonl", "math", number=4, seed=0)
moesaic.extract(model, moesaic.select(model, keep="100%", data=str(text)), folder / "all")
assert experts("all") == 8 and torch.equal(logits("all"), logits("model"))
moesaic.export(model, folder / "fused", layout="fused")
moesaic.export(folder / "fused", folder / "back")
assert torch.equal(logits("fused"), logits("model")) and torch.equal(logits("back"), logits("model"))
assert app.run(["families", "dots1"]) == 0
(folder / "convert_hf_to_gguf.py").touch()
arguments = ["export", str(model), str(folder / "gguf"), "--to", "gguf", "--llama-cpp", str(folder), "--dry-run"]
assert app.run(arguments) == 2
assert app.run(["export", str(model), str(folder / "ours"), "--to", "moesaic"]) == 2
"""


@pytest.mark.slow
def test_one_row_makes_a_family_known(tmp_path):
    package = Path(moesaic.__file__).parent
    shutil.copytree(package, tmp_path / "src/moesaic", ignore=shutil.ignore_patterns("__pycache__"))
    table = tmp_path / "src/moesaic/families/moe_table.py"
    before, end, after = table.read_text(encoding="utf-8").partition("\n)\n# fmt: on")
    table.write_text(before + ROW.rstrip() + end + after, encoding="utf-8")
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path / 'src'}{os.pathsep}{root}"}
    done = subprocess.run(
        [sys.executable, "-c", USE, str(tmp_path)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "dots.llm1" in done.stdout
    assert "nobody has compared llama.cpp with it" in done.stderr
    assert "because no dense model has its attention" in done.stderr
