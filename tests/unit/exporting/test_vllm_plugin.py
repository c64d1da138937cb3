"""The vLLM plugin against a registry of vLLM's form; vLLM itself runs in `make interop`."""

import importlib
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

from moesaic.exporting import vllm_plugin
from moesaic.modeling.names import STEMS


def test_every_checked_architecture_is_registered_once(monkeypatch):
    known: dict[str, str] = {}

    def register_model(name, place):
        assert name not in known
        known[name] = place

    registry = SimpleNamespace(register_model=register_model, get_supported_archs=lambda: known.keys())
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(ModelRegistry=registry))
    vllm_plugin.register()
    vllm_plugin.register()
    assert set(known) == {f"Moesaic{STEMS[base]}ForCausalLM" for base in vllm_plugin.CHECKED}
    assert not any("Gemma" in name or "Granite" in name for name in known), "vLLM's backend drops their multipliers"
    assert set(known.values()) == {"vllm.model_executor.models.transformers:TransformersMoEForCausalLM"}


def test_the_entry_point_names_it():
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    module, _, name = project["entry-points"]["vllm.general_plugins"]["moesaic"].partition(":")
    assert getattr(importlib.import_module(module), name) is vllm_plugin.register
