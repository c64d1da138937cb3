"""`verify` on small checkpoints that `upcycle` really wrote: which statement it names, and that it sees damage."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from moesaic.common.errors import MoesaicError
from moesaic.upcycling.recipe import Specialist, UpcycleRecipe
from moesaic.upcycling.run import upcycle
from moesaic.verifying.recipe import VerifyReport
from moesaic.verifying.run import verify as verify_any
from tests.tiny_models import save_tiny


def verify(source, target, **options) -> VerifyReport:
    report = verify_any(source, target, **options)
    assert isinstance(report, VerifyReport)
    return report


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A base, a copy of it, and three models that differ from it."""
    folder = tmp_path_factory.mktemp("models")
    save_tiny(folder / "base", "llama", seed=0)
    shutil.copytree(folder / "base", folder / "copy")
    for seed in (1, 2, 3):
        save_tiny(folder / f"other{seed}", "llama", seed=seed)
    return folder


def make(models, out, method, specialists=(), base="base", **more):
    named = tuple(Specialist(name=f"s{i}", path=str(models / name)) for i, name in enumerate(specialists))
    recipe = UpcycleRecipe(base=str(models / base), method=method, specialists=named, **more)
    upcycle(recipe, out, quiet=True, workers=1)
    return out


SAME = ("base", "copy", "base", "copy")
DIFFERENT = ("base", "other1", "other2", "other3")

HOLD = [
    ("N1", "virtual_group", {}),
    ("N1", "virtual_group", {"experts": 12, "shards": 3, "top_k": 6}),
    ("N1", "sparse", {"experts": 3, "top_k": 2}),
    ("N1", "btx", {"specialists": SAME}),
    ("N2", "virtual_group", {"weighting": "all", "top_k": 4}),
    ("N2", "sparse", {"weighting": "all", "router_std": 1.0}),
    ("N2", "divmoe", {"specialists": SAME, "weighting": "all", "router_std": 1.0}),
    ("D2", "divmoe", {"specialists": SAME}),
    ("D2", "divmoe", {"specialists": SAME, "routing": "topk", "router_init": "latin_square"}),
    ("D2", "divmoe", {"specialists": SAME, "top_k": 4}),
    ("D3", "divmoe", {"specialists": DIFFERENT}),
    ("D3", "divmoe", {"specialists": DIFFERENT, "top_k": 4, "router_std": 1.0}),
    ("D1", "divmoe", {"specialists": DIFFERENT, "router_init": "random", "router_std": 1.0}),
    ("D1", "divmoe", {"specialists": DIFFERENT[:3], "router_std": 1.0}),
    ("D1", "btx", {"specialists": DIFFERENT, "router_std": 1.0}),
    ("D1", "divmoe", {"specialists": DIFFERENT, "router_init": "random", "router_std": 1.0, "scale": "paper"}),
    ("D1", "divmoe", {"specialists": DIFFERENT, "router_init": "random", "router_std": 1.0, "scale": "none"}),
    ("S1", "virtual_group", {"shared_experts": 1}),
    ("S1", "divmoe", {"specialists": SAME, "shared_experts": 2}),
    ("N2", "virtual_group", {"weighting": "all", "shared_experts": 2, "router_std": 1.0}),
    ("D3", "divmoe", {"specialists": DIFFERENT, "shared_experts": 1}),
]


@pytest.mark.parametrize(("code", "method", "more"), HOLD, ids=lambda v: str(v) if isinstance(v, str) else "")
def test_the_statement_is_named_and_holds(models, tmp_path, code, method, more):
    target = make(models, tmp_path / "moe", method, **more)
    report = verify(models / "base", target, quiet=True)
    assert report.code == code
    assert report.checks
    assert report.ok, report.lines()
    preserves = code in ("N1", "D2", "S1")
    assert (report.error < 1e-5) == preserves
    assert (report.max_logit_difference < 1e-3) == preserves
    if code in ("N2", "D1", "D3"):
        assert report.layers[0].identity_error is not None
    if code == "N2":
        assert report.layers[0].rho is not None
        assert report.layers[0].rho > 1
    if code != "D1" and method not in ("sparse", "btx"):
        assert report.coverage == 1


NOTHING = [
    ("K=3 is not a multiple of M=2", "virtual_group", {"top_k": 3}),
    ("K=1 is not a multiple of M=2", "divmoe", {"specialists": SAME, "top_k": 1}),
    ("there is no latin square", "divmoe", {"specialists": SAME[:3]}),
    ("random router rows under topk", "virtual_group", {"router_init": "random"}),
    ("random rows give all 2 shards to 50% of the tokens", "divmoe", {"specialists": SAME, "router_init": "random"}),
    ("the scale is not the exact one", "virtual_group", {"scale": "paper"}),
    ("the scale is not the exact one", "virtual_group", {"scale": "none"}),
    ("not parts of the FFN", "drop", {}),
    ("not parts of the FFN", "scratch", {}),
    ("added unscaled", "virtual_group", {"scale": "none", "shared_experts": 1}),
]


@pytest.mark.parametrize(("reason", "method", "more"), NOTHING, ids=lambda v: str(v) if isinstance(v, str) else "")
def test_nothing_is_promised_and_the_reason_is_given(models, tmp_path, reason, method, more):
    target = make(models, tmp_path / "moe", method, **more)
    report = verify(models / "base", target, quiet=True)
    assert report.code == "none"
    assert reason in report.statement
    assert report.error > 1e-2
    assert any(line.startswith("no statement: ") for line in report.lines())


def test_the_papers_scale_and_router_show_what_d1_predicts(models, tmp_path):
    more = {"router_init": "random", "scale": "paper", "router_std": 1.0}
    target = make(models, tmp_path / "moe", "divmoe", specialists=SAME, **more)
    report = verify(models / "base", target, quiet=True)
    assert report.coverage is not None
    assert 0.3 < report.coverage < 0.7
    assert report.norm_ratio > 3.5
    assert "50% of the tokens" in report.statement


@pytest.mark.parametrize("bias", [False, True])
def test_tokens_with_a_hidden_state_of_zeros_are_left_out(tmp_path, bias):
    base = save_tiny(tmp_path / "base", "llama", mlp_bias=bias)

    # The embedding of a padding token, to which attention adds nothing in the first layer.
    change(base, "model.embed_tokens.weight", lambda tensor: tensor.index_fill(0, torch.tensor([5]), 0.0))
    change(base, "model.layers.0.self_attn.o_proj.weight", torch.zeros_like)
    target = make(tmp_path, tmp_path / "moe", "divmoe", specialists=("base",) * 4)
    report = verify(base, target, quiet=True)
    assert ("but 0" in report.statement) == bias
    assert report.coverage == 1.0
    assert report.norm_ratio == pytest.approx(1.0, abs=1e-5)
    assert any("a hidden state of zeros" in note and "layer 0" in note for note in report.notes)
    assert report.ok or bias  # a biased FFN of 0 is not 0, so that the models' logits differ


def test_top_k_of_one_with_complementary_shards_is_half_covered(models, tmp_path):
    target = make(models, tmp_path / "moe", "divmoe", specialists=SAME, top_k=1, router_init="latin_square")
    report = verify(models / "base", target, quiet=True)
    assert report.coverage == 0
    assert report.error > 0.5


def change(folder, name, function):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors[name] = function(tensors[name]).contiguous()
    save_file(tensors, file, metadata={"format": "pt"})


DAMAGES = [
    ("N1", "virtual_group", {}, "experts.down_proj", lambda w: w * 1.001),
    ("N1", "virtual_group", {"experts": 4}, "gate.weight", lambda w: w + 0.1 * torch.randn_like(w)),
    ("N2", "virtual_group", {"weighting": "all"}, "experts.gate_up_proj", lambda w: w * 1.01),
    ("D2", "divmoe", {"specialists": SAME}, "gate.weight", lambda w: w.flip(0)[torch.randperm(8)]),
    ("D3", "divmoe", {"specialists": DIFFERENT}, "experts.down_proj", lambda w: w.roll(2, 0)),
    ("D1", "divmoe", {"specialists": DIFFERENT, "router_init": "random"}, "experts.down_proj", lambda w: w * 1.01),
    ("S1", "virtual_group", {"shared_experts": 1}, "shared_expert.down_proj.weight", lambda w: w * 2),
]


@pytest.mark.parametrize(("code", "method", "more", "tensor", "damage"), DAMAGES)
def test_a_damaged_target_fails(models, tmp_path, code, method, more, tensor, damage):
    target = make(models, tmp_path / "moe", method, **more)
    change(target, f"model.layers.1.mlp.{tensor}", damage)
    report = verify(models / "base", target, quiet=True)
    assert report.code == code
    assert not report.ok
    assert any("FAILS" in line for line in report.lines())
    assert report.to_dict()["ok"] is False


def test_a_nan_in_the_target_fails(models, tmp_path):
    target = make(models, tmp_path / "moe", "virtual_group")
    change(target, "model.layers.1.mlp.experts.down_proj", lambda w: w.index_fill(0, torch.tensor([0, 1]), torch.nan))
    report = verify(models / "base", target, quiet=True)
    assert not report.ok
    assert report.max_logit_difference == float("inf")


def test_damage_outside_the_ffns_fails_through_the_logits(models, tmp_path):
    target = make(models, tmp_path / "moe", "virtual_group")
    change(target, "model.layers.0.self_attn.o_proj.weight", lambda w: w * 1.1)
    report = verify(models / "base", target, quiet=True)
    assert report.error < 1e-5
    assert not report.ok


def test_only_the_moe_layers_are_measured(models, tmp_path):
    target = make(models, tmp_path / "moe", "virtual_group", layers="every:2")
    report = verify(models / "base", target, quiet=True)
    assert [layer.layer for layer in report.layers] == [1]
    assert report.ok


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("shards", "shared"), [(2, 0), (3, 0), (3, 1), (2, 3)])
def test_half_precision_files_are_exact_where_no_stored_number_is_rounded(tmp_path, stored, shards, shared):
    """The routed experts' factor is on their weights; of the shared ones' 1/(2S), 1/6 rounds."""
    save_tiny(tmp_path / "base", "qwen2", dtype=stored)
    sizes = {"experts": 2 * shards, "shards": shards, "top_k": shards, "shared_experts": shared}
    report = verify(tmp_path / "base", make(tmp_path, tmp_path / "moe", "virtual_group", **sizes), quiet=True)
    assert report.ok, report.lines()
    assert (report.error < 1e-5) == (shared != 3)
    assert any("logit" in check.name for check in report.checks) == (shared != 3)


def test_biases_and_a_fused_base(tmp_path):
    save_tiny(tmp_path / "biased", "llama", mlp_bias=True)
    save_tiny(tmp_path / "fused", "phi3")
    for base in ("biased", "fused"):
        same = {"base": base, "specialists": (base, base)}
        assert verify(tmp_path / base, make(tmp_path, tmp_path / f"{base}-moe", "divmoe", **same), quiet=True).ok
        shutil.rmtree(tmp_path / f"{base}-moe")
    save_tiny(tmp_path / "drifted", "llama", mlp_bias=True, seed=5)
    target = make(tmp_path, tmp_path / "moe", "divmoe", base="biased", specialists=("biased", "drifted"))
    report = verify(tmp_path / "biased", target, quiet=True)
    assert report.code == "D3"
    assert report.ok, report.lines()


def test_specialists_that_are_gone_are_reported(models, tmp_path):
    shutil.copytree(models / "other1", tmp_path / "gone")
    shutil.copytree(models / "base", tmp_path / "base")
    target = make(tmp_path, tmp_path / "moe", "divmoe", specialists=("base", "gone"))
    shutil.rmtree(tmp_path / "gone")
    report = verify(tmp_path / "base", target, quiet=True)
    assert report.code == "D3"
    assert report.layers[0].identity_error is None
    assert any("could not be compared with the specialists" in note for note in report.notes)


@pytest.mark.parametrize("shared", ["mean", "base"])
def test_specialists_that_were_trained_further_are_not_compared_with(models, tmp_path, shared):
    for name in ("base", "other1"):
        shutil.copytree(models / name, tmp_path / name)
    target = make(tmp_path, tmp_path / "moe", "divmoe", specialists=("base", "other1"), shared_weights=shared)
    before = verify(tmp_path / "base", target, quiet=True)
    assert before.layers[0].identity_error is not None
    assert before.notes == ()
    change(tmp_path / "other1", "model.layers.1.mlp.down_proj.weight", lambda w: w * 1.5)
    after = verify(tmp_path / "base", target, quiet=True)
    assert after.ok, after.lines()
    assert after.layers[0].identity_error is None
    (note,) = after.notes
    assert f"the weights of {tmp_path / 'other1'} are not those that moesaic.json records for it" in note


def test_another_model_in_a_specialist_s_place_is_not_compared_with(models, tmp_path):
    shutil.copytree(models / "base", tmp_path / "base")
    shutil.copytree(models / "other1", tmp_path / "other")
    target = make(tmp_path, tmp_path / "moe", "divmoe", specialists=("base", "other"))
    shutil.rmtree(tmp_path / "other")
    save_tiny(tmp_path / "other", "llama", hidden_size=64)
    report = verify(tmp_path / "base", target, quiet=True)
    assert report.ok, report.lines()
    assert any("other is another model than the base: hidden is 64 there and 32 in the base" in n for n in report.notes)


def test_another_base_is_noticed(models, tmp_path, capsys):
    target = make(models, tmp_path / "moe", "virtual_group")
    report = verify(models / "other1", target, quiet=False)
    assert not report.ok
    assert any("are not those that moesaic.json records" in note for note in report.notes)
    assert "are not those that moesaic.json records" in capsys.readouterr().err


def test_a_base_of_another_shape_is_refused_in_one_line(models, tmp_path):
    target = make(models, tmp_path / "moe", "virtual_group")
    save_tiny(tmp_path / "wide", "llama", hidden_size=64)
    with pytest.raises(MoesaicError, match="hidden_size is 32 there and 64 in") as caught:
        verify(tmp_path / "wide", target, quiet=True)
    assert "\n" not in str(caught.value)
    save_tiny(tmp_path / "words", "llama", vocab_size=100)
    with pytest.raises(MoesaicError, match="vocab_size is 96 there and 100 in"):
        verify(tmp_path / "words", target, quiet=True)
    with pytest.raises(MoesaicError, match="is a llama model; verify compares"):
        verify(models / "base", models / "copy", quiet=True)
    with pytest.raises(MoesaicError, match="already a mixture of experts"):
        verify(target, target, quiet=True)


def test_without_a_record_the_figures_are_still_measured(models, tmp_path):
    target = make(models, tmp_path / "moe", "virtual_group")
    (target / "moesaic.json").unlink()
    report = verify(models / "base", target, quiet=True)
    assert report.code == "none"
    assert "has no moesaic.json" in report.statement
    assert report.error < 1e-5
    assert report.coverage == 1


def test_a_text_needs_a_tokenizer_and_random_tokens_are_admitted(models, tmp_path):
    target = make(models, tmp_path / "moe", "virtual_group")
    (tmp_path / "text.txt").write_text("some words")
    with pytest.raises(MoesaicError, match="has a tokenizer; leave --text out"):
        verify(models / "base", target, text=tmp_path / "text.txt", quiet=True)
    report = verify(models / "base", target, quiet=True)
    assert "random token ids (there is no tokenizer)" in "\n".join(report.lines())
    assert json.loads(json.dumps(report.to_dict()))["tokens"] == 1000
    with pytest.raises(MoesaicError, match="--batch-size 0"):
        verify(models / "base", target, batch_size=0, quiet=True)


def test_batches_change_nothing_but_rounding(models, tmp_path):
    target = make(models, tmp_path / "moe", "virtual_group")
    one, four = (verify(models / "base", target, batch_size=size, quiet=True) for size in (1, 4))
    assert one.perplexity_source == pytest.approx(four.perplexity_source, rel=1e-5)
    assert one.tokens == four.tokens == 1000


def test_another_data_type_of_the_run(models, tmp_path):
    target = make(models, tmp_path / "moe", "virtual_group")
    report = verify(models / "base", target, dtype="bfloat16", quiet=True)
    assert report.dtype == "bfloat16"
    assert report.ok, report.lines()


@pytest.mark.parametrize(("base", "specialists"), [("bfloat16", "float32"), ("float32", "bfloat16")])
@pytest.mark.parametrize("method", ["divmoe", "btx"])
def test_the_limit_follows_the_types_of_all_sources(tmp_path, method, base, specialists):
    """What is written has the base's type; a specialist of another one is rounded once on its way there."""
    save_tiny(tmp_path / "base", "llama", seed=0, dtype=getattr(torch, base))
    for seed in (1, 2, 3, 4):
        save_tiny(tmp_path / f"other{seed}", "llama", seed=seed, dtype=getattr(torch, specialists))
    others = [f"other{seed}" for seed in (1, 2, 3, 4)]
    report = verify(tmp_path / "base", make(tmp_path, tmp_path / "moe", method, others), quiet=True)
    assert report.code in ("D1", "D3")
    assert report.ok, report.lines()
