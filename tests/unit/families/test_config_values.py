"""A config.json is written by others: whatever a key holds, one line says what is wrong with it."""

import json
import math

import pytest
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from moesaic.checkpoint.source import open_checkpoint
from moesaic.common.errors import MoesaicError
from moesaic.families.config_values import ACTIVATIONS, ROPE_NEEDS, text_config
from moesaic.families.dense import detect
from moesaic.planning.run import plan
from tests.tiny_models import save_tiny, tiny_moe_model


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ours")
    tiny_moe_model("llama").save_pretrained(folder)
    return folder


def damaged(source, folder, **changes):
    """The same weights under a config with other values."""
    config = json.loads((source / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    return folder


def refusal(function, *arguments):
    with pytest.raises(MoesaicError) as caught:
        function(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_activations_are_those_of_transformers_that_have_no_weights():
    assert {name for name in ACT2FN if not list(ACT2FN[name].parameters())} == ACTIVATIONS


def test_the_kinds_of_rope_are_those_of_transformers():
    assert ROPE_NEEDS.keys() == ROPE_INIT_FUNCTIONS.keys() | {"default"}


SIZES = ["hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size"]
WRONG = [None, math.nan, "a", [48, 48], {}, True, 0, -1, 1.5]


@pytest.mark.parametrize("value", WRONG, ids=str)
@pytest.mark.parametrize("key", SIZES)
def test_sizes(llama, tmp_path, key, value):
    folder = damaged(llama, tmp_path, **{key: value})
    shown = json.dumps(value)
    for function in (lambda path: detect(open_checkpoint(path)), plan):
        message = refusal(function, folder)
        assert message.startswith(f"{folder}: config.json: {key} is {shown}, but must be a whole number of at least 1")


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("num_key_value_heads", "2", "must be a whole number of at least 1, or null"),
        ("head_dim", 0, "must be a whole number of at least 1, or null"),
        ("initializer_range", "a", "must be a number between 0.0 and 1.0"),
        ("initializer_range", -0.1, "must be a number between 0.0 and 1.0"),
        ("rms_norm_eps", None, "must be a number between 0.0 and 1.0"),
        ("max_position_embeddings", "long", "must be a whole number of at least 1"),
        ("tie_word_embeddings", "no", "must be true or false, or null"),
        ("mlp_bias", 2, "must be true or false"),
        ("attention_bias", [], "must be true or false"),
        ("layer_types", "full_attention", "must be a list of full_attention, "),
        ("layer_types", ["full_attention"], "1 entries, but num_hidden_layers is 2"),
        ("eos_token_id", "</s>", "must be a token id or a list of token ids, or null"),
        ("hidden_act", "frob", 'hidden_act is "frob", which is no activation of transformers; known: '),
        ("hidden_act", "silo", "did you mean 'silu'?"),
        ("hidden_act", ["silu"], 'hidden_act is ["silu"], which is no activation'),
        ("hidden_act", None, "hidden_act is null, which is no activation"),
        ("rope_parameters", "x", 'rope_parameters is "x", but must be keys and values, or null'),
        ("rope_parameters", {"rope_type": "frob"}, 'rope_parameters.rope_type is "frob", which transformers does not'),
        ("rope_parameters", {"rope_type": ["yarn"]}, 'rope_parameters.rope_type is ["yarn"], which transformers does'),
        ("rope_parameters", {"full_attention": {"rope_type": "x"}}, 'rope_parameters.full_attention.rope_type is "x"'),
        ("rope_parameters", {"rope_type": "yarn"}, "rope_parameters has rope_type yarn but no factor"),
        ("rope_parameters", {"rope_type": "linear", "factor": "2"}, 'rope_parameters.factor is "2", but must be a fin'),
        ("rope_parameters", {"rope_theta": "10"}, 'rope_parameters.rope_theta is "10", but must be a finite number'),
        ("rope_scaling", {"type": "su", "factor": 2.0}, 'rope_scaling.rope_type is "su", which transformers does not'),
        ("rope_theta", "10000", 'rope_theta is "10000", but must be a finite number'),
    ],
)
def test_other_values(llama, tmp_path, key, value, expected):
    message = refusal(detect, open_checkpoint(damaged(llama, tmp_path, **{key: value})))
    assert f"config.json: {key}" in message
    assert expected in message


@pytest.mark.parametrize("source", ["llama", "ours"])
def test_a_depth_that_no_file_can_have_is_refused_at_once(request, tmp_path, source):
    folder = damaged(request.getfixturevalue(source), tmp_path, num_hidden_layers=10**9)
    assert "num_hidden_layers is 1000000000; no machine holds more than 10,000" in refusal(plan, folder)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("num_experts", None, "has no num_experts"),
        ("num_experts", "six", 'num_experts is "six"'),
        ("moe_layers", 3, "moe_layers is 3, but must be a list of whole numbers"),
        ("moe_intermediate_size", [1], "moe_intermediate_size is [1]"),
        ("num_shared_experts", math.inf, "num_shared_experts is Infinity"),
        ("hidden_size", "a", 'hidden_size is "a"'),
    ],
)
def test_our_own_architecture(ours, tmp_path, key, value, expected):
    assert expected in refusal(plan, damaged(ours, tmp_path, **{key: value}))


def test_a_family_that_is_in_no_table(llama, tmp_path):
    folder = damaged(llama, tmp_path, model_type="gpt2", num_hidden_layers="x")
    assert 'config.json: num_hidden_layers is "x"' in refusal(plan, folder)


@pytest.mark.parametrize("base", ["llama", "gemma3_text", "phi3", "qwen3", "smollm3"])
def test_what_is_accepted_can_be_loaded(tmp_path, base):
    """Every key of a config with every kind of value: either refused here, or no trouble for transformers."""
    config = json.loads((save_tiny(tmp_path, base) / "config.json").read_text())
    accepted = 0
    for key in config.keys() - {"architectures", "model_type", "transformers_version", "dtype", "tie_word_embeddings"}:
        for value in ("x", None, [], {}, -1, 0, 1.5, True, ["frob", "frob"]):
            changed = {**config, key: value}
            try:
                text_config(changed)
            except MoesaicError:
                continue
            accepted += 1
            (tmp_path / "config.json").write_text(json.dumps(changed))
            AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    assert accepted > 10
