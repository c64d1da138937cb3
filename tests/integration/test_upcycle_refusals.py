"""What cannot work is refused before anything is written, in one line that names the flag, key or tensor."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moesaic.common.errors import MoesaicError
from moesaic.upcycling.recipe import Specialist, UpcycleRecipe
from moesaic.upcycling.run import upcycle
from tests.tiny_models import save_tiny


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    root = tmp_path_factory.mktemp("pristine")
    for seed in range(5):
        save_tiny(root / str(seed), "llama", seed=seed)
        write_tokenizer(root / str(seed))
    return root


@pytest.fixture
def folders(pristine, tmp_path):
    """A base and four specialists that a test may damage."""
    shutil.copytree(pristine, tmp_path / "sources")
    return [tmp_path / "sources" / str(seed) for seed in range(5)]


def write_tokenizer(folder: Path, **changes: Any) -> None:
    tokenizer = {
        "added_tokens": [{"id": 2, "content": "</s>"}],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel"},
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "</s>": 2, "ab": 3}, "merges": [["a", "b"]]},
        **changes,
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_weights(folder: Path, change: Any) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def recipe_for(folders: list[Path], method: Any = "divmoe", **more: Any) -> UpcycleRecipe:
    specialists = ()
    if method in ("btx", "divmoe"):
        specialists = tuple(Specialist(name=f"s{i}", path=str(folder)) for i, folder in enumerate(folders[1:]))
    return UpcycleRecipe(**{"base": str(folders[0]), "method": method, "specialists": specialists, **more})


def refusal(recipe: UpcycleRecipe, tmp_path: Path, *, out: Path | None = None) -> str:
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(MoesaicError) as caught:
        upcycle(recipe, out or tmp_path / "out", quiet=True)
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    return str(caught.value)


# --- flags ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "more", "expected"),
    [
        ("divmoe", {"specialists": ()}, "needs at least 2, got 0: give --specialist NAME=PATH"),
        ("sparse", {"specialists": (Specialist(name="math", path="x"),)}, "--specialist math: --method sparse makes"),
        ("divmoe", {"shards": 5}, "--shards 5: does not divide the base's FFN width 48; 1, 2, 3, 4, 6"),
        ("sparse", {"shards": 2}, "--shards 2: --method sparse keeps every FFN whole"),
        ("btx", {"shards": 2}, "--shards 2: --method btx keeps every FFN whole"),
        ("virtual_group", {"experts": 7, "shards": 2}, "--experts 7: must be a multiple of --shards 2"),
        ("divmoe", {"experts": 9}, "--experts 9: --method divmoe makes 8 experts from 4 specialists"),
        ("btx", {"experts": 3}, "--experts 3: --method btx makes 4 experts from 4 specialists"),
        ("sparse", {"experts": 4, "top_k": 5}, "--top-k 5: --routing topk has only 4 experts"),
        ("divmoe", {"top_k": 5}, "--top-k 5: --routing one_per_group has only 4 groups"),
        ("btx", {"top_k": 5}, "--top-k 5: --routing topk has only 4 experts"),
        ("sparse", {"routing": "one_per_group"}, "--routing one_per_group: with whole FFNs (--shards 1)"),
        ("btx", {"routing": "one_per_group"}, "--routing one_per_group: with whole FFNs (--shards 1)"),
        ("drop", {"routing": "one_per_group", "shards": 2, "experts": 7}, "must be a multiple of --shards 2"),
        (
            "divmoe",
            {"router_init": "latin_square", "shards": 3},
            "--shards 3 does not divide the number of domains (4)",
        ),
        ("drop", {"router_init": "tied", "shards": 2, "experts": 7}, "does not divide the number of experts (7)"),
        ("drop", {"shared_weights": "reinit"}, "--shared-weights reinit: random weights everywhere are for"),
        ("sparse", {"shared_weights": "random-specialist"}, "--method sparse has no specialists"),
        (
            "sparse",
            {"drop_ratio": 0.3},
            "--drop-ratio 0.3: --method sparse does not use it; leave it out, or use --meth",
        ),
        ("divmoe", {"drop_indices": "per-matrix"}, "--drop-indices per-matrix: --method divmoe does not use it"),
        ("sparse", {"layers": "every:3"}, "--layers every:3: no layer would become MoE"),
        ("sparse", {"layers": "0-2"}, "--layers 0-2: the base has no layer 2; its 2 layers are 0 to 1"),
        ("sparse", {"layers": "1-0"}, "--layers 1-0: the range 1-0 runs backwards"),
        ("sparse", {"layers": "odd"}, "--layers odd: cannot read 'odd'"),
        ("sparse", {"layers": ""}, "--layers : cannot read ''"),
        ("sparse", {"shard_size": "5 parsecs"}, "--shard-size 5 parsecs: not a size"),
        ("sparse", {"base": "no/such/folder/here"}, "no/such/folder/here"),
    ],
)
def test_flags(folders, tmp_path, method, more, expected):
    assert expected in refusal(recipe_for(folders, method, **more), tmp_path)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"drop_ratio": 1.5}, "drop_ratio must be between 0 and 1"),
        ({"drop_ratio": -0.1}, "drop_ratio must be between 0 and 1"),
        ({"drop_ratio": float("nan")}, "drop_ratio must be between 0 and 1"),
        ({"router_std": -1.0}, "router_std must be a finite number"),
        ({"router_std": float("inf")}, "router_std must be a finite number"),
        ({"experts": 0}, "experts must be at least 1, got 0"),
        ({"shards": 0}, "shards must be at least 1, got 0"),
        ({"top_k": 0}, "top_k must be at least 1, got 0"),
        ({"shared_experts": -1}, "shared_experts must not be negative, got -1"),
        ({"seed": -1}, "seed must not be negative, got -1"),
        ({"specialists": (Specialist(name="a", path="x"),) * 2}, "different names, but a is given more than once"),
    ],
)
def test_values_that_are_wrong_for_every_checkpoint(changes, expected):
    with pytest.raises(MoesaicError, match=expected):
        UpcycleRecipe(base="base", method="drop", **changes)


# --- sources ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.down_proj.weight", "model.layers.0.self_attn.k_proj.weight", "lm_head.weight"]
)
def test_a_missing_tensor_is_named(folders, tmp_path, name):
    change_weights(folders[3], lambda tensors: tensors.pop(name))
    message = refusal(recipe_for(folders), tmp_path)
    assert message.startswith("--specialist s2: ")
    assert name in message


def test_a_missing_layer_is_named(folders, tmp_path):
    def drop(tensors):
        for name in [name for name in tensors if name.startswith("model.layers.1.")]:
            del tensors[name]

    change_weights(folders[1], drop)
    assert "model.layers.1." in refusal(recipe_for(folders), tmp_path)
    change_config(folders[1], num_hidden_layers=1)
    assert "num_hidden_layers is 1 and in the base 2" in refusal(recipe_for(folders), tmp_path)


def test_a_wrong_shape_is_named(folders, tmp_path):
    name = "model.layers.0.mlp.up_proj.weight"
    change_weights(folders[0], lambda tensors: tensors.update({name: torch.zeros(47, 32)}))
    assert name in refusal(recipe_for(folders), tmp_path)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rms_norm_eps": 1e-3}, "rms_norm_eps is 0.001 and in the base 1e-06"),
        ({"hidden_act": "gelu"}, 'hidden_act is "gelu" and in the base "silu"'),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "rope rope_theta is 500000.0"),
        ({"rope_parameters": None, "rope_theta": 5e5}, "rope rope_theta is 500000.0 and in the base 10000.0"),
        ({"sliding_window": 7}, None),
    ],
)
def test_a_config_field_that_differs_is_named(folders, tmp_path, changes, expected):
    change_config(folders[2], **changes)
    if expected is None:  # only one of the two names it: said, not refused
        notices = upcycle(recipe_for(folders), tmp_path / "out", quiet=True).notices
        assert any("sliding_window" in line for line in notices)
    else:
        message = refusal(recipe_for(folders), tmp_path)
        assert message.startswith("--specialist s1 (")
        assert expected in message


def test_all_fields_that_differ_are_named(folders, tmp_path):
    change_config(folders[2], rms_norm_eps=1e-3, hidden_act="gelu")
    message = refusal(recipe_for(folders), tmp_path)
    assert "rms_norm_eps" in message
    assert "hidden_act" in message


@pytest.mark.parametrize(
    ("base", "changes", "expected"),
    [
        ("llama", {"vocab_size": 100}, "vocab_size is 100 and in the base 96"),
        ("llama", {"num_key_value_heads": 4}, "num_key_value_heads is 4 and in the base 2"),
        ("llama", {"head_dim": 16}, "head_dim is 16 and in the base 8"),
        ("llama", {"intermediate_size": 96}, "intermediate_size is 96 and in the base 48"),
        ("llama", {"hidden_size": 64}, "hidden_size is 64 and in the base 32"),
        ("llama", {"tied": True}, "tie_word_embeddings is true and in the base false"),
        ("llama", {"mlp_bias": True}, "mlp_bias is true and in the base false"),
        ("mistral", {}, "is a mistral model and the base is llama"),
    ],
)
def test_another_architecture_is_named(folders, tmp_path, base, changes, expected):
    shutil.rmtree(folders[4])
    save_tiny(folders[4], base, **changes)
    assert expected in refusal(recipe_for(folders), tmp_path)


def test_the_same_rope_in_another_spelling_is_the_same(folders, tmp_path):
    config = json.loads((folders[1] / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope["rope_theta"], "rope_scaling": None, "torch_dtype": "float32"}
    (folders[1] / "config.json").write_text(json.dumps(config))
    assert upcycle(recipe_for(folders), tmp_path / "out", quiet=True).out is not None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"model": {"type": "BPE", "vocab": {"a": 1, "b": 0, "</s>": 2, "ab": 3}, "merges": [["a", "b"]]}},
            "2 tokens of the vocabulary ('a' is 1, in the base 0)",
        ),
        (
            {"added_tokens": [{"id": 7, "content": "<x>"}]},
            "1 tokens of the vocabulary ('<x>' is 7, in the base missing)",
        ),
        (
            {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "</s>": 2, "ab": 3}, "merges": []}},
            "differs from the base's in model",
        ),
        ({"normalizer": {"type": "NFC"}}, "differs from the base's in normalizer"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "differs from the base's in pre_tokenizer"),
    ],
)
def test_another_tokenizer_is_refused(folders, tmp_path, changes, expected):
    write_tokenizer(folders[2], **changes)
    assert expected in refusal(recipe_for(folders), tmp_path)


def test_another_spelling_of_the_same_tokenizer_is_the_same(folders, tmp_path):
    tokenizer = json.loads((folders[2] / "tokenizer.json").read_text())
    tokenizer["model"]["merges"] = ["a b"]
    tokenizer["model"]["dropout"] = None
    tokenizer["truncation"] = {"max_length": 5}
    (folders[2] / "tokenizer.json").write_text(json.dumps(tokenizer, indent=1))
    assert upcycle(recipe_for(folders), tmp_path / "out", quiet=True).out is not None


def test_a_vocabulary_file_that_differs_is_refused(folders, tmp_path):
    for folder in folders:
        (folder / "tokenizer.json").unlink()
        (folder / "vocab.json").write_text('{"a": 0}')
    (folders[1] / "vocab.json").write_text('{"a": 1}')
    assert "its vocab.json differs from the base's" in refusal(recipe_for(folders), tmp_path)


def test_a_specialist_without_a_tokenizer_is_allowed_and_said(folders, tmp_path):
    (folders[1] / "tokenizer.json").unlink()
    notices = upcycle(recipe_for(folders), tmp_path / "out", quiet=True).notices
    assert any("--specialist s0" in line and "has no tokenizer" in line for line in notices)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("number", [0, 2])
def test_a_value_that_is_not_finite_is_named(folders, tmp_path, number, value):
    name = "model.layers.1.self_attn.v_proj.weight"

    def spoil(tensors):
        tensors[name][3, 5] = value

    change_weights(folders[number], spoil)
    message = refusal(recipe_for(folders), tmp_path)
    assert name in message
    assert str(folders[number]) in message
    assert "--allow-nonfinite" in message
    upcycle(recipe_for(folders, allow_nonfinite=True), tmp_path / "out", quiet=True)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert not torch.isfinite(written[name]).all()


def test_a_value_outside_the_range_of_float16_is_refused(folders, tmp_path):
    def enlarge(tensors):
        tensors["model.layers.0.mlp.down_proj.weight"][0, 0] = 70000.0

    change_weights(folders[0], enlarge)
    message = refusal(recipe_for(folders, "virtual_group", dtype="float16"), tmp_path)
    assert "model.layers.0.mlp.experts.down_proj" in message
    assert "--dtype bfloat16" in message
    upcycle(recipe_for(folders, "virtual_group", dtype="bfloat16"), tmp_path / "out", quiet=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("settings", [{"method": "virtual_group"}, {"method": "drop", "drop_ratio": 0.0}])
def test_a_value_that_scaling_makes_infinite_is_refused(tmp_path, dtype, settings):
    base = save_tiny(tmp_path / "base", "llama", dtype=dtype)
    change_weights(base, lambda tensors: tensors["model.layers.0.mlp.down_proj.weight"].fill_(3e38))
    recipe = UpcycleRecipe(base=str(base), experts=8, shards=4, top_k=4, scale="paper", **settings)
    message = refusal(recipe, tmp_path)
    assert "model.layers.0.mlp.experts.down_proj" in message
    assert "--scale" in message


def test_a_truncated_file_is_refused(folders, tmp_path):
    file = folders[1] / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    assert "model.safetensors" in refusal(recipe_for(folders), tmp_path)


def test_an_unsupported_architecture_is_refused(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=50)).save_pretrained(tmp_path / "gpt2")
    message = refusal(UpcycleRecipe(base=str(tmp_path / "gpt2"), method="sparse"), tmp_path)
    assert "gpt2" in message
    assert "llama" in message  # which families work


# --- target -----------------------------------------------------------------------------------------------------------


def test_a_target_that_exists_is_refused(folders, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("{}")
    assert "--overwrite" in refusal(recipe_for(folders), tmp_path)
    assert (tmp_path / "out" / "config.json").read_text() == "{}"
    upcycle(recipe_for(folders), tmp_path / "out", overwrite=True, quiet=True)
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_a_target_inside_a_source_is_refused(folders, tmp_path):
    assert "source" in refusal(recipe_for(folders), tmp_path, out=folders[2] / "out")


def test_too_little_disk_is_refused_before_anything_is_read(folders, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    assert "of disk" in refusal(recipe_for(folders), tmp_path)


def test_a_dry_run_writes_nothing(folders, tmp_path):
    before = sorted(tmp_path.iterdir())
    result = upcycle(recipe_for(folders), tmp_path / "out", dry_run=True, quiet=True)
    assert result.out is None
    assert result.to_dict()["experts"] == 8
    assert result.to_dict()["bytes"] > 0
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_target_that_exists_or_is_a_source_is_refused_by_a_dry_run_too(folders, tmp_path, dry_run):
    (tmp_path / "there").mkdir()
    for target, reason in ((tmp_path / "there", "exists"), (folders[0], "is the source")):
        with pytest.raises(MoesaicError, match=reason):
            upcycle(recipe_for(folders), target, dry_run=dry_run, quiet=True)


# --- allowed, and said ------------------------------------------------------------------------------------------------


def test_identical_specialists_are_allowed_and_said(folders, tmp_path):
    result = upcycle(recipe_for([folders[0]] * 5), tmp_path / "out", quiet=True)
    assert result.statement.code == "D2"
    assert any("the experts are identical" in line for line in result.notices)
    different = upcycle(recipe_for(folders), tmp_path / "different", quiet=True)
    assert different.statement.code == "D3"
    assert not any("identical" in line for line in different.notices)


def test_identical_specialists_that_are_not_the_base(folders, tmp_path):
    result = upcycle(recipe_for([folders[0], *[folders[1]] * 4]), tmp_path / "out", quiet=True)
    assert result.statement.code == "D2"
    assert "the specialists' common one" in result.statement.text
    # Half of the output comes from the base then, so this is not the specialists' FFN.
    shared = upcycle(recipe_for([folders[0], *[folders[1]] * 4], shared_experts=1), tmp_path / "shared", quiet=True)
    assert shared.statement.code != "S1"
    assert any("the experts are identical" in line for line in shared.notices)


def test_auto_router_falls_back_and_says_why(folders, tmp_path):
    result = upcycle(recipe_for(folders, shards=3), tmp_path / "out", quiet=True)
    assert result.plan.layer.router_init == "random"
    assert any("--shards 3 does not divide the number of domains (4)" in line for line in result.notices)
    result = upcycle(recipe_for(folders, top_k=3), tmp_path / "out2", quiet=True)
    assert any("--top-k 3 is not a multiple of --shards 2" in line for line in result.notices)


def test_some_identical_specialists_are_named(folders, tmp_path):
    twice = [folders[0], folders[1], folders[2], folders[1], folders[3]]
    result = upcycle(recipe_for(twice), tmp_path / "out", quiet=True)
    assert [line for line in result.to_dict()["notices"] if "identical" in line] == [
        "the specialists s0, s2 have the same FFN weights: the experts are identical until they are trained"
    ]


def test_a_dry_run_promises_no_less_than_it_can_know(folders, tmp_path):
    recipe = recipe_for([folders[0]] * 5)
    dry = upcycle(recipe, tmp_path / "out", quiet=True, dry_run=True)
    assert dry.statement.code == "D3"
    assert any(line.startswith("D3 or better: ") for line in dry.lines())
    assert any("nothing was read" in line for line in dry.to_dict()["notices"])
    real = upcycle(recipe, tmp_path / "out", quiet=True)
    assert real.statement.code == "D2"
    assert not any("or better" in line for line in real.lines())


@pytest.mark.parametrize("dry_run", [False, True])
def test_files_beside_the_weights_that_are_broken(folders, tmp_path, dry_run):
    (folders[0] / "generation_config.json").write_text("{")
    with pytest.raises(MoesaicError, match=r"generation_config.json: not JSON"):
        upcycle(recipe_for(folders, "sparse"), tmp_path / "out", quiet=True, dry_run=dry_run)
    assert not (tmp_path / "out").exists()
