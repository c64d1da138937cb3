"""New checkpoints out of others' tensors: slots chosen again, bytes untouched, everything beside the weights."""

import json
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from moesaic.checkpoint import streaming
from moesaic.checkpoint.lazy import computed, concat, stack, stored, together
from moesaic.checkpoint.record import fingerprint, original_experts, read_provenance
from moesaic.checkpoint.source import open_checkpoint
from moesaic.checkpoint.streaming import scan
from moesaic.checkpoint.write import NewCheckpoint, check_sources, write, write_unless_dry
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


def new_of(source, tensors, **settings):
    values = {"config": {"model_type": "olmoe", "num_experts": 3}, "record": {"experts": {"original": [[0, 1, 2]]}}}
    return NewCheckpoint(
        verb="extract",
        sources=(("source", source),),
        tensors=tensors,
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
    a, b, wide, scalar, vector = (
        stored(info) for info in map(source.tensors.get, ("a", "b", "wide", "scalar", "vector"))
    )
    new = {
        "repeated": a.take((0, 1, 2, 3, 0, 2)),
        "mixed": stack([a.index(1), b.index(1), b.index(2), a.index(3)]),
        "second": wide.take((3, 1, 1), axis=1),
        "last": wide.take((2, 0), axis=2),
        "scalar": scalar,
        "renamed": vector,
    }
    write(new_of(source, new, shard_size=60), tmp_path / "out", workers=workers, quiet=True)
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


def test_copies_and_computed_slots_in_one_tensor(tmp_path, source, tensors):
    a, b = stored(source.tensors["a"]), stored(source.tensors["b"])
    made = together(
        {"slot": ((3, 2), "BF16"), "all": ((4, 3, 2), "BF16")},
        lambda: {"slot": tensors["b"][3], "all": tensors["b"].float()},
        [b],
    )
    new = {"x": stack([a.index(0), made["slot"], a.index(2)]), "y": made["all"] * 2.0, "z": concat([a, made["all"]])}
    write(new_of(source, new), tmp_path / "out", quiet=True)
    result = written(tmp_path / "out")
    assert torch.equal(result["x"], torch.stack([tensors["a"][0], tensors["b"][3], tensors["a"][2]]))
    assert torch.equal(result["y"], tensors["b"] * 2)
    assert torch.equal(result["z"], torch.cat([tensors["a"], tensors["b"]]))
    record = read_provenance(tmp_path / "out")
    assert record is not None
    assert record["sources"][0]["used_tensors"] == 2


def test_ids_of_a_chain_of_rewrites(tmp_path, source):
    assert original_experts(source, 3, 1) == [[0, 1, 2]]
    record = {"experts": {"original": [[4, 1, 4]]}}
    write(new_of(source, {"a": stored(source.tensors["a"])}, record=record), tmp_path / "out", quiet=True)
    made = open_checkpoint(tmp_path / "out")
    assert original_experts(made, 3, 1) == [[4, 1, 4]]
    assert original_experts(made, 2, 1) == [[0, 1]]


def test_blocks_smaller_than_a_run(tmp_path, source, tensors, monkeypatch):
    monkeypatch.setattr(streaming, "COPY_BYTES", 16)
    write(new_of(source, {"a": stored(source.tensors["a"])}), tmp_path / "out", quiet=True)
    assert torch.equal(written(tmp_path / "out")["a"], tensors["a"])


def test_everything_beside_the_weights(tmp_path, source):
    out = tmp_path / "out"
    write(new_of(source, {"a": stored(source.tensors["a"])}), out, quiet=True)
    assert json.loads((out / "config.json").read_text()) == {"model_type": "olmoe", "num_experts": 3}
    assert (out / "tokenizer.json").read_text() == "{}"
    assert (out / "README.md").read_text().startswith("# card\n\n```python\nfrom transformers import ")
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
    write(new_of(source, {name: stored(info) for name, info in source.tensors.items()}), out, quiet=True)
    record = read_provenance(out)
    assert record is not None
    assert record["sources"][0]["weights_hash"] == record["weights_hash"] == fingerprint(source)


def test_computed_tensors(tmp_path, source, tensors):
    vector = stored(source.tensors["vector"])
    new = {"c": computed((5,), "F32", lambda: tensors["vector"].double() * 2, [vector])}
    write(new_of(source, new), tmp_path / "out", quiet=True)
    assert torch.equal(written(tmp_path / "out")["c"], tensors["vector"] * 2)


def test_further_files(tmp_path, source):
    new = new_of(source, {"a": stored(source.tensors["a"])}, texts={"utility.json": "{}"})
    write(new, tmp_path / "out", quiet=True)
    assert (tmp_path / "out" / "utility.json").read_text() == "{}"


def test_a_failing_computation_leaves_nothing(tmp_path, source):
    def fail():
        raise MoesaicError("no")

    new = {"c": computed((5,), "F32", fail), "a": stored(source.tensors["a"])}
    with pytest.raises(MoesaicError, match=r"^no$"):
        write(new_of(source, new), tmp_path / "out", quiet=True)
    assert {path.name for path in tmp_path.iterdir()} == {"source"}


@pytest.mark.parametrize("used", [True, False])
def test_nan_is_refused_in_what_is_used(tmp_path, tensors, used):
    tensors["b"][1, 2, 0] = torch.nan
    source = open_checkpoint(checkpoint_folder(tmp_path / "source", {"model.safetensors": tensors}))
    new = new_of(source, {"a": stored(source.tensors["b" if used else "a"])})
    if not used:
        write(new, tmp_path / "out", quiet=True)
        return
    with pytest.raises(MoesaicError, match="tensor 'b' has a NaN"):
        write(new, tmp_path / "out", quiet=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["a", "b"])
def test_nan_is_refused_wherever_it_is(tmp_path, tensors, name):
    """In what is hashed while it is copied, and in what comes behind it and was read before."""
    tensors[name][3, 2, 1] = torch.inf
    source = open_checkpoint(checkpoint_folder(tmp_path / "source", {"model.safetensors": tensors}))
    new = new_of(source, {"ab": concat([stored(source.tensors["a"]), stored(source.tensors["b"])])})
    with pytest.raises(MoesaicError, match=f"tensor '{name}' has a NaN"):
        write(new, tmp_path / "out", quiet=True)
    write(new_of(source, new.tensors, allow_nonfinite=True), tmp_path / "out", quiet=True)
    assert written(tmp_path / "out")["ab"].isinf().sum() == 1


def test_hashes_are_those_of_a_scan(tmp_path, source):
    """Whether a tensor is hashed while it is copied or before, and whatever the order of its blocks."""
    a, b, w = (stored(source.tensors[name]) for name in ("a", "b", "vector"))
    new = new_of(source, {"x": concat([a, b]), "y": stack([b.index(i).columns(0, 1) for i in range(4)]), "w": w})
    made = write(new, tmp_path / "out", quiet=True)
    assert made.tensor_hashes == scan(open_checkpoint(tmp_path / "out").tensors.values())
    record = read_provenance(tmp_path / "out")
    known = check_sources(
        [[source.tensors[name] for name in ("a", "b", "vector")]], 1, quiet=True, allow_nonfinite=False
    )
    again = write(new, tmp_path / "again", quiet=True, hashes=known)
    assert again == write(new, tmp_path / "third", workers=3, quiet=True, hashes=known)
    assert again.tensor_hashes == made.tensor_hashes
    assert record == read_provenance(tmp_path / "again")


def test_a_number_that_the_dtype_cannot_hold(tmp_path, source):
    large = {"x": (stored(source.tensors["vector"]) * 1e30).cast("F16")}
    with pytest.raises(MoesaicError, match="x: a value is outside the range of float16; use another --scale"):
        write(new_of(source, large, if_out_of_range="use another --scale"), tmp_path / "out", quiet=True)
    assert not (tmp_path / "out").exists()
    for number, settings in enumerate(({}, {"if_out_of_range": "no", "allow_nonfinite": True})):
        write(new_of(source, large, **settings), tmp_path / str(number), quiet=True)
        assert written(tmp_path / str(number))["x"].isinf().all()


def test_a_dry_run_and_a_full_disk(tmp_path, source, monkeypatch):
    new = new_of(source, {"a": stored(source.tensors["a"])})
    settings = {"overwrite": False, "workers": 1, "quiet": True}
    assert write_unless_dry(new, tmp_path / "out", dry_run=True, **settings) is None
    assert not (tmp_path / "out").exists()
    assert write_unless_dry(new, tmp_path / "out", dry_run=False, **settings) == tmp_path / "out"
    with pytest.raises(MoesaicError, match="exists"):
        write_unless_dry(new, tmp_path / "out", dry_run=True, **settings)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=10, total=10**9))
    with pytest.raises(MoesaicError, match="of disk"):
        write_unless_dry(new, tmp_path / "other", dry_run=True, **settings)
