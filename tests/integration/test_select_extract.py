"""Extract and merge-back on every family and layout: what must be equal is equal bit for bit."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from moesaic.checkpoint.source import open_checkpoint
from moesaic.common.errors import MoesaicError
from moesaic.exporting.run import export
from moesaic.families.identity import describe
from moesaic.families.moe import detect_moe
from moesaic.loading import load
from moesaic.routing.subset import Selection
from moesaic.selection.extract import extract
from moesaic.selection.merge import merge_back
from tests.tiny_moes import EXPERTS, MOE_FAMILIES, save_tiny_moe
from tests.unit.selection.kinds import KINDS, random_selection, save_kind

GROUPED = ("deepseek_v3", "glm4_moe")  # four groups of two experts; a group must keep two
LAYOUTS = [(family, fused) for family in MOE_FAMILIES for fused in (False, True)]


def select(folder, keep):
    """A selection of a tiny model; `keep` is the list of ids for every layer, or one list per layer."""
    checkpoint = open_checkpoint(folder)
    source = describe(checkpoint, detect_moe(checkpoint))
    rows = keep if isinstance(keep[0], list) else [keep] * len(source.layers)
    return Selection(
        source=source,
        method="frequency",
        layers=source.layers,
        kept=tuple(map(tuple, rows)),
        scores=((0.5,) * source.num_experts,) * len(source.layers),
        routing_mass_kept=None,
    )


def tensors(folder):
    return load_file(folder / "model.safetensors")


def assert_same_config(source, target):
    """The same keys and values; the rope in transformers 4's spelling comes along where the source has it in 5's."""
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (source, target))
    both_spellings = {"rope_theta", "rope_scaling", "partial_rotary_factor"}
    assert {key: value for key, value in after.items() if key in before or key not in both_spellings} == before


def assert_same(first, second):
    assert list(first) == list(second)
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype, name
        assert torch.equal(tensor, second[name]), name


def save_moe(folder, family, fused, **options):
    """Grouped families get 16 experts, so that half of them can go."""
    more = {"n_routed_experts": 16} if family in GROUPED else {}
    return save_tiny_moe(folder, family, fused=fused, **more, **options)


def kept_ids(family):
    return [0, 1, 5, 6, 8, 11, 13, 14] if family in GROUPED else [1, 2, 6, 7]


@pytest.mark.parametrize(("family", "fused"), LAYOUTS)
def test_keeping_all_gives_the_same_tensors(tmp_path, family, fused):
    full = save_tiny_moe(tmp_path / "full", family, fused=fused)
    result = extract(full, select(full, list(range(EXPERTS))), tmp_path / "all")
    assert result.experts == EXPERTS
    assert_same(tensors(full), tensors(tmp_path / "all"))
    assert_same_config(full, tmp_path / "all")


@pytest.mark.parametrize(("family", "fused"), LAYOUTS)
def test_a_subset_loads_and_has_the_experts_that_were_kept(tmp_path, family, fused):
    full = save_moe(tmp_path / "full", family, fused)
    ids = kept_ids(family)
    extract(full, select(full, ids), tmp_path / "cut")
    before, after = load(full), load(tmp_path / "cut")
    sliced = 0
    for (name, old), (new_name, new) in zip(before.state_dict().items(), after.state_dict().items(), strict=True):
        assert name == new_name
        if old.shape != new.shape:
            sliced += 1
            old = old[ids]
        assert torch.equal(old, new), name
    moe_layers = len(detect_moe(open_checkpoint(full)).layers)
    per_layer = {"gpt_oss": 6}.get(family, 4 if family in GROUPED else 3)  # experts, router, biases
    assert sliced == moe_layers * per_layer
    assert torch.isfinite(after(torch.arange(12)[None]).logits).all()
    record = json.loads((tmp_path / "cut/moesaic.json").read_text())
    assert record["experts"]["original"] == [ids] * moe_layers


@pytest.mark.parametrize(("family", "fused"), LAYOUTS)
def test_merging_an_untouched_subset_back_changes_nothing(tmp_path, family, fused):
    full = save_moe(tmp_path / "full", family, fused)
    extract(full, select(full, kept_ids(family)), tmp_path / "cut")
    merge_back(full, tmp_path / "cut", tmp_path / "same", parts=("router", "shared", "other"))
    assert_same(tensors(full), tensors(tmp_path / "same"))
    merge_back(full, tmp_path / "cut", tmp_path / "mean", average=0.3, parts=("router", "shared", "other"))
    assert_same(tensors(full), tensors(tmp_path / "mean"))


def change(folder, amount):
    """What training does: every tensor moves."""
    changed = {name: tensor + amount for name, tensor in tensors(folder).items()}
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(("family", "fused"), [("qwen2_moe", False), ("granitemoeshared", False), ("gpt_oss", True)])
@pytest.mark.parametrize("parts", [(), ("router",), ("shared",), ("other",)])
def test_changed_experts_come_back_to_their_places_and_nothing_else_does(tmp_path, family, fused, parts):
    full, ids = save_moe(tmp_path / "full", family, fused), [1, 2, 6, 7]
    extract(full, select(full, ids), tmp_path / "cut")
    change(tmp_path / "cut", 0.5)
    merge_back(full, tmp_path / "cut", tmp_path / "out", parts=parts)
    before, after = load(full).state_dict(), load(tmp_path / "out").state_dict()
    for name, old in before.items():
        if ".experts." in name:
            kind = "experts"
        elif ".gate." in name or ".router." in name:
            kind = "router"
        else:
            kind = "shared" if "shared" in name else "other"
        expected = old.clone()
        if kind == "experts" or kind in parts:
            rows = ids if kind in ("experts", "router") else slice(None)
            expected[rows] += 0.5
        assert torch.equal(after[name], expected), name


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith("ours")])
def test_our_own_architecture(tmp_path, kind):
    full = save_kind(tmp_path / "full", kind)
    extract(full, random_selection(full, share=1), tmp_path / "all")
    assert_same(tensors(full), tensors(tmp_path / "all"))
    assert_same_config(full, tmp_path / "all")
    assert (tmp_path / "all/modeling_moesaic.py").exists()
    selection = random_selection(full)
    extract(full, selection, tmp_path / "cut")
    config = json.loads((tmp_path / "cut/config.json").read_text())
    assert config["num_experts"] == 3
    if config["routing_rule"] == "one_per_group":
        given = json.loads((full / "config.json").read_text())["expert_groups"]
        rows = given if isinstance(given[0], list) else [given, given]
        assert config["expert_groups"] == [[r[e] for e in ids] for r, ids in zip(rows, selection.kept, strict=True)]
    merge_back(full, tmp_path / "cut", tmp_path / "same", parts=("router", "shared", "other"))
    assert_same(tensors(full), tensors(tmp_path / "same"))


def test_original_ids_are_chained_through_expand(tmp_path):
    full = save_tiny_moe(tmp_path / "full", "olmoe")
    record = {"format": "moesaic/1", "verb": "expand", "experts": {"original": [[0, 1, 2, 3, 0, 1, 2, 3]] * 2}}
    (full / "moesaic.json").write_text(json.dumps(record))
    extract(full, select(full, [1, 3, 4, 7]), tmp_path / "cut")
    assert json.loads((tmp_path / "cut/moesaic.json").read_text())["experts"]["original"] == [[1, 3, 0, 3]] * 2


def test_average_is_the_weighted_mean(tmp_path):
    full, ids = save_tiny_moe(tmp_path / "full", "olmoe"), [0, 3]
    extract(full, select(full, ids), tmp_path / "cut")
    change(tmp_path / "cut", 1.0)
    merge_back(full, tmp_path / "cut", tmp_path / "out", average=0.25)
    before, after = load(full).state_dict(), load(tmp_path / "out").state_dict()
    name = "model.layers.1.mlp.experts.down_proj"
    expected = before[name].clone()
    expected[ids] += 0.25
    torch.testing.assert_close(after[name], expected, rtol=0, atol=1e-6)
    merge_back(full, tmp_path / "cut", tmp_path / "whole")
    merge_back(full, tmp_path / "cut", tmp_path / "one", average=1.0)
    merge_back(full, tmp_path / "cut", tmp_path / "none", average=0.0)
    assert_same(tensors(tmp_path / "whole"), tensors(tmp_path / "one"))
    assert_same(tensors(full), tensors(tmp_path / "none"))


def test_an_exported_subset_comes_back(tmp_path):
    full = save_tiny_moe(tmp_path / "full", "olmoe")
    extract(full, select(full, [0, 3]), tmp_path / "cut")
    export(tmp_path / "cut", tmp_path / "fused", layout="fused")
    merge_back(full, tmp_path / "fused", tmp_path / "same")
    assert_same(tensors(full), tensors(tmp_path / "same"))


def test_two_subsets_come_back_one_after_the_other(tmp_path):
    full = save_tiny_moe(tmp_path / "full", "olmoe")
    for name, ids, amount in (("a", [0, 1], 1.0), ("b", [4, 7], 2.0)):
        extract(full, select(full, ids), tmp_path / name)
        change(tmp_path / name, amount)
    merge_back(full, tmp_path / "a", tmp_path / "with_a")
    merge_back(tmp_path / "with_a", tmp_path / "b", tmp_path / "both")
    key = "model.layers.0.mlp.experts.gate_up_proj"
    expected = load(full).state_dict()[key].clone()
    expected[[0, 1]] += 1.0
    expected[[4, 7]] += 2.0
    assert torch.equal(load(tmp_path / "both").state_dict()[key], expected)


def test_an_expert_that_two_subsets_hold_is_named(tmp_path):
    full = save_tiny_moe(tmp_path / "full", "olmoe")
    for name, ids in (("a", [0, 3]), ("b", [3, 7])):
        extract(full, select(full, ids), tmp_path / name)
        change(tmp_path / name, 1.0)
    merge_back(full, tmp_path / "a", tmp_path / "with_a")
    with pytest.raises(MoesaicError, match=r"expert 3 of layer 0, expert 3 of layer 1 were put back from .*a before"):
        merge_back(tmp_path / "with_a", tmp_path / "b", tmp_path / "both")
    merge_back(tmp_path / "with_a", tmp_path / "b", tmp_path / "both", average=0.5)


def test_a_subset_of_a_merged_model_goes_back_to_it_and_to_what_it_becomes(tmp_path):
    """Overwriting what was merged before the extraction is the point; what was merged since is refused."""
    root = save_tiny_moe(tmp_path / "root", "olmoe")
    extract(root, select(root, [0, 3]), tmp_path / "a")
    change(tmp_path / "a", 1.0)
    merged = tmp_path / "merged"
    merge_back(root, tmp_path / "a", merged)
    for name, ids, amount in (("again", [3, 5], 2.0), ("other", [6, 7], 4.0), ("same", [5, 6], 8.0)):
        extract(merged, select(merged, ids), tmp_path / name)
        change(tmp_path / name, amount)
    merge_back(merged, tmp_path / "again", tmp_path / "two")
    merge_back(tmp_path / "two", tmp_path / "other", tmp_path / "three")
    key = "model.layers.1.mlp.experts.down_proj"
    expected = load(root).state_dict()[key].clone()
    expected[[0, 3]] += 1.0
    expected[[3, 5]] += 2.0
    expected[[6, 7]] += 4.0
    assert torch.equal(load(tmp_path / "three").state_dict()[key], expected)
    with pytest.raises(MoesaicError, match=r"expert 5 of layer 0, .* put back from .*again before"):
        merge_back(tmp_path / "three", tmp_path / "same", tmp_path / "four")
    extract(root, select(root, [0, 1]), tmp_path / "b")
    with pytest.raises(MoesaicError, match=r"expert 0 of layer 0, .* put back from .*a before"):
        merge_back(tmp_path / "three", tmp_path / "b", tmp_path / "four")


def test_a_subset_of_a_subset_goes_back_to_either(tmp_path):
    full = save_tiny_moe(tmp_path / "full", "mixtral")
    extract(full, select(full, [1, 3, 5, 7]), tmp_path / "half")
    extract(tmp_path / "half", select(tmp_path / "half", [[0, 3], [1, 2]]), tmp_path / "quarter")
    record = json.loads((tmp_path / "quarter/moesaic.json").read_text())
    assert record["experts"]["original"] == [[1, 7], [3, 5]]
    change(tmp_path / "quarter", 1.0)
    key = "model.layers.1.mlp.experts.down_proj"
    for parent, ids in (("full", [3, 5]), ("half", [1, 2])):
        merge_back(tmp_path / parent, tmp_path / "quarter", tmp_path / f"back_{parent}")
        expected = load(tmp_path / parent).state_dict()[key].clone()
        expected[ids] += 1.0
        assert torch.equal(load(tmp_path / f"back_{parent}").state_dict()[key], expected)


def test_a_subset_in_the_other_layout_and_dtype_is_understood(tmp_path):
    full = save_tiny_moe(tmp_path / "full", "qwen3_moe", dtype=torch.bfloat16)
    extract(full, select(full, [2, 5]), tmp_path / "cut")
    record = (tmp_path / "cut/moesaic.json").read_text()
    load(tmp_path / "cut").float().save_pretrained(tmp_path / "trained", save_original_format=False)
    (tmp_path / "trained/moesaic.json").write_text(record)
    assert "model.layers.0.mlp.experts.gate_up_proj" in tensors(tmp_path / "trained")
    merge_back(full, tmp_path / "trained", tmp_path / "same", parts=("router",))
    assert_same(tensors(full), tensors(tmp_path / "same"))


def test_the_subset_of_another_model_is_refused(tmp_path):
    full = save_tiny_moe(tmp_path / "full", "olmoe")
    other = save_tiny_moe(tmp_path / "other", "olmoe", seed=1)
    extract(full, select(full, [0, 1]), tmp_path / "cut")
    with pytest.raises(MoesaicError, match=r"cut: was extracted from .*full \(hash \w+\), not from .*other"):
        merge_back(other, tmp_path / "cut", tmp_path / "out")
    with pytest.raises(MoesaicError, match="does not say what it was extracted from"):
        merge_back(full, other, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_selection_for_another_model_is_refused(tmp_path):
    full = save_tiny_moe(tmp_path / "full", "olmoe")
    weights = save_tiny_moe(tmp_path / "weights", "olmoe", seed=1)
    shape = save_tiny_moe(tmp_path / "shape", "olmoe", num_experts=4)
    with pytest.raises(MoesaicError, match="with other weights"):
        extract(weights, select(full, [0, 1]), tmp_path / "out")
    with pytest.raises(MoesaicError, match=r"num_experts 8, but .*shape has 4"):
        extract(shape, select(full, [0, 1]), tmp_path / "out")


def test_one_changed_expert_is_another_model(tmp_path):
    full = save_tiny_moe(tmp_path / "full", "olmoe", fused=True)
    selection = select(full, [0, 1])
    stored = tensors(full)
    stored["model.layers.1.mlp.experts.down_proj"][6, 0, 0] += 1
    save_file(stored, full / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(MoesaicError, match="with other weights"):
        extract(full, selection, tmp_path / "out")


def test_what_a_config_or_router_cannot_hold_is_refused(tmp_path):
    full = save_tiny_moe(tmp_path / "full", "olmoe")
    with pytest.raises(MoesaicError, match=r"keeps 1 experts, but each token uses 2; .* --top-k 1"):
        extract(full, select(full, [3]), tmp_path / "out")
    with pytest.raises(MoesaicError, match=r"keeps 2 to 3 experts depending on the layer.*olmoe.*moesaic"):
        extract(full, select(full, [[0, 1], [0, 1, 2]]), tmp_path / "out")
    with pytest.raises(MoesaicError, match="--top-k 3: must be from 1 to 2"):
        extract(full, select(full, [0, 1, 2]), tmp_path / "out", top_k=3)
    assert not (tmp_path / "out").exists()


def test_top_k_can_be_lowered(tmp_path):
    full = save_tiny_moe(tmp_path / "full", "mixtral")
    assert extract(full, select(full, [3]), tmp_path / "out", top_k=1).top_k == 1
    model = load(tmp_path / "out")
    assert (model.config.num_experts_per_tok, model.config.num_local_experts) == (1, 1)
    assert torch.isfinite(model(torch.arange(12)[None]).logits).all()


def test_groups_keep_equal_numbers(tmp_path):
    full = save_moe(tmp_path / "full", "deepseek_v3", False)
    with pytest.raises(MoesaicError, match=r"layer 1 keeps \[3, 2, 2, 1\] experts of its 4 groups"):
        extract(full, select(full, [0, 1, 2, 4, 5, 8, 9, 12]), tmp_path / "out")
    with pytest.raises(MoesaicError, match="keeps 1 expert per group; at least 2"):
        extract(full, select(full, [0, 4, 8, 12]), tmp_path / "out")


def test_a_dry_run_writes_nothing(tmp_path):
    full = save_tiny_moe(tmp_path / "full", "olmoe")
    assert extract(full, select(full, [0, 1]), tmp_path / "out", dry_run=True).out is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full"]
    with pytest.raises(MoesaicError, match="full: is the source itself"):
        extract(full, select(full, [0, 1]), full, dry_run=True, overwrite=True)
