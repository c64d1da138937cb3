import json
import shlex
from pathlib import Path

import pytest
import yaml

from moesaic.cli.app import run
from moesaic.upcycling.recipe import Specialist, UpcycleRecipe
from moesaic.upcycling.run import upcycle
from tests.tiny_models import save_tiny


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("card")
    base, other = save_tiny(root / "base | <b>", "llama"), save_tiny(root / "other", "llama", seed=1)
    specialists = (Specialist(name="math", path=str(other)), Specialist(name="co de", path=str(other)))
    upcycle(UpcycleRecipe(base=str(base), method="divmoe", specialists=specialists), root / "out", quiet=True)
    return root / "out"


def test_the_card_says_how_to_make_the_same_again(made, tmp_path):
    text = (made / "README.md").read_text()
    (line,) = (line for line in text.splitlines() if line.startswith("moesaic upcycle "))
    arguments = shlex.split(line)
    assert arguments[3] == "OUT"
    assert run([*arguments[1:3], str(tmp_path / "again"), *arguments[4:], "--quiet"]) == 0
    for name in ("model.safetensors", "moesaic.json", "config.json", "README.md", "recipe.yaml"):
        assert (tmp_path / "again" / name).read_bytes() == (made / name).read_bytes()


def test_the_card_has_the_figures_and_escapes_names(made):
    _, front, text = (made / "README.md").read_text().split("---\n", maxsplit=2)
    bases = yaml.safe_load(front)["base_model"]
    assert yaml.safe_load(front)["library_name"] == "transformers"
    assert bases == [source["name"] for source in json.loads((made / "moesaic.json").read_text())["sources"]][:2]
    assert "<b>" not in text.split("```")[0]
    assert "| Routed experts per MoE layer | 4, 2 active per token |" in text
    assert "trust_remote_code=True" in text


def test_the_record_names_sources_and_statement(made):
    record = json.loads((made / "moesaic.json").read_text())
    assert [source["role"] for source in record["sources"]] == ["base", "math", "co de"]
    assert record["sources"][1]["weights_hash"] == record["sources"][2]["weights_hash"] is not None
    assert record["statement"]["code"] == "D2"  # both specialists are the same model
    assert record["recipe"]["router_init"] == "latin_square"
    assert record["seed"] == 0
