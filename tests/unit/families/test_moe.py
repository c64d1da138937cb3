"""Expert tensors are found in every family and in both on-disk layouts."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from moesaic.checkpoint.source import open_checkpoint
from moesaic.common.errors import MoesaicError
from moesaic.families.moe import detect_moe
from tests.tiny_models import tiny_moe_model
from tests.tiny_moes import EXPERTS, MOE_FAMILIES, TOP_K, save_tiny_moe, tiny_moe


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_every_routed_parameter_is_found(tmp_path, family, fused):
    checkpoint = open_checkpoint(save_tiny_moe(tmp_path / "m", family, fused=fused))
    model = detect_moe(checkpoint)
    assert (model.num_experts, model.top_k, model.family.model_type) == (EXPERTS, TOP_K, family)
    found = {
        name for layer in model.layers for tensor in layer.expert_tensors for name in tensor.names(layer.num_experts)
    }
    shared = {name for layer in model.layers for name in layer.shared}
    blocks = (".mlp.", ".block_sparse_moe.", ".shared_mlp.")
    moe_layers = {layer.layer for layer in model.layers}
    expected = {
        name
        for name in checkpoint.tensors
        if any(block in name for block in blocks) and int(name.split("layers.")[1].split(".")[0]) in moe_layers
    }
    assert found | shared == expected
    assert not found & shared


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_counted_parameters_agree_with_the_model(tmp_path, family):
    checkpoint = open_checkpoint(save_tiny_moe(tmp_path / "m", family))
    on_disk = sum(
        _size(checkpoint.tensors[name].shape)
        for layer in detect_moe(checkpoint).layers
        for tensor in layer.expert_tensors
        if tensor.role not in {"router", "router_bias", "selection_bias"}
        for name in tensor.names(EXPERTS)
    )
    in_memory = sum(p.numel() for name, p in tiny_moe(family).named_parameters() if ".experts." in name)
    assert on_disk == in_memory


def test_dense_layers_are_left_out(tmp_path):
    checkpoint = open_checkpoint(save_tiny_moe(tmp_path / "m", "deepseek_v3"))
    assert [layer.layer for layer in detect_moe(checkpoint).layers] == [1]


@pytest.mark.parametrize(
    ("weighting", "scoring"), [("selected", "softmax"), ("all", "softmax"), ("sigmoid", "sigmoid")]
)
def test_our_scores_are_those_of_the_weighting(tmp_path, weighting, scoring):
    folder = tmp_path / "m"
    tiny_moe_model("llama", routing_weighting=weighting).save_pretrained(folder)
    assert detect_moe(open_checkpoint(folder)).family.scoring == scoring


def test_more_active_experts_than_there_are_is_refused(tmp_path):
    folder = save_tiny_moe(tmp_path / "m", "olmoe")
    config = json.loads((folder / "config.json").read_text()) | {"num_experts_per_tok": EXPERTS + 1}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        MoesaicError, match=f"num_experts_per_tok = {EXPERTS + 1}, but there are only {EXPERTS} experts"
    ):
        detect_moe(open_checkpoint(folder))


def test_a_missing_expert_is_named(tmp_path):
    folder = save_tiny_moe(tmp_path / "m", "olmoe")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.5.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(MoesaicError, match=r"layers\.1\.mlp\.experts\.5\.up_proj\.weight is missing"):
        detect_moe(open_checkpoint(folder))


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        ("layers.0.self_attn.q_proj.weight", r"tensor model\.layers\.0\.self_attn\.q_proj\.weight is missing"),
        ("layers.1.mlp.", "layer 1 has no FFN or experts"),
        ("layers.1.", "layer 1 has no tensors"),
        ("layers.1.mlp.experts.5.up_proj.weight", r"experts\.5\.up_proj\.weight is missing"),
        ("up_proj.weight", "no complete experts"),
    ],
)
def test_what_is_lost_is_named(tmp_path, lost, message):
    folder = save_tiny_moe(tmp_path / "m", "olmoe")
    tensors = {name: tensor for name, tensor in load_file(folder / "model.safetensors").items() if lost not in name}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(MoesaicError, match=message):
        detect_moe(open_checkpoint(folder))


@pytest.mark.parametrize("other", [torch.ones(3, 3), None])
def test_an_expert_of_another_shape_or_dtype_is_named(tmp_path, other):
    folder = save_tiny_moe(tmp_path / "m", "olmoe")
    tensors, name = load_file(folder / "model.safetensors"), "model.layers.1.mlp.experts.5.up_proj.weight"
    tensors[name] = tensors[name].bfloat16() if other is None else other
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(MoesaicError, match=r"experts\.5\.up_proj\.weight is (BF16|F32 \[3, 3\])"):
        detect_moe(open_checkpoint(folder))


@pytest.mark.parametrize(
    "values", [{"hidden_size": "32"}, {"num_hidden_layers": "2"}, {"num_hidden_layers": None}, {"rope_parameters": 5}]
)
def test_a_config_of_other_kinds_is_refused(tmp_path, values):
    folder = save_tiny_moe(tmp_path / "m", "olmoe")
    config = json.loads((folder / "config.json").read_text()) | values
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(MoesaicError, match=next(iter(values))):
        detect_moe(open_checkpoint(folder))


@pytest.mark.parametrize("fused", [False, True])
def test_another_number_of_experts_than_the_config_says(tmp_path, fused):
    folder = save_tiny_moe(tmp_path / "m", "mixtral", fused=fused)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_local_experts": 6}))
    with pytest.raises(MoesaicError, match=r"config\.json says 6 experts"):
        detect_moe(open_checkpoint(folder))


def test_a_dense_model_is_refused(tmp_path):
    folder = save_tiny_moe(tmp_path / "m", "mixtral")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    with pytest.raises(MoesaicError, match="'llama' is not an MoE family"):
        detect_moe(open_checkpoint(folder))


def _size(shape):
    total = 1
    for extent in shape:
        total *= extent
    return total
