"""`plan` on checkpoints and recipes in a folder, from headers alone."""

import json
import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from moesaic.checkpoint.writer import OutputTensor, plan_files
from moesaic.common.errors import MoesaicError
from moesaic.common.yaml_text import parse_yaml
from moesaic.families.costs import number, size
from moesaic.families.counting import config_shapes
from moesaic.planning.recipe import PlanReport, duration
from moesaic.planning.run import RECIPES, plan
from moesaic.recipes import read_recipe, shipped_recipes
from moesaic.upcycling.recipe import Specialist, UpcycleRecipe
from tests.tiny_models import SIZES


def planned(source, **options) -> PlanReport:
    report = plan(source, **options)
    assert isinstance(report, PlanReport)
    return report


def save(folder, model_type="llama", dtype=torch.bfloat16, **changes):
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**SIZES, **changes})
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    model.save_pretrained(folder)
    return model


def test_dense_checkpoint(tmp_path):
    model = save(tmp_path / "base")
    report = planned(tmp_path / "base", context=100)
    weights = sum(p.numel() for p in model.parameters())
    assert report.kind == "dense checkpoint"
    assert report.parameters.total == report.parameters.active == weights
    assert report.weight_bytes == 2 * weights
    assert report.kv_cache_bytes == 2 * 2 * 16 * 100 * 2  # layers, key and value, width, tokens, bytes
    assert report.memory_to_run_bytes == report.weight_bytes + report.kv_cache_bytes
    assert report.memory_to_convert_bytes is not None
    assert report.minutes is None
    assert report.disk_bytes == 0
    assert json.loads(json.dumps(report.to_dict()))["parameters"]["total"] == weights
    text = "\n".join(report.lines())
    assert f"({weights:,})" in text
    assert "100 tokens" in text


def test_native_moe_checkpoint(tmp_path):
    model = save(tmp_path / "moe", "mixtral", num_local_experts=4, num_experts_per_tok=1)
    report = planned(str(tmp_path / "moe"))
    routed = 2 * 4 * 3 * 32 * 48
    assert report.kind == "MoE checkpoint"
    assert report.parameters.routed == routed
    assert report.parameters.active == sum(p.numel() for p in model.parameters()) - routed * 3 // 4
    assert any("1 of 4 per token in 2 layers" in line for line in report.lines())


def recipe_file(folder, text):
    path = folder / "recipe.yaml"
    path.write_text(text)
    return path


def test_upcycle_recipe_from_a_file(tmp_path):
    save(tmp_path / "base")
    for name in ("math", "code"):
        save(tmp_path / name)
    path = recipe_file(
        tmp_path,
        f"base: {tmp_path}/base\nmethod: divmoe\nspecialists:\n"
        f"  - {{name: math, path: {tmp_path}/math}}\n  - {{name: code, path: {tmp_path}/code}}\n",
    )
    report = planned(path)
    ffn = 2 * 3 * 32 * 48
    base = planned(tmp_path / "base").parameters
    router = 2 * 4 * 32
    assert report.parameters.total == base.total + ffn + router  # N=2 whole FFNs instead of one
    assert report.parameters.active == base.total + router  # K=M=2 half FFNs
    assert report.weight_bytes == 2 * report.parameters.total
    assert report.weight_bytes < report.disk_bytes < report.weight_bytes + 10_000
    assert report.minutes is not None
    assert 0 < report.minutes < 1
    assert report.download_bytes == 0


def test_layers_and_shared_experts_of_a_recipe_count(tmp_path):
    save(tmp_path / "base", num_hidden_layers=4)
    recipe = UpcycleRecipe(
        base=str(tmp_path / "base"),
        method="sparse",
        experts=3,
        top_k=1,
        shared_experts=2,
        layers="every:2",
        dtype="float32",
    )
    report = planned(recipe)
    ffn = 3 * 32 * 48
    base = planned(tmp_path / "base").parameters.total
    assert report.parameters.total == base + 2 * (2 + 2) * ffn + 2 * 3 * 32
    assert report.parameters.active == base + 2 * 2 * ffn + 2 * 3 * 32
    assert report.parameters.shared == 2 * 2 * ffn
    assert report.weight_bytes == 4 * report.parameters.total


def test_refusals_are_one_line(tmp_path):
    save(tmp_path / "base")
    recipe = UpcycleRecipe(base=str(tmp_path / "base"), method="virtual_group", shards=5)
    with pytest.raises(MoesaicError, match="--shards 5: does not divide"):
        plan(recipe)
    gone = UpcycleRecipe(
        base=str(tmp_path / "base"),
        method="btx",
        specialists=(Specialist(name="a", path=str(tmp_path / "base")), Specialist(name="b", path="/no/such/place")),
    )
    with pytest.raises(MoesaicError, match="/no/such/place: no such folder") as caught:
        plan(gone)
    assert "\n" not in str(caught.value)
    with pytest.raises(MoesaicError, match=f"none of the keys {', '.join(RECIPES)}"):
        plan({"colour": "green"})
    with pytest.raises(MoesaicError, match="no such folder"):
        plan("nothing/at/all")
    with pytest.raises(MoesaicError, match="context 0"):
        plan(tmp_path / "base", context=0)


# What the released models' config.json say.
RELEASED = {
    "qwen3-4b": {
        "model_type": "qwen3", "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "qwen3-1.7b": {
        "model_type": "qwen3", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "llama-3.2-1b": {
        "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256,
        "tie_word_embeddings": True,
    },
}  # fmt: skip


def save_headers(folder, config):
    """A checkpoint of the real size whose tensors are holes in the file: plan reads nothing but the header."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    tensors = [OutputTensor(name=n, dtype="BF16", shape=s) for n, s in config_shapes(config).items()]
    (file,) = plan_files(tensors, 10**12).files
    with (folder / file.name).open("wb") as handle:
        handle.write(file.header)
        handle.truncate(file.nbytes)
    return folder


def released(recipe):
    return next(size for size in RELEASED if size in recipe)


SHIPPED = [r.name for r in shipped_recipes() if r.verb == "upcycle" and any(size in r.name for size in RELEASED)]


@pytest.mark.parametrize("name", SHIPPED)
def test_recipes_in_the_package_on_files_of_the_real_size(tmp_path, name):
    folder = save_headers(tmp_path / "base", RELEASED[released(name)])
    recipe = parse_yaml(read_recipe(name), name)
    recipe["base"] = str(folder)
    for specialist in recipe.get("specialists") or []:
        specialist["path"] = str(folder)
    report = planned(recipe)
    if "divmoe" in name:
        total, active = {"qwen3-4b": (12.1, 4.0), "qwen3-1.7b": (4.9, 1.7), "llama-3.2-1b": (3.7, 1.2)}[released(name)]
        assert round(report.parameters.total / 1e9, 1) == total
        assert round(report.parameters.active / 1e9, 1) == active
    assert report.parameters.active < report.parameters.total
    assert report.disk_bytes > 2 * report.parameters.total


def test_a_shipped_recipe_by_name_names_what_it_cannot_reach():
    with pytest.raises(MoesaicError) as caught:
        plan(SHIPPED[0])
    assert "\n" not in str(caught.value)
    assert "Qwen" in str(caught.value) or "llama" in str(caught.value).lower()


def test_a_missing_tensor_is_named(tmp_path):
    from safetensors.torch import load_file, save_file

    save(tmp_path / "base")
    file = tmp_path / "base" / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(MoesaicError, match=r"missing tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        plan(tmp_path / "base")


def test_no_torch_is_imported(tmp_path):
    save(tmp_path / "base")
    code = (
        "import sys\nfrom moesaic.planning.run import plan\n"
        f"plan({str(tmp_path / 'base')!r})\nplan(dict(base={str(tmp_path / 'base')!r}, method='sparse'))\n"
        "print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


def test_numbers_are_written_with_three_digits():
    assert [number(n) for n in (12.1e9, 999, 1.234e6, 134.5e6)] == ["12.1B", "999", "1.23M", "134M"]
    assert [size(n) for n in (5, 2.5e9, 123e6)] == ["5 B", "2.50 GB", "123 MB"]
    assert [duration(m) for m in (0.001, 0.5, 7.4, 180)] == [
        "about 1 s",
        "about 30 s",
        "about 7 minutes",
        "about 3.0 hours",
    ]
