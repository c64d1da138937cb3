"""Detection of dense checkpoints: every tensor accounted for, or one line that says what is wrong."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, Gemma3ForConditionalGeneration

from moesaic.checkpoint.reader import read_tensor
from moesaic.checkpoint.source import open_checkpoint
from moesaic.common.errors import MoesaicError
from moesaic.families.dense import detect
from moesaic.families.dense_table import FAMILIES
from tests.tiny_models import BASES, BASES_WITH_MLP_BIAS, save_tiny


def rewrite(folder: Path, function):
    file = folder / "model.safetensors"
    tensors = function(load_file(file))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, metadata={"format": "pt"})


def edit_config(folder: Path, **changes):
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config.update(changes)
    file.write_text(json.dumps({key: value for key, value in config.items() if value != "REMOVE"}))


def rows(part):
    return part.read()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("base", BASES)
def test_every_tensor_of_every_base_is_found(tmp_path, base, tied):
    save_tiny(tmp_path, base, tied=tied, max_shard_size="20KB")
    model = detect(open_checkpoint(tmp_path))
    stored = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert (model.family.model_type, model.num_layers, model.hidden, model.intermediate) == (base, 2, 32, 48)
    assert (model.tied, model.vocab, model.dtype, model.ffn_bias) == (tied, 96, "F32", False)
    assert (model.left_out, model.dropped, model.notices) == ((), (), ())
    for name, info in model.others.items():
        assert torch.equal(read_tensor(info), stored[name])
    assert ("lm_head.weight" in model.others) == (not tied)
    for index, ffn in enumerate(model.ffns):
        layer = f"model.layers.{index}.mlp."
        if model.family.fused_gate_up:
            gate, up = stored[f"{layer}gate_up_proj.weight"].chunk(2)
        else:
            gate, up = stored[f"{layer}gate_proj.weight"], stored[f"{layer}up_proj.weight"]
        assert torch.equal(rows(ffn.gate_ID), gate)
        assert torch.equal(rows(ffn.up_ID), up)
        assert torch.equal(rows(ffn.down_DI), stored[f"{layer}down_proj.weight"])
    ffn_names = {f"model.layers.{i}.mlp" for i in range(2)}
    outside = {n for n in stored if n.rsplit(".", 2)[0] not in ffn_names and not (tied and n == "lm_head.weight")}
    assert set(model.others) == outside


@pytest.mark.parametrize("base", BASES_WITH_MLP_BIAS)
def test_ffn_biases(tmp_path, base):
    save_tiny(tmp_path, base, mlp_bias=True)
    model = detect(open_checkpoint(tmp_path))
    stored = load_file(tmp_path / "model.safetensors")
    assert model.ffn_bias
    ffn = model.ffns[1]
    for name, part in (("gate", ffn.gate_bias_I), ("up", ffn.up_bias_I), ("down", ffn.down_bias_D)):
        assert torch.equal(rows(part), stored[f"model.layers.1.mlp.{name}_proj.bias"])


@pytest.fixture
def wrapper(tmp_path):
    """A tiny Gemma-3 with its vision tower, saved as transformers saves it."""
    config: Any = AutoConfig.for_model("gemma3")
    text = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    text |= {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": 96, "sliding_window": 8, "pad_token_id": 0}
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    config = type(config)(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=95)
    Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path)
    return tmp_path


def old_layout(tensors):
    """The names of the Gemma-3 files on the hub: `language_model.model.`, a head of its own prefix."""
    renamed = {}
    for name, tensor in tensors.items():
        if name.startswith("model.language_model."):
            renamed["language_model.model." + name.removeprefix("model.language_model.")] = tensor
        else:
            renamed[name.removeprefix("model.")] = tensor
    return renamed


def new_layout(tensors):
    """The names that transformers 5 uses in memory: `model.language_model.`."""
    renamed = {}
    for name, tensor in tensors.items():
        if name.startswith("language_model.model."):
            renamed["model.language_model." + name.removeprefix("language_model.model.")] = tensor
        else:
            renamed[name if name.startswith("model.") else "model." + name] = tensor
    return renamed


@pytest.mark.parametrize("layout", [old_layout, new_layout])
def test_the_text_model_inside_a_multimodal_wrapper(wrapper, layout):
    rewrite(wrapper, layout)
    model = detect(open_checkpoint(wrapper))
    assert model.family.model_type == "gemma3_text"
    assert model.config["model_type"] == "gemma3_text"
    assert model.tied
    assert (
        model.prefix == {"old_layout": "language_model.model.", "new_layout": "model.language_model."}[layout.__name__]
    )
    assert "model.layers.1.self_attn.q_norm.weight" in model.others
    assert model.left_out
    assert all("vision" in name or "projector" in name for name in model.left_out)
    assert len(model.notices) == 1
    assert "only the text model is used" in model.notices[0]


def test_config_keys_that_are_left_out_have_the_classs_defaults(wrapper):
    """Released Gemma-3 files name only what differs from the class: no heads, no vocabulary, no tie flag."""
    config = json.loads((wrapper / "config.json").read_text())
    text = {k: config["text_config"][k] for k in ("hidden_size", "intermediate_size", "num_hidden_layers")}
    text |= {k: config["text_config"][k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim")}
    edit_config(wrapper, text_config=text, tie_word_embeddings="REMOVE")
    model = detect(open_checkpoint(wrapper))
    assert model.vocab == 96
    assert model.tied


def test_a_stored_copy_of_the_tied_embedding_is_dropped(tmp_path):
    save_tiny(tmp_path, "llama", tied=True)
    rewrite(tmp_path, lambda t: {**t, "lm_head.weight": t["model.embed_tokens.weight"].clone()})
    model = detect(open_checkpoint(tmp_path))
    assert model.tied
    assert model.dropped == ("lm_head.weight",)
    assert "lm_head.weight" not in model.others
    assert "lm_head.weight" in model.notices[0]


def test_a_head_that_differs_is_not_tied_as_in_transformers(tmp_path):
    save_tiny(tmp_path, "llama", tied=True)
    rewrite(tmp_path, lambda t: {**t, "lm_head.weight": t["model.embed_tokens.weight"] + 1})
    model = detect(open_checkpoint(tmp_path))
    assert not model.tied
    assert model.config["tie_word_embeddings"] is False
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not torch.equal(loaded.lm_head.weight, loaded.model.embed_tokens.weight)


def test_recomputed_buffers_are_dropped_with_a_notice(tmp_path):
    save_tiny(tmp_path, "llama")
    rewrite(tmp_path, lambda t: {**t, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    model = detect(open_checkpoint(tmp_path))
    assert model.dropped == ("model.layers.0.self_attn.rotary_emb.inv_freq",)
    assert "not carried along" in model.notices[0].replace("\n", " ")


def test_a_body_saved_without_its_prefix(tmp_path):
    save_tiny(tmp_path, "qwen2", tied=True)
    rewrite(tmp_path, lambda t: {name.removeprefix("model."): tensor for name, tensor in t.items()})
    model = detect(open_checkpoint(tmp_path))
    assert model.prefix == ""
    assert "model.norm.weight" in model.others


def refusal(folder) -> str:
    with pytest.raises(MoesaicError) as caught:
        detect(open_checkpoint(folder))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def without(name):
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


@pytest.mark.parametrize(
    "name",
    ["model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.k_proj.weight", "model.norm.weight"],
)
def test_a_missing_tensor_is_named(tmp_path, name):
    save_tiny(tmp_path, "llama")
    rewrite(tmp_path, without(name))
    assert f"missing tensor {name}" in refusal(tmp_path)


def test_missing_head_and_embedding_have_their_own_message(tmp_path):
    save_tiny(tmp_path / "a", "llama")
    rewrite(tmp_path / "a", without("lm_head.weight"))
    assert "lm_head.weight is missing although config.json does not tie it" in refusal(tmp_path / "a")
    save_tiny(tmp_path / "b", "llama", tied=True)
    rewrite(tmp_path / "b", without("model.embed_tokens.weight"))
    assert "no token embedding found" in refusal(tmp_path / "b")


def test_unexpected_tensors_are_named(tmp_path):
    save_tiny(tmp_path, "llama")
    rewrite(tmp_path, lambda t: {**t, **{f"model.layers.{i}.adapter.weight": torch.ones(2) for i in range(5)}})
    message = refusal(tmp_path)
    assert "unexpected tensors model.layers.0.adapter.weight" in message
    assert "and 2 more" in message


def test_layers_beyond_the_config_and_wrong_shapes_are_named(tmp_path):
    save_tiny(tmp_path, "llama")
    edit_config(tmp_path, num_hidden_layers=1)
    assert "unexpected tensors model.layers.1." in refusal(tmp_path)
    edit_config(tmp_path, num_hidden_layers=2, intermediate_size=64)
    assert "has shape [48, 32], but config.json asks for [64, 32]" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("gpt2", {}, "gpt2 cannot be a base: its FFN has no gate"),
        ("mamba", {}, "mamba cannot be a base: it is a state-space or recurrent model"),
        ("bert", {}, "bert cannot be a base: it is an encoder"),
        ("bitnet", {}, "it normalises inside the FFN"),
        ("mixtral", {"num_local_experts": 4}, "mixtral is already a mixture of experts"),
        ("moesaic_llama", {"num_experts": 8}, "moesaic_llama is already a mixture of experts"),
        ("something_new", {}, "it is not in the table of families; families that work:"),
        ("REMOVE", {}, "the config names no model_type"),
    ],
)
def test_what_cannot_be_a_base_is_refused_with_the_reason(tmp_path, model_type, changes, message):
    save_tiny(tmp_path, "llama")
    edit_config(tmp_path, model_type=model_type, **changes)
    text = refusal(tmp_path)
    assert message in text
    assert model_type == "REMOVE" or "mixture" in text or all(family in text for family in FAMILIES)


def test_an_option_outside_the_table_is_refused(tmp_path):
    save_tiny(tmp_path, "llama")
    edit_config(tmp_path, model_type="stablelm", qk_layernorm=True)
    assert "stablelm with qk_layernorm=True is not supported" in refusal(tmp_path)


def test_weights_that_are_no_floats_are_named(tmp_path):
    save_tiny(tmp_path, "llama")
    rewrite(tmp_path, lambda tensors: tensors | {"model.norm.weight": torch.ones(32, dtype=torch.int32)})
    with pytest.raises(MoesaicError, match=r"model\.norm\.weight is I32, and weights must be one of F64, F32, BF16"):
        detect(open_checkpoint(tmp_path))


def test_a_tie_that_the_file_breaks_is_said(tmp_path):
    save_tiny(tmp_path, "llama")
    edit_config(tmp_path, tie_word_embeddings=True)
    model = detect(open_checkpoint(tmp_path))
    assert not model.tied
    assert "ties the output head to the embedding, but the file has a head that differs" in model.notices[0]
