"""Sizes that no machine has, or that a checkpoint's tensors cannot hold, are refused before anything is built."""

import json

import pytest

from moesaic.common.errors import MoesaicError
from moesaic.families.config_values import MOST, check_values, refuse_giant
from moesaic.loading import load
from tests.tiny_models import save_tiny
from tests.tiny_moes import save_tiny_moe


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    return save_tiny(folder / "dense", "llama"), save_tiny_moe(folder / "moe", "olmoe")


@pytest.mark.parametrize("key", sorted(MOST))
def test_a_size_that_no_machine_has(key):
    refuse_giant({key: MOST[key]}, "config.json")
    with pytest.raises(MoesaicError, match=rf"config\.json: {key} is {MOST[key] + 1}; no machine holds more than"):
        refuse_giant({key: MOST[key] + 1}, "config.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000; no machine"),
        ({"vocab_size": 10**10}, "vocab_size is 10000000000; no machine"),
        ({"num_hidden_layers": 9999}, "num_hidden_layers is 9999, but the checkpoint has only"),
        ({"vocab_size": 10**8}, "vocab_size 100000000 times hidden_size .* the two do not belong together"),
        ({"hidden_act": "no_such"}, "transformers cannot use a value in it .*no_such"),
    ],
)
def test_a_model_is_not_built_for_another_config(saved, change, message):
    for folder in saved:
        file = folder / "config.json"
        before = file.read_text()
        file.write_text(json.dumps(json.loads(before) | change))
        with pytest.raises(MoesaicError, match=message) as caught:
            load(folder)
        file.write_text(before)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_size": 33, "num_attention_heads": 2}, "hidden_size is 33, which num_attention_heads 2 does not"),
        ({"num_attention_heads": 6, "num_key_value_heads": 4}, "num_attention_heads is 6, which num_key_value_heads 4"),
    ],
)
def test_heads_divide_what_is_dealt_to_them(config, message):
    with pytest.raises(MoesaicError, match=message):
        check_values(config, "config.json")
    check_values(config | {"kv_lora_rank": 8}, "config.json")  # latent: neither is dealt out
