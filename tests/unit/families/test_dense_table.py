"""Every row of the table against the class of the same name in transformers, on tiny random models."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from moesaic.families.config_values import text_config
from moesaic.families.dense_table import FAMILIES, ffn_shapes, is_tied, other_shapes

TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# head_dim * heads != hidden shows whether a row confuses the two; these classes tie the two sizes together.
SQUARE = {"helium", "olmo", "cohere2", "stablelm", "diffllama", "hunyuan_v1_dense", "olmo2", "olmo3", "granite"}


def tiny_model(model_type: str, **changes):
    sizes = {**TINY, **({} if model_type in SQUARE else {"head_dim": 24}), **changes}
    config = AutoConfig.for_model(model_type, **sizes)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


def variants():
    for name, family in FAMILIES.items():
        yield name, {}
        yield name, {"tie_word_embeddings": not family.tied}
        for part in family.optional:
            yield name, {part.key: not part.default}
        if family.ffn_bias_key:
            yield name, {family.ffn_bias_key: True}


@pytest.mark.parametrize(("name", "changes"), list(variants()), ids=lambda v: str(v))
def test_tensors_and_shapes_are_those_of_the_class(name, changes):
    model = tiny_model(name, **changes)
    assert type(model).__name__ == FAMILIES[name].causal_class
    family, config = text_config(model.config.to_dict())
    expected = other_shapes(family, config)
    for layer in range(2):
        expected |= {f"model.layers.{layer}.{n}": s for n, s in ffn_shapes(family, config).items()}
    actual = {n: tuple(p.shape) for n, p in model.named_parameters()}
    assert expected == actual


@pytest.mark.parametrize("name", FAMILIES)
def test_defaults_are_those_of_the_config_class(name):
    family = FAMILIES[name]
    plain = type(AutoConfig.for_model(name))()
    given = dict(family.defaults)
    assert given == {k: getattr(plain, k) for k in given}
    assert family.tied == plain.tie_word_embeddings == is_tied(family, {})
    assert family.activation == getattr(plain, family.activation_key)
    for part in family.optional:
        assert part.default == getattr(plain, part.key)
    heads = getattr(plain, "num_key_value_heads", None)
    assert family.defaults.get("num_key_value_heads", plain.num_attention_heads) == heads


@pytest.mark.parametrize("name", FAMILIES)
def test_ffn_is_down_of_activation_of_gate_times_up(name):
    """The one assumption upcycling makes about a family's FFN, on the class itself."""
    family = FAMILIES[name]
    model = tiny_model(name)
    mlp = model.eval().model.layers[0].mlp
    state = {k: v.double() for k, v in model.state_dict().items()}
    if family.fused_gate_up:
        gate, up = state[f"model.layers.0.{family.fused_gate_up}.weight"].chunk(2)
    else:
        gate, up = (state[f"model.layers.0.{n}.weight"] for n in (family.gate, family.up))
    down = state[f"model.layers.0.{family.down}.weight"]
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    activation = {"silu": torch.nn.functional.silu, "gelu_pytorch_tanh": _gelu_tanh}[family.activation]
    torch.testing.assert_close(mlp.double()(x), (activation(x @ gate.T) * (x @ up.T)) @ down.T)


def _gelu_tanh(x):
    return torch.nn.functional.gelu(x, approximate="tanh")
