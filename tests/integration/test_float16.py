"""The factor of the exact scale is on the routing weights: what fits float16 in the dense model fits it in the result.

The last layer's FFN puts out up to 30,000; M times that, before the routing weight, is infinite in float16.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from moesaic.common.errors import MoesaicError
from moesaic.exporting.recipe import ExportRecipe
from moesaic.exporting.run import plan_export
from moesaic.modeling import register
from moesaic.upcycling.recipe import Specialist, UpcycleRecipe
from moesaic.upcycling.run import upcycle
from moesaic.verifying.run import verify
from tests.tiny_models import VOCABULARY, save_tiny

LARGEST, ROUNDING = 30_000, 4e-3
TOKENS = torch.randint(3, VOCABULARY, (4, 24), generator=torch.Generator().manual_seed(0))
DOWN = "model.layers.1.mlp.down_proj.weight"

EXACT = {
    "sparse": {"method": "sparse", "experts": 4},
    "shared": {"method": "virtual_group", "experts": 8, "shards": 4, "shared_experts": 2},
    **{f"virtual groups of {m}": {"method": "virtual_group", "experts": 2 * m, "shards": m} for m in (2, 4, 8)},
    **{f"divmoe with {m} shards": {"method": "divmoe", "shards": m, "count": m} for m in (2, 4, 8)},
}
INEXACT = {
    "weights over all": {"method": "virtual_group", "experts": 8, "shards": 4, "weighting": "all"},
    "incomplete groups": {"method": "virtual_group", "experts": 16, "shards": 8, "top_k": 4},
    "drop": {"method": "drop", "experts": 8, "shards": 8, "top_k": 8, "drop_ratio": 0.25},
    "divmoe with random rows": {"method": "divmoe", "shards": 4, "count": 4, "router_init": "random"},
}


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> Path:
    register()
    folder = save_tiny(tmp_path_factory.mktemp("large") / "dense", "llama")
    tensors = load_file(folder / "model.safetensors")
    tensors[DOWN] *= LARGEST / largest_output(load(folder, torch.float32))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert largest_output(load(folder, torch.float16)) == pytest.approx(LARGEST, rel=0.01)
    return folder


def load(folder: Path, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


@torch.no_grad()
def largest_output(model: Any) -> float:
    seen: list[float] = []
    model.model.layers[1].mlp.register_forward_hook(lambda *call: seen.append(call[2].abs().max().item()))
    model(TOKENS)
    return seen[0]


def make(dense: Path, out: Path, count: int = 0, **recipe: Any) -> Path:
    specialists = tuple(Specialist(name=f"s{i}", path=str(dense)) for i in range(count))
    upcycle(UpcycleRecipe(base=str(dense), specialists=specialists, **recipe), out)
    return out


@torch.no_grad()
def logits_and_text(folder: Path, dtype: torch.dtype) -> tuple[torch.Tensor, list[int]]:
    model = load(folder, dtype)
    text = model.generate(TOKENS[:1], max_new_tokens=8, do_sample=False, eos_token_id=None)
    return model(TOKENS).logits.float(), text[0].tolist()


def with_factor_in_down(folder: Path) -> None:
    """Rewrite a checkpoint as versions before `routed_scaling_factor` wrote it."""
    config = json.loads((folder / "config.json").read_text())
    factor = config.pop("routed_scaling_factor")
    tensors = load_file(folder / "model.safetensors")
    made = {name: value * factor if "experts.down_proj" in name else value for name, value in tensors.items()}
    save_file(made, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("case", EXACT)
def test_an_exact_method_gives_the_dense_models_text_in_float16(dense, tmp_path, case):
    moe = make(dense, tmp_path / "moe", **EXACT[case])
    logits, text = logits_and_text(moe, torch.float16)
    expected, its_text = logits_and_text(dense, torch.float16)
    assert (logits - expected).norm() < ROUNDING * expected.norm()
    assert text == its_text


@pytest.mark.parametrize("case", INEXACT)
def test_elsewhere_it_gives_its_own_text_of_float32(dense, tmp_path, case):
    moe = make(dense, tmp_path / "moe", **INEXACT[case])
    logits, text = logits_and_text(moe, torch.float16)
    expected, its_text = logits_and_text(moe, torch.float32)
    assert logits.isfinite().all()
    assert (logits - expected).norm() < ROUNDING * expected.norm()
    assert text == its_text


@pytest.mark.parametrize("case", ["virtual groups of 4", "shared", "weights over all", "divmoe with random rows"])
def test_checkpoints_with_the_factor_in_down_load_and_mean_the_same(dense, tmp_path, case):
    moe = make(dense, tmp_path / "moe", **(EXACT | INEXACT)[case])
    new, _ = logits_and_text(moe, torch.float32)
    before = verify(str(dense), str(moe), quiet=True)
    with_factor_in_down(moe)
    old, _ = logits_and_text(moe, torch.float32)
    assert (old - new).norm() < 1e-6 * new.norm()
    after = verify(str(dense), str(moe), quiet=True)
    assert (after.code, after.statement) == (before.code, before.statement)
    assert [check.ok for check in after.checks] == [check.ok for check in before.checks]
    assert all(check.ok for check in before.checks)
    if case == "virtual groups of 4":
        assert not logits_and_text(moe, torch.float16)[0].isfinite().all(), "the old form was to overflow here"


def test_down_proj_has_the_sources_bytes(dense, tmp_path):
    moe = make(dense, tmp_path / "moe", **EXACT["virtual groups of 4"])
    ffn, made = (load_file(folder / "model.safetensors") for folder in (dense, moe))
    shards = ffn[DOWN].chunk(4, dim=1)
    for expert, down in enumerate(made["model.layers.1.mlp.experts.down_proj"]):
        assert torch.equal(down, shards[expert % 4])


def test_a_factor_that_leaves_the_range_of_a_native_file_is_refused(dense, tmp_path):
    moe = make(dense, tmp_path / "moe", method="virtual_group", experts=8, shards=4)
    tensors = load_file(moe / "model.safetensors")
    tensors["model.layers.0.mlp.experts.down_proj"].fill_(20_000)
    save_file(tensors, moe / "model.safetensors", metadata={"format": "pt"})
    plan = plan_export(ExportRecipe(checkpoint=str(moe), to="mixtral", dtype="float16"))
    down = plan.new_checkpoint("out").tensors["model.layers.0.block_sparse_moe.experts.0.w2.weight"]
    with pytest.raises(MoesaicError, match=r"experts.down_proj times 4 leaves the range of F16; use --dtype bfloat16"):
        down.read()


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_native_family_has_the_factor_in_down_and_that_is_said(dense, tmp_path, dtype):
    moe = make(dense, tmp_path / "moe", method="virtual_group", experts=9, shards=3, top_k=3)
    plan = plan_export(ExportRecipe(checkpoint=str(moe), to="mixtral", dtype=dtype))
    assert "the factor 3 is on down_proj (rounded once)" in plan.notices[0]
    assert "bfloat16 or float32, or export --to moesaic" in plan.notices[0]
    made = plan.new_checkpoint("out").tensors["model.layers.1.block_sparse_moe.experts.4.w2.weight"].read()
    whole = load_file(dense / "model.safetensors")[DOWN].chunk(3, dim=1)[1]
    assert torch.equal(made, (whole * 3).to(getattr(torch, dtype or "float32")))


def test_verify_runs_a_result_of_float16_in_float16_too(dense, tmp_path):
    moe = make(dense, tmp_path / "moe", method="virtual_group", experts=8, shards=4, dtype="float16")
    report = verify(str(dense), str(moe), quiet=True)
    assert (report.dtype, report.ok) == ("float32", True)
    assert f"{moe} in float16: all values are finite" in report.notes
    with_factor_in_down(moe)
    report = verify(str(dense), str(moe), quiet=True)
    assert not report.ok
    assert f"{moe} in float16: layer 1, mlp" in report.not_finite[0]
    assert all(check.ok for check in report.checks)


@pytest.mark.parametrize(("dtype", "said"), [("float16", True), ("bfloat16", False), ("auto", False)])
def test_upcycle_says_what_float16_can_still_do(dense, tmp_path, dtype, said):
    recipe = UpcycleRecipe(base=str(dense), method="sparse", dtype=dtype)
    notices = upcycle(recipe, tmp_path / "moe", dry_run=True).notices
    assert any("above 65,504" in line for line in notices) == said
