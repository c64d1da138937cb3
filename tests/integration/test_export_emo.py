"""Released EMO checkpoints: converted, equal to a naive float64 model, and usable by the other verbs."""

import json

import pytest
import torch

import moesaic
from moesaic.checkpoint.source import open_checkpoint
from moesaic.common.errors import MoesaicError
from moesaic.families.moe import detect_moe
from tests.tiny_emo import CONFIG, EXPERTS, SHARED, TOP_K, naive_emo, save_tiny_emo

TOKENS = torch.randint(96, (24,), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("target", ["moesaic", "qwen2_moe"])
@pytest.mark.parametrize("layout", ["family", "fused"])
def test_equals_the_naive_model_in_float64(tmp_path, target, layout):
    source = save_tiny_emo(tmp_path / "emo")
    moesaic.export(source, tmp_path / "out", to=target, layout=layout)
    model = moesaic.load(tmp_path / "out", dtype="float32")
    logits = model(input_ids=TOKENS[None], use_cache=False).logits[0]
    torch.testing.assert_close(logits.double(), naive_emo(TOKENS), atol=2e-5, rtol=0)


def test_auto_is_the_family_that_every_engine_runs_and_check_compares(tmp_path):
    source = save_tiny_emo(tmp_path / "emo")
    result = moesaic.export(source, tmp_path / "out", check=True)
    assert result.family == "qwen2_moe"
    assert result.ok
    assert len(result.checks) == 1
    assert result.checks[0].largest_difference < 1e-5
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["qkv_bias"] is True
    assert config["norm_topk_prob"] is False
    assert config["num_experts"] == EXPERTS - SHARED
    assert config["num_experts_per_tok"] == TOP_K - SHARED
    assert config["max_position_embeddings"] == 4096
    assert not list(tmp_path.glob(".*"))


def test_the_older_model_type_is_the_same(tmp_path):
    source = save_tiny_emo(tmp_path / "emo", model_type="flex_olmo_noqknorm_prenorm")
    assert moesaic.export(source, tmp_path / "out", to="moesaic").family == "moesaic_llama"


def test_bf16_shared_expert_is_doubled_exactly(tmp_path):
    source = save_tiny_emo(tmp_path / "emo", dtype=torch.bfloat16)
    moesaic.export(source, tmp_path / "ours", to="moesaic")
    moesaic.export(source, tmp_path / "qwen", to="qwen2_moe")
    ours, qwen = (moesaic.load(tmp_path / name, dtype="float32") for name in ("ours", "qwen"))
    one, other = (model(input_ids=TOKENS[None], use_cache=False).logits for model in (ours, qwen))
    torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


def test_select_and_extract_work_on_the_result(tmp_path):
    source = save_tiny_emo(tmp_path / "emo")
    moesaic.export(source, tmp_path / "ours", to="moesaic")
    found = detect_moe(open_checkpoint(tmp_path / "ours"))
    assert (found.num_experts, found.top_k) == (EXPERTS - SHARED, TOP_K - SHARED)
    selection = moesaic.select(tmp_path / "ours", keep=4, method="random")
    moesaic.extract(tmp_path / "ours", selection, tmp_path / "small")
    assert detect_moe(open_checkpoint(tmp_path / "small")).num_experts == 4


def test_verbs_say_how_to_read_it(tmp_path):
    source = save_tiny_emo(tmp_path / "emo")
    with pytest.raises(MoesaicError, match=r"export .* --to moesaic"):
        detect_moe(open_checkpoint(source))
    with pytest.raises(MoesaicError, match=r"export .* --to moesaic"):
        moesaic.load(source)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_shared_experts": 2}, "num_shared_experts = 2"),
        ({"always_active_experts": [0]}, "always_active_experts"),
        ({"num_experts_per_layer": [0, 9]}, "num_experts_per_layer"),
        ({"norm_topk_prob": True}, "norm_topk_prob"),
        ({"num_experts": None}, "num_experts"),
        ({"num_experts_per_tok": 1}, "num_experts_per_tok"),
    ],
)
def test_what_cannot_be_expressed_is_refused(tmp_path, settings, message):
    source = save_tiny_emo(tmp_path / "emo")
    (source / "config.json").write_text(json.dumps({**CONFIG, **settings}))
    with pytest.raises(MoesaicError, match=message):
        moesaic.export(source, tmp_path / "out", to="moesaic")
    assert not (tmp_path / "out").exists()


def test_a_missing_tensor_is_named(tmp_path):
    name = "model.layers.1.mlp.experts.8.down_proj.weight"
    source = save_tiny_emo(tmp_path / "emo", drop=name)
    with pytest.raises(MoesaicError, match=rf"{name} is missing"):
        moesaic.export(source, tmp_path / "out", to="moesaic")
