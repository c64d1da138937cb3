"""Every family of the table, from its own class to an MoE and back to its function: upcycle, verify, load, generate."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import moesaic
from moesaic.families.dense_table import FAMILIES
from moesaic.modeling.names import STEMS
from moesaic.verifying.run import verify
from tests.tiny_models import BASES, SIZES, randomize

TINY = {**SIZES, "vocab_size": 96, "eos_token_id": None}


def test_every_family_has_an_architecture():
    assert set(STEMS) == set(FAMILIES)
    classes = {name: type(AutoConfig.for_model(name)).__name__ for name in FAMILIES}
    assert {name: f"{stem}Config" for name, stem in STEMS.items()} == classes


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in BASES])
def test_a_family_outside_the_main_list_becomes_an_equal_moe(tmp_path, family):
    config = AutoConfig.for_model(family, **TINY)
    model = AutoModelForCausalLM.from_config(config)
    randomize(model, seed=0)
    model.save_pretrained(tmp_path / "base")
    same = {"a": tmp_path / "base", "b": tmp_path / "base"}
    moesaic.upcycle(tmp_path / "base", tmp_path / "moe", method="divmoe", specialists=same, quiet=True, workers=1)
    report = verify(tmp_path / "base", tmp_path / "moe", quiet=True)
    assert report.code == "D2"
    assert report.ok, report.lines()
    assert torch.equal(_continuation(tmp_path / "base"), _continuation(tmp_path / "moe"))


def _continuation(folder):
    model: Any = moesaic.load(folder)
    return model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=5, do_sample=False)
