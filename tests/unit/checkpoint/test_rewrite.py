"""New checkpoints out of others' tensors: slots chosen again, bytes untouched, everything beside the weights."""

import json
from dataclasses import dataclass

import pytest
import torch
from safetensors.torch import load_file

from moesaic.checkpoint.layout import OutputTensor
from moesaic.checkpoint.pieces import ComputedTensor, Work, concatenated, gap, slot_tensor, whole
from moesaic.checkpoint.provenance import fingerprint, original_experts, read_provenance
from moesaic.checkpoint.rewrite import Rewrite, rewrite
from moesaic.checkpoint.source import open_checkpoint
from moesaic.common.errors import MoesaicError
from tests.tiny_files import checkpoint_folder


@dataclass(frozen=True, kw_only=True)
class Recipe:
    checkpoint: str
    keep: int = 2


@pytest.fixture
def tensors():
    return {
        "a": torch.randn(4, 3, 2).bfloat16(),
        "b": torch.randn(4, 3, 2).bfloat16(),
        "scalar": torch.tensor(7, dtype=torch.int64),
        "vector": torch.randn(5),
        "wide": torch.randn(2, 4, 3, dtype=torch.float16),
    }


@pytest.fixture
def source(tmp_path, tensors):
    folder = checkpoint_folder(tmp_path / "source", {"model.safetensors": tensors}, config={"model_type": "olmoe"})
    (folder / "tokenizer.json").write_text("{}")
    return open_checkpoint(folder)


def plan_of(source, *new, **settings):
    values = {"config": {"model_type": "olmoe", "num_experts": 3}, "record": {"experts": {"original": [[0, 1, 2]]}}}
    return Rewrite(
        verb="extract",
        sources=(("source", source),),
        tensors=new,
        recipe=Recipe(checkpoint=source.name),
        seed=3,
        card="# card\n",
        **(values | settings),
    )


def written(folder):
    tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


@pytest.mark.parametrize("workers", [1, 3])
def test_slots_along_every_axis_are_what_indexing_gives(tmp_path, source, tensors, workers):
    a, b, wide = (source.tensors[name] for name in ("a", "b", "wide"))
    new = (
        slot_tensor("repeated", [(a, slot) for slot in (0, 1, 2, 3, 0, 2)]),
        slot_tensor("mixed", [(a, 1), (b, 1), (b, 2), (a, 3)]),
        slot_tensor("second", [(wide, slot) for slot in (3, 1, 1)], axis=1),
        slot_tensor("last", [(wide, slot) for slot in (2, 0)], axis=2),
        whole(source.tensors["scalar"]),
        whole(source.tensors["vector"], "renamed"),
    )
    rewrite(plan_of(source, *new, shard_size=60), tmp_path / "out", workers=workers, quiet=True)
    result = written(tmp_path / "out")
    expected = {
        "repeated": tensors["a"][[0, 1, 2, 3, 0, 2]],
        "mixed": torch.stack([tensors["a"][1], tensors["b"][1], tensors["b"][2], tensors["a"][3]]),
        "second": tensors["wide"][:, [3, 1, 1]],
        "last": tensors["wide"][..., [2, 0]],
        "scalar": tensors["scalar"],
        "renamed": tensors["vector"],
    }
    assert result.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(result[name], tensor), name
        assert result[name].dtype == tensor.dtype


def test_whole_tensors_one_after_the_other(tmp_path, source, tensors):
    a, b = source.tensors["a"], source.tensors["b"]
    rewrite(plan_of(source, concatenated("stacked", (2, 4, 3, 2), [a, b])), tmp_path / "out", quiet=True)
    assert torch.equal(written(tmp_path / "out")["stacked"], torch.stack([tensors["a"], tensors["b"]]))


def test_gaps_are_filled_by_work(tmp_path, source, tensors):
    a = source.tensors["a"]
    new = (slot_tensor("x", [(a, 0), None, (a, 2)]), gap(a, "y"), concatenated("z", (2, 4, 3, 2), [a, a.nbytes]))

    def fill(put):
        put("x", 6, tensors["b"][3])
        put("y", 0, tensors["b"])
        put("z", 24, tensors["b"])

    work = (Work(sources=(source.tensors["b"],), run=fill),)
    rewrite(plan_of(source, *new, work=work), tmp_path / "out", quiet=True)
    result = written(tmp_path / "out")
    assert torch.equal(result["x"], torch.stack([tensors["a"][0], tensors["b"][3], tensors["a"][2]]))
    assert torch.equal(result["y"], tensors["b"])
    assert torch.equal(result["z"], torch.stack([tensors["a"], tensors["b"]]))
    with pytest.raises(RuntimeError, match="not complete"):
        rewrite(plan_of(source, *new), tmp_path / "other", quiet=True)


def test_ids_of_a_chain_of_rewrites(tmp_path, source):
    assert original_experts(source, 3, 1) == [[0, 1, 2]]
    record = {"experts": {"original": [[4, 1, 4]]}}
    rewrite(plan_of(source, whole(source.tensors["a"]), record=record), tmp_path / "out", quiet=True)
    made = open_checkpoint(tmp_path / "out")
    assert original_experts(made, 3, 1) == [[4, 1, 4]]
    assert original_experts(made, 2, 1) == [[0, 1]]


def test_consecutive_slots_are_one_run(source):
    tensor = slot_tensor("x", [(source.tensors["a"], slot) for slot in (0, 1, 2, 3, 1, 2)])
    assert [run.nbytes for run in tensor.runs] == [48, 24]


def test_blocks_smaller_than_a_run(tmp_path, source, tensors, monkeypatch):
    monkeypatch.setattr("moesaic.checkpoint.rewrite.BLOCK_BYTES", 16)
    rewrite(plan_of(source, whole(source.tensors["a"])), tmp_path / "out", quiet=True)
    assert torch.equal(written(tmp_path / "out")["a"], tensors["a"])


def test_everything_beside_the_weights(tmp_path, source):
    out = tmp_path / "out"
    rewrite(plan_of(source, whole(source.tensors["a"])), out, quiet=True)
    assert json.loads((out / "config.json").read_text()) == {"model_type": "olmoe", "num_experts": 3}
    assert (out / "tokenizer.json").read_text() == "{}"
    assert (out / "README.md").read_text() == "# card\n"
    assert "keep: 2" in (out / "recipe.yaml").read_text()
    assert not (out / "modeling_moesaic.py").exists()
    record = read_provenance(out)
    assert record is not None
    assert (record["verb"], record["seed"], record["experts"]) == ("extract", 3, {"original": [[0, 1, 2]]})
    assert record["weights_hash"] == fingerprint(open_checkpoint(out))
    (used,) = record["sources"]
    assert (used["role"], used["used_tensors"], used["weights_hash"]) == ("source", 1, None)


def test_a_source_that_is_used_completely_has_its_fingerprint_in_the_record(tmp_path, source):
    out = tmp_path / "out"
    rewrite(plan_of(source, *map(whole, source.tensors.values())), out, quiet=True)
    record = read_provenance(out)
    assert record is not None
    assert record["sources"][0]["weights_hash"] == record["weights_hash"] == fingerprint(source)


def test_our_architecture_brings_its_code(tmp_path, source):
    plan = plan_of(source, whole(source.tensors["a"]), config={"model_type": "moesaic_qwen3"})
    rewrite(plan, tmp_path / "out", quiet=True)
    assert (tmp_path / "out" / "modeling_moesaic.py").exists()


def test_computed_tensors(tmp_path, source, tensors):
    output = OutputTensor(name="c", dtype="F32", shape=(5,))
    vector = source.tensors["vector"]
    new = ComputedTensor(output=output, sources=(vector,), compute=lambda: tensors["vector"] * 2)
    rewrite(plan_of(source, new), tmp_path / "out", quiet=True)
    assert torch.equal(written(tmp_path / "out")["c"], tensors["vector"] * 2)


def test_further_files(tmp_path, source):
    plan = plan_of(source, whole(source.tensors["a"]), texts={"utility.json": "{}"})
    rewrite(plan, tmp_path / "out", quiet=True)
    assert (tmp_path / "out" / "utility.json").read_text() == "{}"


def test_a_failing_computation_leaves_nothing(tmp_path, source):
    def fail():
        raise MoesaicError("no")

    new = ComputedTensor(output=OutputTensor(name="c", dtype="F32", shape=(5,)), sources=(), compute=fail)
    with pytest.raises(MoesaicError, match=r"^no$"):
        rewrite(plan_of(source, new, whole(source.tensors["a"])), tmp_path / "out", quiet=True)
    assert {path.name for path in tmp_path.iterdir()} == {"source"}


@pytest.mark.parametrize("used", [True, False])
def test_nan_is_refused_in_what_is_used(tmp_path, tensors, used):
    tensors["b"][1, 2, 0] = torch.nan
    source = open_checkpoint(checkpoint_folder(tmp_path / "source", {"model.safetensors": tensors}))
    plan = plan_of(source, whole(source.tensors["b" if used else "a"]))
    if not used:
        rewrite(plan, tmp_path / "out", quiet=True)
        return
    with pytest.raises(MoesaicError, match="tensor 'b' has a NaN"):
        rewrite(plan, tmp_path / "out", quiet=True)
    assert not (tmp_path / "out").exists()
