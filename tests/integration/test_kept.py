"""What every verb that writes a checkpoint keeps of its source: rope in both spellings, `use_cache`, the token ids."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

import moesaic
from moesaic.checkpoint.same_tokens import TRAPS, ids_of
from moesaic.common.recipe import load_recipe
from moesaic.training.recipe import TrainRecipe
from moesaic.training.run import train
from tests.tiny_models import save_tiny
from tests.tiny_training import tiny_recipe, write_documents

SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+"


def save_olmo2_tokenizer(folder: Path) -> None:
    """Bytes and a few merges, split as OLMo-2 does, under the class name that OLMo-2's tokenizer_config.json has."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [("1", "2"), ("12", "3"), ("123", "4"), ("\u0120", "s"), ("e", "s"), ("\u0120", "\u0120")]
    names = ["<|end|>", *alphabet, *map("".join, pairs)]
    backend = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, pairs))
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|end|>", "bos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def as_version_4(folder: Path, *, use_cache: bool) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope["rope_theta"], "rope_scaling": None, "torch_dtype": config.pop("dtype")}
    path.write_text(json.dumps(config | {"use_cache": use_cache}))


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """A dense base in the spelling of transformers 4, and what every verb makes of it."""
    folder = tmp_path_factory.mktemp("kept")
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    base = save_tiny(folder / "base", "olmo2", vocab_size=320, rope_parameters=rope)
    save_olmo2_tokenizer(base)
    as_version_4(base, use_cache=True)
    moesaic.upcycle(base, folder / "upcycle", method="sparse", experts=4, top_k=2)
    moesaic.expand(folder / "upcycle", folder / "expand", experts=6)
    selection = moesaic.select(folder / "upcycle", keep=2, method="random")
    moesaic.extract(folder / "upcycle", selection, folder / "extract")
    moesaic.merge_back(folder / "upcycle", folder / "extract", folder / "merge-back")
    moesaic.export(folder / "upcycle", folder / "export-ours", to="moesaic", dtype="bfloat16")
    data = write_documents(folder / "math.jsonl", "math", number=40, seed=0)
    for source in ("base", "upcycle"):
        train(load_recipe(TrainRecipe, recipe(folder / source, data)), folder / f"train-{source}")
    llama = save_tiny(folder / "llama", "llama", vocab_size=320, rope_parameters=rope)
    save_olmo2_tokenizer(llama)
    as_version_4(llama, use_cache=False)
    moesaic.upcycle(llama, folder / "upcycle-llama", method="sparse", experts=4, top_k=2)
    moesaic.export(folder / "upcycle-llama", folder / "export-native", to="mixtral")
    return folder


def recipe(model: Path, data: Path) -> dict[str, Any]:
    return {
        "model": str(model),
        "data": {"sequence_length": 32, "sources": [{"path": str(data)}]},
        "optimizer": {"lr": 1e-3},
        "batch": {"tokens": 64},
        "budget": {"steps": 1},
        "precision": "fp32",
    }


OLMO = ("upcycle", "expand", "extract", "merge-back", "export-ours", "train-base", "train-upcycle")
LLAMA = ("upcycle-llama", "export-native")


@pytest.mark.parametrize("name", [*OLMO, *LLAMA])
def test_every_verb_keeps_rope_in_both_spellings_and_use_cache(written, name):
    config = json.loads((written / name / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 500000.0
    assert config["rope_scaling"] is None
    assert config["use_cache"] is (name not in LLAMA)
    card = (written / name / "README.md").read_text()
    assert ("transformers 5.24 or newer" in card) == ("auto_map" in config)


@pytest.mark.parametrize("name", [*OLMO, *LLAMA])
def test_the_card_s_code_loads_the_result(written, name, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path))
    card = (written / name / "README.md").read_text()
    code = card.rpartition("```python\n")[2].partition("```")[0]
    made: dict[str, Any] = {}
    exec(code.replace('"OUT"', repr(str(written / name))), made)
    assert ("trust_remote_code" in code) == (name not in ("train-base", "export-native"))
    assert made["model"].num_parameters() == AutoModelForCausalLM.from_pretrained(written / name).num_parameters()
    assert ids_of(made["tokenizer"]) == ids_of(AutoTokenizer.from_pretrained(written / name))


@pytest.mark.parametrize("name", [*OLMO, *LLAMA])
def test_every_verb_keeps_the_token_ids(written, name):
    """Llama takes the class that is written, and Mixtral takes tokenizer.json at its word, whatever the class."""
    source = AutoTokenizer.from_pretrained(written / ("llama" if name in LLAMA else "base"))
    assert ids_of(AutoTokenizer.from_pretrained(written / name)) == ids_of(source)


def test_these_traps_tell_the_two_classes_apart(written, tmp_path):
    """The copied files alone would be read as GPT-2's: without the class that is named, the ids are others."""
    shutil.copytree(written / "upcycle", tmp_path / "moe")
    shutil.copyfile(written / "base" / "tokenizer_config.json", tmp_path / "moe" / "tokenizer_config.json")
    source = AutoTokenizer.from_pretrained(written / "base")
    assert ids_of(AutoTokenizer.from_pretrained(tmp_path / "moe")) != ids_of(source)
    record = json.loads((written / "upcycle" / "moesaic.json").read_text())
    assert "tokenizer.json" in record["copied_files"]
    assert "tokenizer_config.json" not in record["copied_files"]
    assert len(TRAPS) == len(ids_of(source))


def test_a_scratch_model_of_a_tokenizer_with_a_class_that_misleads(written, tmp_path, monkeypatch):
    monkeypatch.setenv("MOESAIC_CACHE", str(tmp_path / "cache"))
    values = tiny_recipe(tmp_path / "in", tokenizer=str(written / "base"), budget={"steps": 2})
    values["model"] = {**values["model"], "config": {**values["model"]["config"], "vocab_size": 320}}
    train(load_recipe(TrainRecipe, values), tmp_path / "out")
    source = AutoTokenizer.from_pretrained(written / "base")
    assert ids_of(AutoTokenizer.from_pretrained(tmp_path / "out")) == ids_of(source)
