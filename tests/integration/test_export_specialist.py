"""`export --to dense --specialist NAME`: what `upcycle` read comes back, also where the factor is in the matrices."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import moesaic
from moesaic.cli.app import run
from moesaic.common.errors import MoesaicError
from moesaic.exporting.dense import weight_factors
from moesaic.upcycling.choices import factors
from tests.tiny_models import save_tiny

NAMES = ("math", "code", "law", "biology")
FFN = ("gate_proj", "up_proj", "down_proj", "gate_up_proj")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for base in ("llama", "phi3"):
        for seed, name in enumerate(("base", *NAMES)):
            save_tiny(folder / base / name, base, seed=seed)
            save_tiny(folder / f"{base}-bf16" / name, base, seed=seed, dtype=torch.bfloat16)
    for seed, name in enumerate(("base", *NAMES)):
        save_tiny(folder / "biased" / name, "llama", seed=seed, mlp_bias=True)
    return folder


def make(models: Path, out: Path, base: str = "llama", **settings) -> Path:
    specialists = {name: models / base / name for name in NAMES}
    moesaic.upcycle(models / base / "base", out, **{"method": "divmoe", "specialists": specialists, **settings})
    return out


def fold(folder: Path, factor: float) -> None:
    """Make it a checkpoint from before the config had `routed_scaling_factor`: the factor is in the down matrices."""
    config = json.loads((folder / "config.json").read_text())
    if config.pop("routed_scaling_factor", None) is None:
        return  # it is one
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    for name, values in tensors.items():
        if "experts.down_proj" in name:
            tensors[name] = (values.float() * factor).to(values.dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def parts(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The FFNs' tensors, and all others."""
    found = load_file(folder / "model.safetensors")
    ffns = {name: values for name, values in found.items() if any(f".{part}." in name for part in FFN)}
    return ffns, {name: values for name, values in found.items() if name not in ffns}


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize(
    ("base", "settings", "factor"),
    [
        ("llama", {"shards": 2}, 2.0),
        ("llama", {"shards": 4}, 4.0),
        ("llama", {"method": "btx"}, 1.0),
        ("llama-bf16", {"shards": 2, "top_k": 2, "weighting": "all"}, 8.0),
        ("phi3", {"shards": 2, "shared_experts": 1}, 1.0),
        ("biased", {"shards": 2}, 2.0),
        ("llama", {"shards": 2, "layers": "1"}, 2.0),
        ("llama", {"shards": 2, "scale": "none"}, 1.0),
    ],
)
def test_a_specialist_s_ffn_comes_back_bit_for_bit(models, tmp_path, base, settings, factor, old):
    moe = make(models, tmp_path / "moe", base, **settings)
    if old:
        fold(moe, factor)
    result = moesaic.export(moe, tmp_path / "out", to="dense", specialist="law")
    ours, others = parts(tmp_path / "out")
    theirs, _ = parts(models / base / "law")
    assert set(ours) == set(theirs)
    kept = {name for name in theirs if "layers" in settings and f"layers.{settings['layers']}." not in name}
    for name in theirs.keys() - kept:
        assert torch.equal(ours[name], theirs[name]), name
    inside = load_file(moe / "model.safetensors")
    for name in (*others, *kept):
        assert torch.equal((others | ours)[name], inside[name]), name
    assert "not law's own" in result.notices[0]
    assert len(result.notices) == 1 + ("shared_experts" in settings)


@pytest.mark.parametrize(
    ("base", "settings", "factor"),
    [
        ("llama", {"shards": 3}, 3.0),
        ("llama-bf16", {"shards": 3}, 3.0),
        ("llama", {"shards": 2, "top_k": 4, "scale": "paper"}, 1.0),
    ],
)
def test_other_factors_come_back_to_rounding(models, tmp_path, base, settings, factor):
    """One rounding by `upcycle` and one here: at most two units in the last place."""
    moe = make(models, tmp_path / "moe", base, **settings)
    fold(moe, factor)
    result = moesaic.export(moe, tmp_path / "out", to="dense", specialist="code")
    ours, _ = parts(tmp_path / "out")
    theirs, _ = parts(models / base / "code")
    for name, values in theirs.items():
        units = torch.finfo(values.dtype).eps * values.abs()
        assert ((ours[name].float() - values.float()).abs() <= 2 * units.float()).all(), name
    assert "equal to rounding" in result.notices[1]


def test_the_result_is_the_specialist_where_all_else_is_equal(models, tmp_path):
    """A base that differs in nothing but the FFN: then the whole model comes back."""
    folder = tmp_path / "models"
    base = load_file(models / "llama" / "base" / "model.safetensors")
    for name in NAMES:
        save_tiny(folder / "llama" / name, "llama", seed=0)
        ffns, _ = parts(models / "llama" / name)
        save_file(base | ffns, folder / "llama" / name / "model.safetensors", metadata={"format": "pt"})
    save_tiny(folder / "llama" / "base", "llama", seed=0)
    moe = make(folder, tmp_path / "moe", shards=2)
    moesaic.export(moe, tmp_path / "out", to="dense", specialist="biology")
    ids = torch.arange(3, 40)[None]
    ours, theirs = (moesaic.load(one)(input_ids=ids).logits for one in (tmp_path / "out", folder / "llama" / "biology"))
    assert torch.equal(ours, theirs)
    assert type(moesaic.load(tmp_path / "out")).__name__ == "LlamaForCausalLM"
    assert not (tmp_path / "out" / "modeling_moesaic.py").exists()
    assert json.loads((tmp_path / "out" / "moesaic.json").read_text())["specialist"] == "biology"
    again = moesaic.upcycle(tmp_path / "out", tmp_path / "again", method="sparse", experts=4)
    assert again.out is not None


@pytest.mark.parametrize("scale", ["exact", "paper", "none"])
@pytest.mark.parametrize("weighting", ["selected", "all"])
@pytest.mark.parametrize("shared", [0, 2])
@pytest.mark.parametrize("shards", [1, 2, 3])
def test_the_factors_are_those_of_upcycle(scale, weighting, shared, shards):
    made = factors(scale=scale, weighting=weighting, experts=4 * shards, top_k=shards, shards=shards, shared=shared)
    recipe = {"scale": scale, "weighting": weighting, "top_k": shards, "shards": shards, "shared_experts": shared}
    weights = getattr(made, "weights", 1.0)
    gate_up, down = weight_factors(recipe, {"num_experts": 4 * shards, "routed_scaling_factor": weights})
    assert math.isclose(gate_up, made.gate_up)
    assert math.isclose(down, made.down)


def test_what_is_not_there_is_refused(models, tmp_path, capsys):
    moe = make(models, tmp_path / "moe", shards=2)
    moesaic.upcycle(models / "llama" / "base", tmp_path / "sparse", method="sparse", experts=4)
    refused = [
        ([moe, "--to", "dense", "--specialist", "lawyers"], "has none of this name; did you mean 'law'?"),
        ([moe, "--to", "dense"], "--to dense and --specialist NAME: one needs the other"),
        ([moe, "--specialist", "law"], "--to dense and --specialist NAME: one needs the other"),
        ([moe, "--to", "dense", "--specialist", "law", "--check"], "one specialist is another model than all"),
        ([moe, "--to", "dense", "--specialist", "law", "--layout", "fused"], "a dense model has no experts"),
        ([tmp_path / "sparse", "--to", "dense", "--specialist", "law"], "has no record (moesaic.json) of `upcycle"),
        ([models / "llama" / "base", "--to", "dense", "--specialist", "law"], "has no record (moesaic.json)"),
    ]
    for (source, *words), message in refused:
        assert run(["export", str(source), str(tmp_path / "out"), *words]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert message in said
    assert not (tmp_path / "out").exists()


def test_grown_experts_are_no_specialists(models, tmp_path):
    moe = make(models, tmp_path / "moe", shards=2)
    record = json.loads((moe / "moesaic.json").read_text())
    record["recipe"]["specialists"] = record["recipe"]["specialists"][:3]
    (moe / "moesaic.json").write_text(json.dumps(record))
    with pytest.raises(MoesaicError, match="has 8 experts, and 3 specialists in 2 shards made 6"):
        moesaic.export(moe, tmp_path / "out", to="dense", specialist="law")


@pytest.mark.parametrize(
    ("key", "value"), [("shards", "2"), ("top_k", 0), ("specialists", ["law"]), ("shared_weights", 5), ("scale", None)]
)
def test_a_damaged_record_is_one_line(models, tmp_path, key, value, capsys):
    moe = make(models, tmp_path / "moe", shards=2)
    record = json.loads((moe / "moesaic.json").read_text())
    record["recipe"][key] = value
    (moe / "moesaic.json").write_text(json.dumps(record))
    assert run(["export", str(moe), str(tmp_path / "out"), "--to", "dense", "--specialist", "law"]) == 2
    assert "moesaic.json: recipe." in capsys.readouterr().err


@pytest.mark.parametrize("to", ["auto", "mixtral"])
def test_the_refusal_of_a_native_family_names_both_ways_out(models, tmp_path, to):
    moe = make(models, tmp_path / "moe", shards=2)
    with pytest.raises(MoesaicError) as error:
        moesaic.export(moe, tmp_path / "out", to=to)
    assert "train it further with `routing: {rule: topk}`" in str(error.value)
    assert "--to dense --specialist NAME" in str(error.value)
