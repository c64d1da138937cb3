"""Both spellings of rope in config.json: each version of transformers reads what the source said."""

import json
import tomllib
from pathlib import Path

import pytest
from transformers import AutoConfig

from moesaic.checkpoint.config_file import OLDEST_TRANSFORMERS, both_ropes, with_source_keys, write_config
from moesaic.families import shrink, support
from tests.tiny_models import BASES, tiny_config
from tests.tiny_moes import MOE_FAMILIES, tiny_moe

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("given", "added"),
    [
        ({}, {}),
        (
            {"rope_theta": 5e5},
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rope_scaling": None},
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}},
        ),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5}},
            {"rope_theta": 5e5, "rope_scaling": None, "partial_rotary_factor": 0.5},
        ),
        ({"rope_parameters": LLAMA3 | {"rope_theta": 5e5}}, {"rope_theta": 5e5, "rope_scaling": LLAMA3}),
        (
            {"model_type": "gemma3_text", "rope_theta": 1e6, "rope_local_base_freq": 1e4},
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                },
                "rope_scaling": None,
            },
        ),
        (
            {
                "model_type": "gemma3_text",
                "rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}},
            },
            {"rope_theta": 1e6, "rope_scaling": None, "rope_local_base_freq": 1e4},
        ),
    ],
)
def test_the_other_spelling_is_added_and_nothing_else(given, added):
    assert both_ropes(given) == given | added
    assert both_ropes(both_ropes(given)) == given | added
    assert both_ropes({"text_config": given})["text_config"] == given | added


@pytest.mark.parametrize("family", [*BASES, *MOE_FAMILIES])
def test_transformers_reads_the_same_rope_from_both(tmp_path, family):
    config = tiny_config(family) if family in BASES else tiny_moe(family).config
    for kind in config.rope_parameters, *config.rope_parameters.values():
        if isinstance(kind, dict) and "rope_theta" in kind:
            kind["rope_theta"] = 512345.0
    write_config(tmp_path, config.to_diff_dict())
    assert json.loads((tmp_path / "config.json").read_text())["rope_theta"] == 512345.0
    assert AutoConfig.from_pretrained(tmp_path).rope_parameters == config.rope_parameters


@pytest.mark.parametrize("family", support.tested())
def test_a_config_that_we_write_means_the_same_in_every_family(tmp_path, family):
    config = shrink.tiny_config(family)
    ropes = getattr(config, "rope_parameters", None) or {}
    for number, kind in enumerate(one for one in (ropes, *ropes.values()) if isinstance(one, dict)):
        if "rope_theta" in kind:
            kind["rope_theta"] = 512345.0 + number
    write_config(tmp_path, config.to_diff_dict())
    before, after = config.to_dict(), AutoConfig.from_pretrained(tmp_path).to_dict()
    assert after == before | {"_name_or_path": str(tmp_path)}


def test_ropes_by_kind_of_layer_have_an_older_spelling_only_in_families_of_transformers_4():
    ropes = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    config = {"model_type": "laguna", "rope_parameters": ropes}
    assert both_ropes(config) == config
    assert "rope_theta" in both_ropes(config | {"model_type": "moesaic_gemma3_text"})


def test_what_transformers_leaves_out_is_taken_over_and_what_a_result_says_itself_is_not():
    made = {"model_type": "llama", "rope_parameters": {"rope_theta": 5e5}, "dtype": "bfloat16"}
    source = {"rope_theta": 5e5, "torch_dtype": "float32", "unsloth_version": "1", "model_type": "x"}
    assert with_source_keys(made, source) == made | {"rope_theta": 5e5, "unsloth_version": "1"}


def test_the_version_of_transformers_that_is_named_is_the_one_that_is_required():
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert f"transformers>={OLDEST_TRANSFORMERS}" in project["dependencies"]
