"""First values of `--shared-weights reinit`: those of the base's own class."""

import math

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from moesaic.upcycling.layers import class_value
from moesaic.upcycling.recipe import UpcycleRecipe
from moesaic.upcycling.run import upcycle

_TINY = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _model(model_type, **changes):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **_TINY, **changes))


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("gemma2", {"head_dim": 8}),
        ("olmo2", {}),
        ("granite_swa", {}),
        ("cohere", {"use_qk_norm": True}),
        ("stablelm", {"use_qkv_bias": True}),
    ],
)
def test_all_but_linear_and_embedding_weights_start_as_in_the_class(model_type, changes):
    model = _model(model_type, **changes)
    config = model.config.to_dict()
    drawn = set()
    for name, parameter in model.named_parameters():
        value = class_value(config, name, 7)
        if value is None:
            drawn.add(name.split(".")[-2])
        else:
            assert torch.equal(value, parameter.detach()), name
    maps = {"embed_tokens", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert drawn - {"lm_head"} == maps


def test_what_a_class_draws_depends_on_the_key_alone():
    config = _model("diffllama").config.to_dict()
    name = "model.layers.0.self_attn.lambda_q1"
    before = torch.random.get_rng_state()
    value = class_value(config, name, 7)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert value is not None
    assert value.shape == (8,)
    assert 0 < value.abs().max() < 0.1 * 5
    torch.manual_seed(3)
    again, other = class_value(config, name, 7), class_value(config, name, 8)
    assert again is not None
    assert other is not None
    assert torch.equal(value, again)
    assert not torch.equal(value, other)


def test_names_that_the_class_does_not_have():
    config = _model("llama").config.to_dict()
    assert class_value(config, "model.layers.0.mlp.shared_expert.gate_proj.weight", 0) is None
    assert class_value(config, "model.layers.0.mlp.gate.weight", 0) is None


@pytest.mark.parametrize(
    ("model_type", "changes"), [("granite_swa", {}), ("diffllama", {}), ("cohere", {"use_qk_norm": True})]
)
def test_families_with_parameters_beside_their_matrices(tmp_path, model_type, changes):
    model = _model(model_type, **changes)
    model.save_pretrained(tmp_path / "base")
    recipe = UpcycleRecipe(base=str(tmp_path / "base"), method="scratch", experts=4, shared_weights="reinit")
    for workers in (1, 4):
        upcycle(recipe, tmp_path / str(workers), quiet=True, workers=workers)
    one, four = (load_file(tmp_path / name / "model.safetensors") for name in ("1", "4"))
    assert all(torch.equal(value, four[name]) for name, value in one.items())
    for name, value in one.items():
        if "norm" in name:
            assert torch.equal(value, torch.ones_like(value)), name
        if name.endswith("sinks"):
            assert torch.equal(value, torch.zeros_like(value)), name
        if "lambda_" in name:
            assert 0.3 < value.std() / model.config.lambda_std_dev < 2, name
        assert math.isfinite(float(value.sum())), name
