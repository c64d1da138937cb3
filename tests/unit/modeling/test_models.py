"""The architectures on every base: forward, backward, generation, saving and loading."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel

import moesaic  # noqa: F401  (registers the architectures)
from moesaic.modeling import class_names
from moesaic.modeling.modeling_moesaic import MoesaicRouter, MoesaicSparseMoeBlock
from tests.tiny_models import BASES, BASES_WITH_MLP_BIAS, cast, randomize, tiny_model, tiny_moe_config, tiny_moe_model

GROUPS: dict[str, Any] = {"routing_rule": "one_per_group", "expert_groups": [0, 0, 0, 1, 1, 2]}
SOME_LAYERS: dict[str, Any] = {"num_layers": 3, "moe_layers": [0, 2], "num_shared_experts": 2} | GROUPS
VARIANTS: dict[str, dict[str, Any]] = {"all": {}, "some": SOME_LAYERS}

every_base = pytest.mark.parametrize("base", BASES)
every_variant = pytest.mark.parametrize("variant", VARIANTS)
both_ties = pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])


def token_ids(rows: int = 2, length: int = 20, seed: int = 0) -> Tensor:
    return torch.randint(3, 96, (rows, length), generator=torch.Generator().manual_seed(seed))


def gradients(model: Any) -> dict[str, Tensor]:
    ids = token_ids()
    model.zero_grad()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@every_base
@every_variant
@both_ties
def test_forward_and_backward_reach_every_parameter(base: str, variant: str, tied: bool) -> None:
    model = tiny_moe_model(base, tied=tied, mlp_bias=base in BASES_WITH_MLP_BIAS, **VARIANTS[variant])
    assert [isinstance(layer.mlp, MoesaicSparseMoeBlock) for layer in model.model.layers] == [
        index in model.config.moe_layers for index in range(model.config.num_hidden_layers)
    ]
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    for name, gradient in gradients(model).items():
        assert gradient.isfinite().all(), name
        assert gradient.any(), name


@every_base
@every_variant
def test_generation_with_a_cache_equals_generation_without(base: str, variant: str) -> None:
    model = tiny_moe_model(base, dtype=torch.float64, **VARIANTS[variant])
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    ids = token_ids(length=5)
    cached = model.generate(ids, attention_mask=torch.ones_like(ids), use_cache=True, **options)
    assert cached.shape == (2, 17)
    assert cached.equal(model.generate(ids, attention_mask=torch.ones_like(ids), use_cache=False, **options))


@every_base
def test_gradient_checkpointing_gives_the_same_gradients(base: str) -> None:
    model = tiny_moe_model(base, **SOME_LAYERS).train()
    plain = gradients(model)
    model.activation_checkpointing_enable()
    checkpointed = gradients(model)
    assert model.is_activation_checkpointing
    assert all(checkpointed[name].equal(gradient) for name, gradient in plain.items())


@every_base
@both_ties
@pytest.mark.parametrize("shards", [False, True], ids=["one file", "shards"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saving_and_loading_is_bit_exact(
    base: str, tied: bool, shards: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = tiny_moe_model(base, tied=tied, dtype=dtype, mlp_bias=base in BASES_WITH_MLP_BIAS, **SOME_LAYERS)
    model.save_pretrained(tmp_path / "once", max_shard_size="20KB" if shards else "1GB")
    assert (len(list((tmp_path / "once").glob("*.safetensors"))) > 1) == shards
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "once")
    assert loaded.dtype == dtype
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    same_state(model, loaded)
    # in fp32, and not to the last bit: products depend on how tensors are aligned in memory
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "once", dtype=torch.float32)(token_ids()).logits
    expected = copy.deepcopy(model).float()(token_ids()).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)

    # what the loaded model writes is a complete checkpoint again
    loaded.save_pretrained(tmp_path / "twice", max_shard_size="20KB" if shards else "1GB")
    names = class_names(base)
    config = json.loads((tmp_path / "twice" / "config.json").read_text())
    assert {key: config[key] for key in names} == names
    assert config["moe_layers"] == [0, 2]
    texts = ("config.json", "generation_config.json", "modeling_moesaic.py")
    assert all((tmp_path / "once" / name).read_bytes() == (tmp_path / "twice" / name).read_bytes() for name in texts)
    same_state(model, AutoModelForCausalLM.from_pretrained(tmp_path / "twice"))


def same_state(first: PreTrainedModel, second: PreTrainedModel) -> None:
    expected, found = first.state_dict(), second.state_dict()
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].equal(tensor), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_type_can_be_chosen_when_loading(dtype: torch.dtype, tmp_path: Path) -> None:
    model = tiny_moe_model("qwen3")
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    same_state(cast(model, dtype), loaded)
    assert isinstance(AutoModel.from_pretrained(tmp_path, dtype=dtype), type(loaded.model))


@every_base
def test_new_modules_are_initialised_once_and_by_the_bases_rule(base: str) -> None:
    config = tiny_moe_config(base, hidden_size=64, moe_intermediate_size=64, initializer_range=0.05, **GROUPS)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    checked = 0
    for name, parameter in model.named_parameters():
        assert parameter.isfinite().all(), name
        if any(part in name for part in ("gate.weight", "experts", "lm_head", "self_attn.q_proj.weight")):
            assert parameter.std().item() == pytest.approx(0.05, rel=0.15), name
            checked += 1
    assert checked >= 2 * 3
    torch.manual_seed(0)
    same_state(model, AutoModelForCausalLM.from_config(config))


@pytest.mark.parametrize("shared", [0, 1])
def test_missing_tensors_are_initialised_when_loading(shared: int, tmp_path: Path) -> None:
    """Loading happens on the meta device; what a checkpoint lacks must still get the usual start."""
    model = tiny_moe_model("llama", num_shared_experts=shared)
    state = {name: tensor for name, tensor in model.state_dict().items() if ".mlp." not in name}
    model.save_pretrained(tmp_path, state_dict=state)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, parameter in loaded.named_parameters():
        if ".mlp." in name:
            assert 0.01 < parameter.std().item() < 0.04, name
        else:
            assert parameter.equal(model.state_dict()[name])


@every_base
def test_shards_of_one_ffn_give_the_dense_model(base: str) -> None:
    """Three shards, all active with equal weights, ``down_proj`` times 3: the dense model's logits."""
    bias = base in BASES_WITH_MLP_BIAS
    dense = tiny_model(base, mlp_bias=bias, dtype=torch.float64)
    moe = tiny_moe_model(
        base, mlp_bias=bias, dtype=torch.float64, num_experts=3, num_experts_per_tok=3, moe_intermediate_size=16
    )
    moe.load_state_dict(
        {name: tensor for name, tensor in dense.state_dict().items() if ".mlp." not in name}, strict=False
    )
    with torch.no_grad():
        for source, target in zip(dense.model.layers, moe.model.layers, strict=True):
            target.mlp.gate.weight.zero_()
            copy_shards(source.mlp, target.mlp.experts)
    expected, found = dense(token_ids()).logits, moe(token_ids()).logits
    assert (found - expected).abs().max() < 1e-12 * expected.abs().max()


def copy_shards(ffn: Any, experts: Any) -> None:
    if hasattr(ffn, "gate_up_proj"):
        gate, up = ffn.gate_up_proj.weight.chunk(2)
    else:
        gate, up = ffn.gate_proj.weight, ffn.up_proj.weight
    experts.gate_up_proj.copy_(torch.cat([gate.view(3, 16, -1), up.view(3, 16, -1)], dim=1))
    experts.down_proj.copy_(3 * ffn.down_proj.weight.view(-1, 3, 16).transpose(0, 1))
    if experts.has_bias:
        experts.gate_up_proj_bias.copy_(
            torch.cat([ffn.gate_proj.bias.view(3, 16), ffn.up_proj.bias.view(3, 16)], dim=1)
        )
        experts.down_proj_bias.copy_(ffn.down_proj.bias.expand(3, -1))  # times 3, divided by 3


def test_shared_experts_are_added_with_weight_one() -> None:
    block: Any = MoesaicSparseMoeBlock(tiny_moe_config("llama", num_shared_experts=2), 0)
    randomize(block, 0)
    hidden = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(0))
    assert block.shared_expert.down_proj.weight.shape == (32, 2 * 48)
    shared = block.shared_expert(hidden)
    with_shared = block(hidden)
    block.shared_expert = None
    torch.testing.assert_close(with_shared, block(hidden) + shared)


def test_each_layer_can_have_its_own_groups() -> None:
    groups = [[0, 0, 1, 1, 2, 2], [0, 1, 2, 0, 1, 2]]
    model = tiny_moe_model("llama", num_layers=3, moe_layers=[0, 2], routing_rule="one_per_group", expert_groups=groups)
    members = [module.members for module in model.modules() if isinstance(module, MoesaicRouter)]
    assert members == [[[0, 1], [2, 3], [4, 5]], [[0, 3], [1, 4], [2, 5]]]
    ids_TK = model.model.layers[2].mlp.gate(torch.randn(50, 32))[2]
    assert (ids_TK[:, 0] % 3 != ids_TK[:, 1] % 3).all()


@pytest.mark.parametrize("autocast", [False, True])
def test_router_computes_in_fp32(autocast: bool) -> None:
    router = MoesaicRouter(tiny_moe_config("llama"), 0)
    randomize(router, 0)
    router = router.to(torch.bfloat16)
    hidden_TD = torch.randn(9, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        logits_TE, weights_TK, ids_TK = router(hidden_TD)
    assert logits_TE.equal(hidden_TD.float() @ router.weight.float().t())
    assert weights_TK.dtype == torch.bfloat16
    assert ids_TK.equal(logits_TE.topk(2).indices)


def test_router_logits_can_be_recorded() -> None:
    model = tiny_moe_model("qwen3", **SOME_LAYERS)
    output = model.model(token_ids(), output_router_logits=True, output_hidden_states=True)
    assert [logits.shape for logits in output.router_logits] == [(40, 6), (40, 6)]
    assert len(output.hidden_states) == 4


def test_parallel_plans_follow_the_native_families() -> None:
    model = tiny_moe_model("llama", **SOME_LAYERS)
    assert model._no_split_modules == {"LlamaDecoderLayer"}
    assert model.ep_plan["model.layers.*.mlp.experts"] == "ep_dispatch_experts"
    assert model.ep_plan["model.layers.*.mlp.experts.gate_up_proj"] == "grouped_gemm"
    assert model.tp_plan["model.layers.*.mlp.experts"] == "moe_tp_experts"
    assert model.tp_plan["model.layers.*.self_attn.q_proj"] == "colwise"


def test_experts_implementation_can_be_chosen(tmp_path: Path) -> None:
    tiny_model("llama")  # the dense class remembers that it has no experts, and ours inherits from it
    model = tiny_moe_model("llama")
    assert model.config._experts_implementation == "eager"  # the class's own forward
    model.save_pretrained(tmp_path)
    other = AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="grouped_mm")
    assert other.config._experts_implementation == "grouped_mm"
    torch.testing.assert_close(other(token_ids()).logits, model(token_ids()).logits, rtol=1e-4, atol=1e-5)


def test_padding_does_not_change_the_other_tokens() -> None:
    model = tiny_moe_model("llama", dtype=torch.float64)
    ids = token_ids(rows=1)
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), ids], dim=1)
    mask = (torch.arange(24) >= 4).long().unsqueeze(0)
    positions = (torch.arange(24) - 4).clamp(min=0).unsqueeze(0)
    found = model(padded, attention_mask=mask, position_ids=positions).logits[:, 4:]
    torch.testing.assert_close(found, model(ids).logits, rtol=1e-10, atol=1e-12)
