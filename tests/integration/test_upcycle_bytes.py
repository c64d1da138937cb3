"""The streamed files hold exactly what the pure functions compute, and the same bytes every time."""

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from moesaic.families.experts import ExpertWeights
from moesaic.upcycling.recipe import Specialist, UpcycleRecipe
from moesaic.upcycling.run import upcycle
from tests.tiny_models import save_tiny
from tests.upcycled_layer import build_layer

METHODS = ("scratch", "sparse", "drop", "virtual_group", "btx", "divmoe")
WITH_SPECIALISTS = ("btx", "divmoe")


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Folders of a base and three specialists, made on demand."""
    root = tmp_path_factory.mktemp("sources")
    made: dict[tuple, list[Path]] = {}

    def make(base: str = "llama", dtype: torch.dtype = torch.float32, **more) -> list[Path]:
        key = (base, dtype, *sorted(more.items()))
        if key not in made:
            folder = root / str(len(made))
            made[key] = [save_tiny(folder / str(seed), base, dtype=dtype, seed=seed, **more) for seed in range(4)]
        return made[key]

    return make


def recipe_for(folders: list[Path], method: Any, **more: Any) -> UpcycleRecipe:
    specialists = ()
    if method in WITH_SPECIALISTS:
        specialists = tuple(Specialist(name=f"s{i}", path=str(folder)) for i, folder in enumerate(folders[1:]))
    return UpcycleRecipe(base=str(folders[0]), method=method, specialists=specialists, **more)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def dense_ffn(folder: Path, layer: int, dtype: torch.dtype) -> ExpertWeights:
    stored = {name: value.to(dtype) for name, value in weights(folder).items()}
    prefix = f"model.layers.{layer}.mlp."
    if f"{prefix}gate_up_proj.weight" in stored:
        gate, up = stored[f"{prefix}gate_up_proj.weight"].chunk(2)
    else:
        gate, up = stored[f"{prefix}gate_proj.weight"], stored[f"{prefix}up_proj.weight"]
    return ExpertWeights(
        gate_ID=gate,
        up_ID=up,
        down_DI=stored[f"{prefix}down_proj.weight"],
        gate_bias_I=stored.get(f"{prefix}gate_proj.bias"),
        up_bias_I=stored.get(f"{prefix}up_proj.bias"),
        down_bias_D=stored.get(f"{prefix}down_proj.bias"),
    )


def expected_layer(folders: list[Path], result, layer: int, compute: torch.dtype) -> dict[str, torch.Tensor]:
    """The tensors of one MoE layer from the pure functions, before the cast."""
    ffns = tuple(dense_ffn(folder, layer, compute) for folder in folders)
    spec = result.plan.layer
    moe = build_layer(spec, layer, ffns)
    experts, shared = moe.experts, moe.shared
    tensors = {
        "gate.weight": moe.router_ED,
        "experts.gate_up_proj": torch.cat([experts.gate_ID, experts.up_ID], dim=1),
        "experts.down_proj": experts.down_DI,
    }
    if experts.gate_bias_I is not None and experts.up_bias_I is not None and experts.down_bias_D is not None:
        tensors["experts.gate_up_proj_bias"] = torch.cat([experts.gate_bias_I, experts.up_bias_I], dim=1)
        tensors["experts.down_proj_bias"] = experts.down_bias_D
    if shared is not None:
        for part, weight, bias in (
            ("gate", shared.gate_ID, shared.gate_bias_I),
            ("up", shared.up_ID, shared.up_bias_I),
            ("down", shared.down_DI, shared.down_bias_D),
        ):
            tensors[f"shared_expert.{part}_proj.weight"] = weight
            if bias is not None:
                tensors[f"shared_expert.{part}_proj.bias"] = bias
    return tensors


CASES = [
    {"method": method, **more}
    for method in METHODS
    for more in ({}, {"shared_experts": 2}, {"scale": "paper"}, {"weighting": "all", "layers": "1"})
] + [
    {"method": "virtual_group", "experts": 9, "shards": 3},
    {"method": "divmoe", "shards": 3},
    {"method": "drop", "shards": 3, "experts": 6, "drop_indices": "per-matrix"},
    {"method": "drop", "drop_ratio": 0.0},
    {"method": "drop", "drop_ratio": 1.0},
    {"method": "scratch", "shards": 2},
]


@pytest.mark.parametrize(
    ("base", "more", "dtype"),
    [
        ("llama", {"mlp_bias": True}, torch.float32),
        ("llama", {"mlp_bias": True}, torch.bfloat16),
        ("phi3", {}, torch.bfloat16),
    ],
    ids=["llama-fp32", "llama-bf16", "phi3-bf16"],
)
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_streamed_experts_are_the_computed_ones(sources, tmp_path, base, more, dtype, case):
    folders = sources(base, dtype, **more)
    result = upcycle(recipe_for(folders, **case), tmp_path / "out", quiet=True, workers=1)
    written = weights(tmp_path / "out")
    # Computed experts are made in the stored precision; copies are scaled in float32 and rounded once.
    compute = torch.float32 if result.plan.layer.method.preserves else dtype
    for layer in result.plan.moe_layers:
        for name, value in expected_layer(folders, result, layer, compute).items():
            actual = written.pop(f"model.layers.{layer}.mlp.{name}")
            assert actual.dtype == dtype
            assert torch.equal(actual, value.to(dtype)), name
    carried = {name for name in written if ".experts." in name or ".gate.weight" in name}
    assert not carried


@pytest.mark.parametrize(
    ("stored", "asked"), [("bfloat16", "float32"), ("float32", "bfloat16"), ("bfloat16", "float16")]
)
@pytest.mark.parametrize("method", METHODS)
def test_another_dtype_rounds_once(sources, tmp_path, stored, asked, method):
    folders = sources("llama", getattr(torch, stored))
    result = upcycle(
        recipe_for(folders, method, dtype=asked, shards=3 if method == "divmoe" else None), tmp_path / "out", quiet=True
    )
    written, dtype = weights(tmp_path / "out"), getattr(torch, asked)
    assert {value.dtype for value in written.values()} == {dtype}
    for layer in result.plan.moe_layers:
        for name, value in expected_layer(folders, result, layer, torch.float32).items():
            assert torch.equal(written[f"model.layers.{layer}.mlp.{name}"], value.to(dtype)), name


def test_everything_else_is_carried_bit_for_bit(sources, tmp_path):
    folders = sources("qwen2", torch.bfloat16, tied=True)
    upcycle(recipe_for(folders, "virtual_group", layers="1"), tmp_path / "out", quiet=True)
    written, stored = weights(tmp_path / "out"), weights(folders[0])
    assert "lm_head.weight" not in written
    kept = {name for name in stored if not name.startswith("model.layers.1.mlp.")}
    for name in kept:
        assert torch.equal(written.pop(name), stored[name]), name
    assert all(name.startswith("model.layers.1.mlp.") for name in written)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_mean_of_base_and_specialists(sources, tmp_path, dtype):
    folders = sources("llama", dtype)
    upcycle(recipe_for(folders, "divmoe"), tmp_path / "out", quiet=True)
    written, stored = weights(tmp_path / "out"), [weights(folder) for folder in folders]
    for name in stored[0]:
        if ".mlp." not in name:
            mean = torch.stack([one[name].double() for one in stored]).sum(0) / len(stored)
            assert torch.equal(written[name], mean.to(dtype)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [2, 3, 6])
def test_mean_of_equal_tensors_is_that_tensor(sources, tmp_path, dtype, count):
    base = sources("llama", dtype)[0]
    upcycle(recipe_for([base] * (count + 1), "btx"), tmp_path / "out", quiet=True)
    written, stored = weights(tmp_path / "out"), weights(base)
    for name in stored:
        if ".mlp." not in name:
            assert torch.equal(written[name], stored[name]), name


def test_random_specialist_draws_one_per_layer(sources, tmp_path):
    folders = sources("llama", num_layers=6)
    stored = [weights(folder) for folder in folders]
    seen = set()
    for seed in range(3):
        out = tmp_path / str(seed)
        upcycle(recipe_for(folders, "divmoe", shared_weights="random-specialist", seed=seed), out, quiet=True)
        written = weights(out)
        for layer in range(6):
            names = [name for name in stored[0] if name.startswith(f"model.layers.{layer}.") and ".mlp." not in name]
            owners = [i for i, one in enumerate(stored) if all(torch.equal(written[n], one[n]) for n in names)]
            assert len(owners) == 1
            assert owners[0] > 0
            seen.add(owners[0])
    assert seen == {1, 2, 3}


def test_reinit_draws_everything(sources, tmp_path):
    folder = sources("gemma2", tied=True)[0]
    upcycle(recipe_for([folder], "scratch", shared_weights="reinit", shared_experts=1), tmp_path / "out", quiet=True)
    written, stored = weights(tmp_path / "out"), weights(folder)
    for name, value in written.items():
        if value.ndim == 1:
            assert torch.equal(value, torch.zeros_like(value)), name  # Gemma's norms multiply by 1 + weight
        else:
            assert value.std() == pytest.approx(0.02, rel=0.2), name
        assert name not in stored or not torch.equal(value, stored[name])


# --- determinism ------------------------------------------------------------------------------------------------------


def folder_hash(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize("method", METHODS)
def test_the_same_bytes_for_any_number_of_workers_and_twice(sources, tmp_path, method):
    folders = sources("llama", torch.bfloat16, num_layers=5, max_shard_size="40KB")
    hashes = []
    for number, workers in enumerate((1, 4, 4, 1)):
        out = tmp_path / str(number)
        upcycle(recipe_for(folders, method, shard_size="50KB", seed=7), out, quiet=True, workers=workers)
        hashes.append(folder_hash(out))
    assert len([name for name in hashes[0] if name.endswith(".safetensors")]) > 3
    assert {"moesaic.json", "config.json", "recipe.yaml", "README.md", "modeling_moesaic.py"} <= hashes[0].keys()
    assert all(other == hashes[0] for other in hashes[1:])


@pytest.mark.parametrize("method", METHODS)
def test_another_seed_gives_other_weights(sources, tmp_path, method):
    folders = sources("llama")
    for seed in (0, 1):
        upcycle(recipe_for(folders, method, seed=seed), tmp_path / str(seed), quiet=True)
    first, second = weights(tmp_path / "0"), weights(tmp_path / "1")
    assert not torch.equal(first["model.layers.0.mlp.gate.weight"], second["model.layers.0.mlp.gate.weight"])
    assert not torch.equal(first["model.layers.0.mlp.gate.weight"], first["model.layers.1.mlp.gate.weight"])


def test_the_written_recipe_gives_the_same_bytes(sources, tmp_path):
    from moesaic.common.recipe import load_recipe

    folders = sources("llama")
    upcycle(recipe_for(folders, "divmoe"), tmp_path / "first", quiet=True)
    again = load_recipe(UpcycleRecipe, tmp_path / "first" / "recipe.yaml")
    upcycle(again, tmp_path / "second", quiet=True)
    assert folder_hash(tmp_path / "first") == folder_hash(tmp_path / "second")


def test_side_files_come_along_unchanged(sources, tmp_path):
    folder = tmp_path / "base"
    save_tiny(folder, "llama")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes(b'{"model": {"vocab": {"a": 0}}}\n\n')
    os.utime(folder / "config.json")
    upcycle(recipe_for([folder], "sparse"), tmp_path / "out", quiet=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()
