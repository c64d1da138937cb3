"""The vLLM plugin against a registry of vLLM's form; vLLM itself runs in `make interop`."""

import importlib
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

from moesaic.families.dense_table import FAMILIES
from moesaic.modeling.auto import register_in_vllm


def test_every_checked_architecture_is_registered_once(monkeypatch):
    known: dict[str, str] = {}

    def register_model(name, place):
        assert name not in known
        known[name] = place

    registry = SimpleNamespace(register_model=register_model, get_supported_archs=lambda: known.keys())
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(ModelRegistry=registry))
    register_in_vllm()
    register_in_vllm()
    assert set(known) == {f"Moesaic{row.stem}ForCausalLM" for row in FAMILIES.values() if row.in_vllm}
    assert len(known) == 8
    assert not any("Gemma" in name or "Granite" in name for name in known), "vLLM's backend drops their multipliers"
    assert set(known.values()) == {"vllm.model_executor.models.transformers:TransformersMoEForCausalLM"}


def test_the_entry_point_names_it():
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    module, _, name = project["entry-points"]["vllm.general_plugins"]["moesaic"].partition(":")
    assert getattr(importlib.import_module(module), name) is register_in_vllm
