"""The verbs one after the other on a tiny model: each takes what the one before made, and nobody loses the thread."""

import json

import pytest
import torch
from safetensors.torch import load_file

from moesaic.checkpoint.record import fingerprint
from moesaic.checkpoint.source import open_checkpoint
from moesaic.cli import app as cli
from moesaic.loading import load
from moesaic.routing.subset import load_selection
from tests.tiny_models import save_tiny
from tests.tiny_moes import save_tiny_moe
from tests.tiny_training import save_tokenizer, tiny_recipe, write_documents


@pytest.fixture
def work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MOESAIC_CACHE", str(tmp_path / "cache"))
    for domain in ("math", "code"):
        write_documents(tmp_path / f"{domain}.jsonl", domain, number=20, seed=0)
    return tmp_path


def call(verb, *arguments):
    assert cli.run([verb, *map(str, arguments), "--quiet"]) == 0


def train(source, out, steps=3):
    recipe = tiny_recipe(open_checkpoint(source).path.parent / "data", model=str(source), tokenizer=None)
    file = out.with_suffix(".yaml")
    file.write_text(json.dumps(recipe | {"budget": {"steps": steps}}))
    call("train", file, out)


def record(folder):
    return json.loads((folder / "moesaic.json").read_text())


def assert_made_from(folder, *sources):
    """moesaic.json names the sources with the hashes that their files have, and the hash of the folder's own files."""
    made = record(folder)
    assert [one["path"] for one in made["sources"]] == [str(source) for source in sources]
    assert made["weights_hash"] == fingerprint(open_checkpoint(folder))
    for one, source in zip(made["sources"], sources, strict=True):
        # A part of a model has the hash of what was used, the whole one that of its files.
        assert one["weights_hash"] in (None, fingerprint(open_checkpoint(source)))
        assert one["weights_hash"] or one["used_hash"]


def experts(folder, layer):
    tensors = load(folder).state_dict()
    prefix = f"model.layers.{layer}.mlp."
    return [tensors[prefix + name] for name in ("experts.gate_up_proj", "experts.down_proj")]


def test_from_dense_to_larger_to_smaller_to_trained_and_back(work):
    dense, moe, large, cut, tuned, back, larger = (
        work / name for name in ("dense", "moe", "large", "cut", "tuned", "back", "larger")
    )
    save_tokenizer(save_tiny(dense, "llama"))
    call("upcycle", dense, moe, "--method", "drop", "--experts", "4", "--top-k", "2")
    call("expand", moe, large, "--experts", "6")
    call("select", large, work / "s.json", "--data", work / "math.jsonl", "--keep", "3", "--method", "frequency")
    call("extract", large, work / "s.json", cut)
    train(cut, tuned)
    call("merge-back", large, tuned, back, "--with", "router")
    call("expand", back, larger, "--experts", "8", "--delta", "0")
    pairs = ((moe, dense), (large, moe), (cut, large), (tuned, cut), (larger, back))
    for folder, source in pairs:
        assert_made_from(folder, source)
    assert_made_from(back, large, tuned)
    assert [record(folder)["verb"] for folder in (moe, large, cut, tuned, back, larger)] == [
        "upcycle", "expand", "extract", "train", "merge-back", "expand",
    ]  # fmt: skip
    in_moe = [0, 1, 2, 3, 0, 1]
    for layer, kept in enumerate(load_selection(work / "s.json").kept):
        assert record(large)["experts"]["original"][layer] == in_moe
        assert record(cut)["experts"]["original"][layer] == [in_moe[one] for one in kept]
        assert record(tuned)["experts"]["original"][layer] == [in_moe[one] for one in kept]
        assert record(back)["experts"]["original"][layer] == in_moe
        assert record(larger)["experts"]["original"][layer] == [*in_moe, 0, 1]
        for before, trained, merged, grown in zip(
            *(experts(folder, layer) for folder in (large, tuned, back, larger)), strict=True
        ):
            rest = [one for one in range(6) if one not in kept]
            assert torch.equal(merged[list(kept)], trained)
            assert torch.equal(merged[rest], before[rest])
            assert not torch.equal(merged[list(kept)], before[list(kept)])
            assert torch.equal(grown, merged[[0, 1, 2, 3, 4, 5, 0, 1]])
    assert torch.isfinite(load(larger)(torch.arange(3, 20)[None]).logits).all()


def test_a_subset_of_a_subset_goes_back_step_by_step(work):
    full = save_tokenizer(save_tiny_moe(work / "full", "qwen3_moe"))
    half, quarter, half_again, full_again = (work / name for name in ("half", "quarter", "half_again", "full_again"))
    data = work / "math.jsonl"
    for source, keep, out in ((full, "50%", half), (half, "50%", quarter)):
        call("select", source, out.with_suffix(".json"), "--data", data, "--keep", keep)
        call("extract", source, out.with_suffix(".json"), out)
    call("merge-back", half, quarter, half_again)
    call("merge-back", full, half_again, full_again, "--with", "router,other")
    first, second = (load_selection(work / f"{name}.json").kept for name in ("half", "quarter"))
    chained = [[row[one] for one in ids] for row, ids in zip(first, second, strict=True)]
    assert record(quarter)["experts"]["original"] == chained
    assert [one["ids"] for one in record(quarter)["lineage"]] == [list(map(list, second)), chained]
    assert record(half_again)["lineage"] == record(half)["lineage"]
    before, after = (load_file(folder / "model.safetensors") for folder in (full, full_again))
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_two_fine_tuned_subsets_of_one_parent_become_one_model(work):
    full = save_tokenizer(save_tiny_moe(work / "full", "olmoe"))
    for name, kept in (("math", "0:4"), ("code", "4:8")):
        call("select", full, work / f"{name}.sel", "--keep", "4", "--method", "random")
        document = json.loads((work / f"{name}.sel").read_text())
        document["kept"] = [list(range(8))[slice(*map(int, kept.split(":")))]] * 2
        (work / f"{name}.sel").write_text(json.dumps(document))
        call("extract", full, work / f"{name}.sel", work / name)
        train(work / name, work / f"{name}_tuned")
    call("merge-back", full, work / "math_tuned", work / "one")
    call("merge-back", work / "one", work / "code_tuned", work / "both")
    for layer in range(2):
        for math, code, both in zip(
            *(experts(work / name, layer) for name in ("math_tuned", "code_tuned", "both")), strict=True
        ):
            assert torch.equal(both, torch.cat([math, code]))
    assert [len(one["ids"][0]) for one in record(work / "both")["merged"]["subsets"]] == [4, 4]
    call("select", "--union", work / "math.sel", work / "code.sel", work / "union.sel")
    assert load_selection(work / "union.sel").kept == (tuple(range(8)),) * 2
    call("expand", work / "both", work / "grown", "--experts", "12")
    assert torch.isfinite(load(work / "grown")(torch.arange(3, 20)[None]).logits).all()
