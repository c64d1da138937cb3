"""Quantised checkpoints: read as bf16, moved as bytes, refused where nobody knows how to read them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.utils.quantization_config import FineGrainedFP8Config, Mxfp4Config

import moesaic
from moesaic.checkpoint.lazy import stored
from moesaic.checkpoint.source import open_checkpoint
from moesaic.common.errors import MoesaicError
from moesaic.families.counting import count_shapes
from tests.tiny_models import save_tiny
from tests.tiny_quantised import FAMILIES, SETTINGS, naive, quantise, tiny_quantised
from tests.tiny_training import save_tokenizer

KINDS = tuple(FAMILIES)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("quantised")
    return {kind: tiny_quantised(folder / kind, kind) for kind in KINDS}


def read(folder: Path | str) -> dict[str, Tensor]:
    return {name: stored(info).read() for name, info in open_checkpoint(folder).tensors.items()}


def in_bf16(folder: Path, out: Path) -> Path:
    """The same model as a checkpoint in bf16."""
    out.mkdir()
    save_file(read(folder), out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config")
    (out / "config.json").write_text(json.dumps(config))
    return out


def selection(source: Path, file: Path, ids: list[int]) -> Path:
    content = moesaic.select(source, method="random", keep=len(ids)).to_dict()
    file.write_text(json.dumps({**content, "kept": [ids] * len(content["kept"])}))
    return file


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_those_of_the_format(kind: str, sources: dict[str, Path]) -> None:
    files, checkpoint = load_file(sources[kind] / "model.safetensors"), open_checkpoint(sources[kind])
    made = [info for info in checkpoint.tensors.values() if info.codes is not None]
    assert len(made) >= 4
    assert "quantization_config" not in checkpoint.config
    for info in made:
        expected = naive(files, info.name)
        assert torch.equal(stored(info).read(), expected.bfloat16()), info.name
        if expected.ndim == 2:
            assert torch.equal(stored(info).columns(3, 11).read(), expected[:, 3:11].bfloat16())
        assert torch.equal(stored(info).rows(1, 5).read(), expected[1:5].bfloat16())


def test_mxfp4_equals_transformers(sources: dict[str, Path]) -> None:
    files = load_file(sources["mxfp4"] / "model.safetensors")
    numbers = read(sources["mxfp4"])
    for name in (one.removesuffix("_blocks") for one in files if one.endswith("_blocks")):
        assert torch.equal(numbers[name], convert_moe_packed_tensors(files[f"{name}_blocks"], files[f"{name}_scales"]))


def test_fp8_equals_transformers(sources: dict[str, Path]) -> None:
    files, numbers, compared = load_file(sources["fp8"] / "model.safetensors"), read(sources["fp8"]), 0
    for name in (one.removesuffix("_scale_inv") for one in files if one.endswith("_scale_inv")):
        if all(size % 16 == 0 for size in files[name].shape):  # transformers refuses blocks that stand out
            theirs = Fp8Dequantize(None)._dequantize_one(files[name], files[f"{name}_scale_inv"], torch.bfloat16)
            assert torch.equal(numbers[name], theirs)
            compared += 1
    assert compared > 20


def test_int4_equals_compressed_tensors(sources: dict[str, Path]) -> None:
    """With compressed-tensors 0.20.1, which transformers uses; it is in none of our extras."""
    forward = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    weights = SETTINGS["int4"]["config_groups"]["group_0"]["weights"]
    given = forward.QuantizationArgs(**weights)
    files, numbers = load_file(sources["int4"] / "model.safetensors"), read(sources["int4"])
    names = [one.removesuffix("_packed") for one in files if one.endswith("_packed")]
    assert len(names) > 20
    for name in names:
        shape = torch.Size(files[f"{name}_shape"].tolist())
        integers = helpers.unpack_from_int32(files[f"{name}_packed"], 4, shape)
        theirs = forward.dequantize(integers, files[f"{name}_scale"], args=given)
        assert torch.equal(numbers[name], theirs.bfloat16()), name


def test_fp8_scales_of_other_kinds(tmp_path: Path) -> None:
    codes = torch.randn(32, 48).mul(9).to(torch.float8_e4m3fn)
    for number, scales in enumerate(
        (torch.tensor(0.25), torch.tensor([[120, 130, 127]], dtype=torch.uint8), torch.rand(2, 3).bfloat16())
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        save_file({"a.weight": codes, "a.weight_scale_inv": scales}, folder / "model.safetensors")
        config = {"model_type": "llama", "quantization_config": {"quant_method": "fp8"}}
        (folder / "config.json").write_text(json.dumps(config))
        theirs = Fp8Dequantize(None)._dequantize_one(codes, scales, torch.bfloat16)
        assert torch.equal(read(folder)["a.weight"], theirs)


@pytest.mark.parametrize("kind", ["mxfp4", "fp8"])
def test_load_is_what_transformers_dequantises(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # transformers takes the size of blocks from the grid, which is wrong where the last ones stand out
    options = {"intermediate_size": 48, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16} if kind == "fp8" else {}
    folder = tiny_quantised(tmp_path / "q", kind, **options)
    ours = moesaic.load(folder, device="cpu")
    assert "is quantised; its weights are dequantised" in capsys.readouterr().err
    settings: Any = Mxfp4Config(dequantize=True) if kind == "mxfp4" else FineGrainedFP8Config(dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(folder, quantization_config=settings, dtype=torch.bfloat16)
    tokens = torch.arange(1, 20)[None]
    with torch.no_grad():
        assert torch.equal(ours(tokens).logits, theirs(tokens).logits)
    assert not hasattr(ours.config, "quantization_config")


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_keeps_its_bytes_and_goes_back(kind: str, sources: dict[str, Path], tmp_path: Path) -> None:
    source = sources[kind]
    ids = [4, 5, 6, 7] if kind == "fp8" else [1, 6]  # two of DeepSeek's four groups
    if kind == "fp8":
        source = tiny_quantised(tmp_path / "ungrouped", kind, n_group=1, topk_group=1)
    chosen = selection(source, tmp_path / "s.json", ids)
    moesaic.extract(source, chosen, tmp_path / "part")
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "part" / "model.safetensors")
    config = json.loads((tmp_path / "part" / "config.json").read_text())
    assert config["quantization_config"] == SETTINGS[kind]
    codes = {name for name, tensor in after.items() if tensor.dtype in (torch.uint8, torch.float8_e4m3fn, torch.int32)}
    assert codes
    for name in codes:
        head, dot, tail = name.partition(".experts.")
        number, _, rest = tail.partition(".")
        if dot and number.isdigit():
            expected = before[f"{head}.experts.{ids[int(number)]}.{rest}"]
        elif dot:
            expected = before[name][ids]
        else:
            expected = before[name]
        assert torch.equal(after[name].view(torch.uint8), expected.view(torch.uint8)), name
    moesaic.extract(in_bf16(source, tmp_path / "bf16"), selection(tmp_path / "bf16", chosen, ids), tmp_path / "other")
    numbers = read(tmp_path / "other")
    assert {name: tensor.tolist() for name, tensor in read(tmp_path / "part").items()} == {
        name: tensor.tolist() for name, tensor in numbers.items()
    }
    moesaic.merge_back(source, tmp_path / "part", tmp_path / "whole")
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    assert whole.keys() == before.keys()
    assert all(torch.equal(whole[name].view(torch.uint8), before[name].view(torch.uint8)) for name in before)


@pytest.mark.parametrize("kind", KINDS)
def test_growing_by_copies_moves_bytes_and_noise_dequantises(
    kind: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    result = moesaic.expand(sources[kind], tmp_path / "grown", experts=16)
    grown = open_checkpoint(tmp_path / "grown")
    assert grown.stored is not None
    count = count_shapes({name: info.shape for name, info in grown.tensors.items()}, grown.config)
    assert (result.parameters, result.active_parameters) == (count.total, count.active)
    moesaic.expand(in_bf16(sources[kind], tmp_path / "bf16"), tmp_path / "other", experts=16)
    ours, theirs = read(tmp_path / "grown"), read(tmp_path / "other")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    result = moesaic.expand(sources[kind], tmp_path / "noisy", experts=16, expert_op="copy_noise")
    assert any("dequantised" in line for line in result.notices)
    assert open_checkpoint(tmp_path / "noisy").stored is None


def test_trained_experts_go_back_into_a_dequantised_model(sources: dict[str, Path], tmp_path: Path) -> None:
    source = sources["mxfp4"]
    moesaic.extract(source, selection(source, tmp_path / "s.json", [0, 3]), tmp_path / "part")
    moesaic.merge_back(source, tmp_path / "part", tmp_path / "mean", average=0.5)
    mean, numbers = read(tmp_path / "mean"), read(source)
    assert "quantization_config" not in json.loads((tmp_path / "mean" / "config.json").read_text())
    assert all(torch.equal(mean[name], numbers[name]) for name in numbers)


def test_upcycling_dequantises_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = quantise(save_tiny(tmp_path / "base", "llama", dtype=torch.bfloat16), "fp8")
    options: dict[str, Any] = {"method": "sparse", "experts": 2}
    moesaic.upcycle(base, out=tmp_path / "moe", quiet=False, **options)
    assert "is quantised; its weights are dequantised" in capsys.readouterr().err
    moesaic.upcycle(in_bf16(base, tmp_path / "bf16"), out=tmp_path / "other", **options)
    ours, theirs = read(tmp_path / "moe"), read(tmp_path / "other")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("mxfp4", {"quant_method": "gptq"}, "quantised (gptq); there are readers for fp8 blocks, MXFP4, int4"),
        ("int4", {"format": "float-quantized"}, "compressed-tensors, format float-quantized"),
        (
            "int4",
            {"config_groups": {"a": {"weights": {"num_bits": 8, "type": "int"}}}},
            "symmetric integers of 4 bits",
        ),
        ("mxfp4", {"quant_method": "fp8"}, "no tensor has a \\*_scale_inv"),
    ],
)
def test_refusals(kind: str, change: dict[str, Any], words: str, sources: dict[str, Path], tmp_path: Path) -> None:
    for file in sources[kind].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] |= change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(MoesaicError, match=words.replace("(", "\\(").replace(")", "\\)")) as caught:
        open_checkpoint(tmp_path)
    assert "\n" not in str(caught.value)


def edited(source: Path, out: Path, edit: Any, **settings: Any) -> Path:
    """A copy whose tensors went through `edit`, and with other settings."""
    out.mkdir()
    for file in source.iterdir():
        (out / file.name).write_bytes(file.read_bytes())
    tensors = load_file(out / "model.safetensors")
    edit(tensors)
    save_file({name: one.contiguous() for name, one in tensors.items()}, out / "model.safetensors")
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"] |= settings
    (out / "config.json").write_text(json.dumps(config))
    return out


def change(end: str, how: Any) -> Any:
    """An edit of the first tensor of an expert whose name ends so; None takes it out."""

    def edit(tensors: dict[str, Tensor]) -> None:
        name = next(one for one in sorted(tensors) if "experts" in one and one.endswith(end))
        if how is None:
            del tensors[name]
        else:
            tensors[name] = how(tensors[name])

    return edit


def add_plain(tensors: dict[str, Tensor]) -> None:
    name = next(one for one in sorted(tensors) if one.endswith(("_blocks", "_packed")))
    tensors[name.rpartition("_")[0]] = torch.zeros(4, 4)


@pytest.mark.parametrize(
    ("kind", "edit", "words"),
    [
        (
            "fp8",
            change("_scale_inv", lambda one: one[:1]),
            r"no grid of blocks .* of weight_block_size \[16, 16\]",
        ),
        ("fp8", change("_scale_inv", lambda one: one.flatten()), "no grid of blocks"),
        ("fp8", change("_scale_inv", lambda one: one[:0]), "no grid of blocks"),
        ("fp8", change("proj.weight", lambda one: one.flatten()), "no grid of blocks"),
        ("fp8", change("proj.weight", None), "_scale_inv', but no"),
        ("mxfp4", change("_scales", lambda one: one[:, :1]), "as the blocks ask for"),
        ("mxfp4", change("_scales", None), "_blocks', but no '.*_scales'"),
        ("mxfp4", add_plain, "as it is and quantised"),
        ("int4", change("_scale", lambda one: one[:, :1]), "of config_groups' group_size"),
        ("int4", change("_scale", lambda one: one[:, :0]), "no groups of"),
        ("int4", change("_packed", lambda one: one.flatten()), "no groups of"),
        ("int4", change("_scale", None), "_packed', but no '.*_scale'"),
        ("int4", add_plain, "as it is and quantised"),
    ],
)
def test_codes_and_scales_that_do_not_fit_are_refused(
    kind: str, edit: Any, words: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    folder = edited(sources[kind], tmp_path / "edited", edit)
    with pytest.raises(MoesaicError, match=words) as caught:
        open_checkpoint(folder)
    assert "\n" not in str(caught.value)


def test_padded_columns_are_refused_where_numbers_are_read(sources: dict[str, Path], tmp_path: Path) -> None:
    folder = edited(sources["int4"], tmp_path / "edited", change("_shape", lambda one: one - 1))
    with pytest.raises(MoesaicError, match="no reader for padding"):
        read(folder)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        *(("fp8", {"weight_block_size": value}) for value in ([16], 16, [0, 0], "16", [16, 16, 16], [16.5, 16])),
        *((kind, {"modules_to_not_convert": "lm_head"}) for kind in ("fp8", "mxfp4")),
        *(("int4", {"config_groups": value}) for value in (None, [], {"a": 1}, {"a": {"weights": None}})),
        ("int4", {"ignore": "lm_head"}),
    ],
)
def test_settings_of_another_kind_are_refused_by_key(
    kind: str, settings: dict[str, Any], sources: dict[str, Path], tmp_path: Path
) -> None:
    folder = edited(sources[kind], tmp_path / "edited", lambda _: None, **settings)
    for place in (folder, folder / "config.json"):
        with pytest.raises(MoesaicError, match=rf"quantization_config.*{next(iter(settings))}") as caught:
            moesaic.plan(place)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_verbs_that_read_numbers_say_what_they_say_of_bf16(kind: str, sources: dict[str, Path], tmp_path: Path) -> None:
    results = {}
    ours = tmp_path / "ours"
    if kind == "fp8":  # half of DeepSeek's groups is too few
        tiny_quantised(ours, kind, n_group=1, topk_group=1)
    else:
        shutil.copytree(sources[kind], ours)
    for folder in (save_tokenizer(in_bf16(ours, tmp_path / "bf16")), save_tokenizer(ours)):
        (text := tmp_path / "text.txt").write_text("a b c d e f g h " * 40)
        selected = moesaic.select(folder, keep="50%", data=str(text), quiet=True)
        looked = moesaic.inspect(folder, tmp_path / f"{folder.name}-looked", data=[str(text)], clusters=0, quiet=True)
        grown = tmp_path / f"{folder.name}-grown"
        moesaic.expand(folder, grown, experts=16, quiet=True)
        checked = moesaic.verify(folder, grown, text=text, quiet=True)
        exported = moesaic.export(folder, tmp_path / f"{folder.name}-fused", layout="fused")
        results[folder.name] = (
            selected.kept,
            selected.scores,
            moesaic.generate(folder, "a b c", max_new_tokens=4),
            {name: tensor.tolist() for name, tensor in read(tmp_path / f"{folder.name}-fused").items()},
            checked.to_dict()["checks"],
        )
        assert looked is not None
        assert exported is not None
    assert results["ours"] == results["bf16"]
