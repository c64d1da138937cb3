"""`export`: native families against our own model, refusals rule by rule, layouts bit for bit, dtypes, GGUF's guard."""

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import moesaic
from moesaic.checkpoint.source import open_checkpoint
from moesaic.cli import app as cli
from moesaic.common.errors import MoesaicError
from moesaic.exporting.gguf import plan_gguf
from moesaic.exporting.recipe import ExportRecipe
from moesaic.exporting.rules import facts_of
from moesaic.exporting.view import view_of
from moesaic.families.dense_table import FAMILIES
from moesaic.families.moe_table import TARGETS
from tests.tiny_models import tiny_moe_model
from tests.tiny_moes import MOE_FAMILIES, save_tiny_moe
from tests.tiny_training import save_tokenizer

TOKENS = torch.randint(96, (2, 24), generator=torch.Generator().manual_seed(3))
DIVMOE = {"routing_rule": "one_per_group", "expert_groups": [0, 0, 1, 1, 2, 2]}

EXACT = [
    ("llama", "mixtral", {}),
    ("llama", "mixtral", {"tied": True, "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }}),
    ("mistral", "mixtral", {}),
    ("llama", "granitemoeshared", {"num_shared_experts": 2}),
    ("granite", "granitemoeshared", {"num_shared_experts": 1}),
    ("llama", "qwen2_moe", {"num_shared_experts": 2, "routing_weighting": "all"}),
    ("qwen2", "qwen2_moe", {"num_layers": 3, "moe_layers": [1, 2]}),
    ("qwen3", "qwen3_moe", {"num_layers": 3, "moe_layers": [0, 2], "routing_weighting": "all"}),
    ("olmo2", "flex_olmo", {"routing_weighting": "all"}),
]  # fmt: skip

REFUSED = [
    ("qwen3", "mixtral", {}, ["norm of queries and keys: per head, not none"]),
    ("llama", "mixtral", {"routing_weighting": "all"}, ["weights of the experts: softmax over all"]),
    ("llama", "mixtral", {"num_shared_experts": 1}, ["shared experts: with weight 1, not none"]),
    ("llama", "mixtral", {"num_layers": 3, "moe_layers": [1, 2]}, ["layers without experts: some, not none"]),
    ("llama", "mixtral", {"mlp_bias": True}, ["biases in experts: yes, not none"]),
    (
        "llama",
        "mixtral",
        {"attention_bias": True, **DIVMOE},
        ["attention biases: on q", "routing: one expert per group"],
    ),
    ("mistral", "qwen2_moe", {}, ["sliding window: in every layer, not none"]),
    ("llama", "granitemoeshared", {"head_dim": 16}, ["head size: another than"]),
    ("granite", "mixtral", {}, ["multipliers on embeddings"]),
    ("llama", "olmoe", {}, ["norm of queries and keys: none, not over all heads"]),
    ("gemma2", "mixtral", {}, ["Gemma's norms scale by 1 + weight", "sliding window: in some layers"]),
    ("olmo2", "mixtral", {}, ["norms: after attention and experts, not before attention and experts"]),
]


def save_ours(folder: Path, base: str, **settings) -> Path:
    tiny_moe_model(base, **settings).save_pretrained(folder)
    return folder


def logits(folder):
    return moesaic.load(folder, dtype="float32")(input_ids=TOKENS, use_cache=False).logits


def tensors(folder):
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize(("base", "family", "settings"), EXACT)
def test_a_native_family_computes_the_same(tmp_path, base, family, settings):
    source = save_ours(tmp_path / "moe", base, **settings)
    layout = "fused" if base == "qwen3" else "family"
    result = moesaic.export(source, tmp_path / "out", to=family, layout=layout)
    assert result.family == family
    torch.testing.assert_close(logits(tmp_path / "out"), logits(source), atol=1e-5, rtol=0)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["architectures"] == [TARGETS[family].causal_class]
    assert "auto_map" not in config
    assert not (tmp_path / "out/modeling_moesaic.py").exists()


@pytest.mark.parametrize(("base", "family", "settings", "rules"), REFUSED)
def test_every_rule_that_fails_is_named(tmp_path, base, family, settings, rules):
    source = save_ours(tmp_path / "moe", base, **settings)
    with pytest.raises(MoesaicError) as caught:
        moesaic.export(source, tmp_path / "out", to=family, dry_run=True)
    for rule in rules:
        assert rule in str(caught.value)
    assert "\n" not in str(caught.value)


def test_auto_takes_the_best_and_says_why(tmp_path, capsys):
    source = save_ours(tmp_path / "moe", "llama")
    assert cli.run(["export", str(source), str(tmp_path / "out")]) == 0
    assert "mixtral" in (line := capsys.readouterr().out)
    assert "every engine runs" in line


def test_auto_names_the_rules_of_every_family_where_none_fits(tmp_path):
    source = save_ours(tmp_path / "moe", "llama", **DIVMOE)
    with pytest.raises(
        MoesaicError, match="exactly none of the native families: routing: one expert per group"
    ) as caught:
        moesaic.export(source, tmp_path / "out", dry_run=True)
    assert "olmoe (norm of queries and keys" in str(caught.value)


def test_sigmoid_weights_are_those_of_no_native_family(tmp_path):
    source = save_ours(tmp_path / "moe", "llama", routing_weighting="sigmoid")
    with pytest.raises(MoesaicError, match="weights of the experts: sigmoids of the selected over their sum"):
        moesaic.export(source, tmp_path / "out", dry_run=True)


def test_biases_of_dense_layers_are_a_fact(tmp_path):
    view = view_of(open_checkpoint(save_ours(tmp_path / "moe", "llama", moe_layers=[1], mlp_bias=True)))
    for own, dense, fact in ((True, True, "yes"), (False, True, "yes"), (False, False, "none")):
        changed = replace(view, config={**view.config, "expert_mlp_bias": own, "mlp_bias": dense})
        assert facts_of(changed)["expert_bias"] == fact


def test_every_base_is_plain_or_special():
    plain = {name for name, row in FAMILIES.items() if not row.differs}
    assert plain == {"llama", "mistral", "qwen2", "qwen3", "olmo2", "granite"}


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_layouts_there_and_back_are_the_same_bits(tmp_path, family):
    source = save_tiny_moe(tmp_path / "m", family, dtype=torch.bfloat16)
    fused = save_tiny_moe(tmp_path / "fused", family, fused=True, dtype=torch.bfloat16)
    for name, layout, start, expected in (
        ("same", "input", source, source),
        ("other", "fused", source, fused),
        ("same-fused", "input", fused, fused),
        ("back", "family", fused, source),
    ):
        assert moesaic.export(start, tmp_path / name, layout=layout).family == family
        found, wanted = tensors(tmp_path / name), tensors(expected)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[key], wanted[key]) for key in found)


def test_native_checkpoints_become_ours(tmp_path):
    for family in ("qwen3_moe", "mixtral", "granitemoe", "flex_olmo"):
        source = save_tiny_moe(tmp_path / family, family)
        moesaic.export(source, tmp_path / f"{family}-ours", to="moesaic")
        torch.testing.assert_close(logits(tmp_path / f"{family}-ours"), logits(source), atol=1e-5, rtol=0)
    window = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 28}
    source = save_tiny_moe(tmp_path / "window", "qwen3_moe", **window)
    moesaic.export(source, tmp_path / "window-ours", to="moesaic")
    torch.testing.assert_close(logits(tmp_path / "window-ours"), logits(source), atol=1e-5, rtol=0)
    with pytest.raises(MoesaicError, match="its shared expert has a gate"):
        moesaic.export(save_tiny_moe(tmp_path / "q", "qwen2_moe"), tmp_path / "no", to="moesaic")


def test_dtype_rounds_every_weight_once(tmp_path):
    source = save_ours(tmp_path / "moe", "llama", num_shared_experts=1, routing_weighting="all")
    moesaic.export(source, tmp_path / "wide", to="qwen2_moe")
    moesaic.export(source, tmp_path / "half", to="qwen2_moe", dtype="bfloat16")
    wide, half = tensors(tmp_path / "wide"), tensors(tmp_path / "half")
    assert all(torch.equal(half[name], tensor.bfloat16()) for name, tensor in wide.items())
    assert json.loads((tmp_path / "half/config.json").read_text())["dtype"] == "bfloat16"
    moesaic.export(source, tmp_path / "f16", to="qwen2_moe", dtype="float16")
    assert all(gate.all() for name, gate in tensors(tmp_path / "f16").items() if "shared_expert_gate" in name)


def test_a_number_too_large_for_float16_is_refused(tmp_path):
    model = tiny_moe_model("llama")
    with torch.no_grad():
        model.model.norm.weight[0] = 1e5
    model.save_pretrained(tmp_path / "moe")
    with pytest.raises(MoesaicError, match=r"model\.norm\.weight leaves the range of F16"):
        moesaic.export(tmp_path / "moe", tmp_path / "out", dtype="float16")
    assert not (tmp_path / "out").exists()


def test_tied_rows_and_16_bit_routers_are_warned_about(tmp_path):
    model = tiny_moe_model("llama", dtype=torch.bfloat16)
    with torch.no_grad():
        gate = model.model.layers[0].mlp.gate.weight
        gate[1] = gate[0]
    model.save_pretrained(tmp_path / "moe")
    assert "routers of 1 layers have equal rows" in moesaic.export(tmp_path / "moe", tmp_path / "a").notices[0]
    assert not moesaic.export(tmp_path / "moe", tmp_path / "b", dtype="float32").notices


def test_check_fails_where_the_result_differs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("moesaic.probe.MAX_TOKENS", 40)
    source = save_ours(tmp_path / "moe", "llama")
    assert cli.run(["export", str(source), str(tmp_path / "out"), "--check", "--quiet", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["checks"][0]["ok"] is True
    monkeypatch.setattr("moesaic.exporting.check.RELATIVE", 0.0)
    monkeypatch.setattr("moesaic.exporting.check.compare_logits.__defaults__", (0.0,))
    assert cli.run(["export", str(source), str(tmp_path / "out2"), "--check", "--quiet"]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "gpt2"], "--to gpt2: not one of"),
        (["--layout", "stacked"], "layout"),
        (["--layout", "per-expert", "--to", "moesaic"], "--layout per-expert"),
        (["--shard-size", "0"], "shard"),
        (["--check", "--dry-run"], "--check needs the result"),
        (["--check", "--text", "/nowhere.txt"], "--text /nowhere.txt: cannot be read"),
        (["--check", "--device", "cuda:77"], "--device cuda:77"),
        (["--to", "gguf"], "MOESAIC_LLAMA_CPP"),
        (["--to", "gguf", "--layout", "fused"], "--layout fused"),
        (["--to", "gguf", "--llama-cpp", "/nowhere"], "convert_hf_to_gguf.py"),
    ],
)
def test_wrong_options_are_one_line(tmp_path, capsys, monkeypatch, arguments, message):
    monkeypatch.delenv("MOESAIC_LLAMA_CPP", raising=False)
    source = save_ours(tmp_path / "moe", "llama")
    assert cli.run(["export", str(source), str(tmp_path / "out"), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_dense_model_is_refused(tmp_path):
    from tests.tiny_models import save_tiny

    with pytest.raises(MoesaicError, match="not an MoE family"):
        moesaic.export(save_tiny(tmp_path / "dense", "llama"), tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.weight"), r"k_proj\.weight is missing"),
        (
            lambda tensors: tensors.update({"model.layers.0.extra": torch.ones(2)}),
            r"unknown tensor model\.layers\.0\.extra",
        ),
        (lambda tensors: tensors.update({"model.norm.weight": torch.ones(3)}), r"model\.norm\.weight has shape"),
        (lambda tensors: tensors.pop("model.layers.1.mlp.experts.down_proj"), "layer 1 has"),
        (lambda tensors: tensors["model.norm.weight"].fill_(torch.nan), r"model\.norm\.weight"),
    ],
)
def test_a_damaged_checkpoint_is_refused_and_named(tmp_path, change, message):
    source = save_ours(tmp_path / "moe", "llama")
    weights = tensors(source)
    change(weights)
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(MoesaicError, match=message):
        moesaic.export(source, tmp_path / "out", to="mixtral")
    assert not (tmp_path / "out").exists()


def test_an_existing_target_is_kept(tmp_path):
    source = save_ours(tmp_path / "moe", "llama")
    moesaic.export(source, tmp_path / "out")
    with pytest.raises(MoesaicError, match="exists"):
        moesaic.export(source, tmp_path / "out", to="granitemoeshared")
    moesaic.export(source, tmp_path / "out", to="granitemoeshared", overwrite=True)
    assert open_checkpoint(tmp_path / "out").config["model_type"] == "granitemoeshared"


def test_a_rule_that_training_recorded_is_not_lost_in_silence(tmp_path):
    source = save_tiny_moe(tmp_path / "m", "qwen3_moe")
    record = {"format": "moesaic/1", "routing": {"rule": {"rule": "topk"}, "selection_bias": [[0.1] * 8] * 2}}
    (source / "moesaic.json").write_text(json.dumps(record))
    result = moesaic.export(source, tmp_path / "fused", layout="fused")
    assert "selection bias" in result.notices[0]
    assert json.loads((tmp_path / "fused/moesaic.json").read_text())["routing"] == record["routing"]
    with pytest.raises(MoesaicError, match=r"selection bias that moesaic\.json records"):
        moesaic.export(source, tmp_path / "ours", to="moesaic")


def record_rule(folder, selection_bias=None, **rule):
    record = {"format": "moesaic/1", "routing": {"rule": rule, "selection_bias": selection_bias}}
    (folder / "moesaic.json").write_text(json.dumps(record))


def test_top_k_that_training_recorded_goes_before_the_groups_of_the_config(tmp_path):
    source = save_ours(tmp_path / "moe", "llama", **DIVMOE)
    by_groups = logits(source)
    record_rule(source, rule="topk")
    assert moesaic.export(source, tmp_path / "out").family == "mixtral"
    torch.testing.assert_close(logits(tmp_path / "out"), logits(source), atol=1e-5, rtol=0)
    assert not torch.allclose(logits(source), by_groups, atol=1e-3)
    notices = moesaic.export(source, tmp_path / "same", to="moesaic").notices
    assert "plain top-k: the rule is in moesaic.json" in notices[0]
    assert "would route by config.json (one expert per group)" in notices[0]
    for number, groups in enumerate((None, DIVMOE["expert_groups"], [0, 1, 2, 0, 1, 2])):
        record_rule(source, rule="one_per_group", expert_groups=groups)
        result = moesaic.export(source, tmp_path / f"groups-{number}", to="moesaic", dry_run=True)
        assert bool(result.notices) == (number == 2)


def test_groups_that_training_recorded_for_a_native_model_are_not_lost_in_silence(tmp_path):
    source = save_tiny_moe(tmp_path / "m", "qwen3_moe")
    record_rule(source, rule="one_per_group", expert_groups=[0, 0, 1, 1, 2, 2, 3, 3])
    with pytest.raises(MoesaicError, match=r"not exactly moesaic \(routing: one expert per group, not plain"):
        moesaic.export(source, tmp_path / "ours", to="moesaic")
    assert "one expert per group" in moesaic.export(source, tmp_path / "fused", layout="fused").notices[0]


@pytest.mark.parametrize("family", ["olmoe", "qwen2_moe", "granitemoeshared"])
def test_pools_are_no_obstacle_for_gguf_but_a_bias_is(tmp_path, family):
    (tmp_path / "convert_hf_to_gguf.py").touch()
    source = save_tokenizer(save_tiny_moe(tmp_path / "m", family, rms_norm_eps=1e-5))
    recipe = ExportRecipe(checkpoint=str(source), to="gguf")
    record_rule(source, rule="document_pool", pool_size=[2, 8])
    assert plan_gguf(recipe, tmp_path).native.family == family
    record_rule(source, rule="topk", selection_bias=[[0.1] * 8] * 2)
    with pytest.raises(MoesaicError, match=r"selection bias that moesaic\.json records: llama\.cpp would route"):
        plan_gguf(recipe, tmp_path)


GGUF_REFUSED = [
    ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob: false, where llama.cpp computes true"),
    ("qwen2_moe", {"norm_topk_prob": True}, "norm_topk_prob: true, where llama.cpp computes false"),
    ("olmoe", {"norm_topk_prob": True}, "norm_topk_prob: true"),
    ("olmoe", {"rms_norm_eps": 1e-6}, "rms_norm_eps: 1e-06, where llama.cpp computes 1e-05"),
    ("olmoe", {"clip_qkv": 3.0}, "clip_qkv: 3.0"),
    ("mixtral", {"sliding_window": 8}, "sliding window: yes"),
    ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 4}, "sliding window: in every layer"),
    ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}, "sliding window: yes"),
    ("qwen2_moe", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0,
        "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}}, "rope: llama3"),
    ("flex_olmo", {}, "FlexOlmo"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "settings", "message"), GGUF_REFUSED)
def test_what_llama_cpp_gets_wrong_is_refused(tmp_path, family, settings, message):
    (tmp_path / "convert_hf_to_gguf.py").touch()
    source = save_tokenizer(save_tiny_moe(tmp_path / "m", family, **settings))
    with pytest.raises(MoesaicError) as caught:
        plan_gguf(ExportRecipe(checkpoint=str(source), to="gguf"), tmp_path)
    assert message in str(caught.value)


def test_gguf_goes_through_a_family_that_llama_cpp_computes(tmp_path):
    (tmp_path / "convert_hf_to_gguf.py").touch()
    cases = [
        ("llama", {}, "mixtral"),
        ("llama", {"num_shared_experts": 1}, "granitemoeshared"),
        ("llama", {"num_shared_experts": 1, "routing_weighting": "all"}, "qwen2_moe"),
    ]
    for number, (base, settings, family) in enumerate(cases):
        source = save_tokenizer(save_ours(tmp_path / str(number), base, tied=True, **settings))
        plan = plan_gguf(ExportRecipe(checkpoint=str(source), to="gguf"), tmp_path)
        assert plan.native.family == family
        names = set(plan.native.tensors)
        assert ("lm_head.weight" in names) == (family == "qwen2_moe")
    with pytest.raises(MoesaicError, match="tokenizer"):
        plan_gguf(ExportRecipe(checkpoint=str(save_ours(tmp_path / "none", "llama")), to="gguf"), tmp_path)


def test_a_converter_that_fails_leaves_nothing(tmp_path):
    (tmp_path / "convert_hf_to_gguf.py").write_text("import sys; sys.exit('unknown tokenizer')")
    source = save_tokenizer(save_ours(tmp_path / "moe", "llama"))
    with pytest.raises(MoesaicError, match="failed with status 1: unknown tokenizer"):
        moesaic.export(source, tmp_path / "out", to="gguf", llama_cpp=tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"convert_hf_to_gguf.py", "moe"}


def test_a_killed_converter_s_native_folder_goes_with_the_next_run(tmp_path):
    (tmp_path / "convert_hf_to_gguf.py").write_text("import os, signal; os.kill(os.getppid(), signal.SIGKILL)")
    source = save_tokenizer(save_ours(tmp_path / "moe", "llama"))
    command = [
        sys.executable,
        "-m",
        "moesaic",
        "export",
        source,
        tmp_path / "out",
        "--to",
        "gguf",
        "--llama-cpp",
        tmp_path,
    ]
    done = subprocess.run([*map(str, command), "--quiet"], capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL
    assert any("-scratch" in path.name for path in tmp_path.iterdir())
    (tmp_path / "convert_hf_to_gguf.py").write_text("import sys; sys.exit('unknown tokenizer')")
    with pytest.raises(MoesaicError, match="unknown tokenizer"):
        moesaic.export(source, tmp_path / "out", to="gguf", llama_cpp=tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"convert_hf_to_gguf.py", "moe"}


def test_what_the_converter_imports_is_asked_for_first(tmp_path, monkeypatch):
    (tmp_path / "convert_hf_to_gguf.py").touch()
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(MoesaicError, match=r"needs sentencepiece; pip install 'moesaic\[gguf\]'"):
        plan_gguf(ExportRecipe(checkpoint=str(tmp_path / "any"), to="gguf"), tmp_path)
