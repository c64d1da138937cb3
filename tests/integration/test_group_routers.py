"""`expand --routing one_per_copy_group` on families that have experts: moesaic_<family>, exact at the same K.

Weights and inputs are random; the family's own model is the reference, in float64 and float32.
"""

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import moesaic
from moesaic.checkpoint.source import open_checkpoint
from moesaic.common.errors import MoesaicError
from moesaic.families.moe import detect_moe
from moesaic.families.support import find, tested
from moesaic.routing.config import RuleConfig
from moesaic.routing.install import install
from tests.every_moe import EXPERTS, TOKENS, save
from tests.tiny_moes import MOE_FAMILIES, save_tiny_moe
from tests.tiny_training import save_tokenizer, tiny_recipe

LIMITS = {torch.float64: 1e-10, torch.float32: 1e-4}
REFUSED = {
    "gemma4_text": "does more than multiply hidden states",
    "deepseek_v4": "by a table of token ids",
    "inkling_text": "no slot per expert",
    "zaya": "no slot per expert",
}
ROUTERS = {  # kind -> family, settings
    "softmax": ("olmoe", {}),
    "softmax, weights that sum to 1": ("qwen3_moe", {"norm_topk_prob": True}),
    "softmax, a gated shared expert": ("qwen2_moe", {}),
    "softmax over the selected": ("mixtral", {}),
    "softmax over the selected, biased logits": ("gpt_oss", {}),
    "softmax in groups, scaled": (
        "deepseek_v2",
        {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
    ),
    "sigmoid and bias in groups, scaled": ("deepseek_v3", {"routed_scaling_factor": 2.5}),
    "sigmoid and bias in groups, weights as scored": ("glm4_moe", {"norm_topk_prob": False}),
}

pytestmark = pytest.mark.filterwarnings("ignore")


def grow(source, out, **settings):
    return moesaic.expand(source, out, routing="one_per_copy_group", quiet=True, **settings)


def logits(folder, dtype=torch.float64):
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, experts_implementation="eager").eval()
    with torch.no_grad():
        return model(TOKENS, use_cache=False).logits


def distance(folder, source, dtype=torch.float64):
    return (logits(folder, dtype) - logits(source, dtype)).abs().max().item()


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("kind", ROUTERS)
def test_every_kind_of_router_is_exact_at_the_same_top_k(tmp_path, kind):
    family, settings = ROUTERS[kind]
    source = save_tiny_moe(tmp_path / "source", family, **settings)
    result = grow(source, tmp_path / "out", experts=12, utility="weight_norm", delta=0)
    assert result.statement.code == "E2"
    config = config_of(tmp_path / "out")
    assert (config["model_type"], config["num_experts_per_tok"]) == (f"moesaic_{family}", 2)
    for dtype, limit in LIMITS.items():
        assert distance(tmp_path / "out", source, dtype) < limit
    plain = moesaic.expand(source, tmp_path / "plain", experts=12, utility="weight_norm", delta=0, quiet=True)
    assert plain.statement.code == "none"
    assert distance(tmp_path / "plain", source) > 1e-3
    # The noise tells copies apart, and leaves their group's score but for the second order.
    grow(source, tmp_path / "noisy", experts=12, utility="weight_norm", delta=1e-3)
    assert 0 < distance(tmp_path / "noisy", source) < 1e-4


@pytest.mark.parametrize("family", sorted(set(tested()) - set(REFUSED) - set(MOE_FAMILIES)))
def test_families_that_are_read_off_their_class_are_exact_too(tmp_path, family):
    source = save(tmp_path / "source", family)
    grow(source, tmp_path / "out", experts=EXPERTS + 8, delta=0)
    assert config_of(tmp_path / "out")["model_type"] == f"moesaic_{family}"
    # Two routers multiply in float32 whatever the model is in, and float64 does not run there.
    dtype = torch.float32 if family.startswith("inkling2") else torch.float64
    assert distance(tmp_path / "out", source, dtype) < LIMITS[dtype]


@pytest.mark.parametrize("family", REFUSED)
def test_others_are_refused_in_one_line(tmp_path, family):
    source = save(tmp_path / "source", family)
    with pytest.raises(MoesaicError, match=REFUSED[family]) as error:
        grow(source, tmp_path / "out", experts=EXPERTS + 8)
    assert "\n" not in str(error.value)


def test_capped_logits_are_refused(tmp_path):
    source = save(tmp_path / "source", "laguna")
    config = config_of(source) | {"moe_router_logit_softcapping": 2.0}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(MoesaicError, match="does more than multiply"):
        grow(source, tmp_path / "out", experts=EXPERTS + 8)


def test_copies_that_cannot_be_shared_out_over_groups_are_refused(tmp_path):
    source = save_tiny_moe(tmp_path / "source", "deepseek_v3")
    with pytest.raises(MoesaicError, match="group"):
        grow(source, tmp_path / "out", experts=9)


def test_it_loads_without_moesaic(tmp_path):
    """In a process that cannot import moesaic: the code beside the weights is enough, and it is what runs here."""
    source = save_tiny_moe(tmp_path / "source", "deepseek_v3")
    grow(source, tmp_path / "out", experts=12, delta=0)
    torch.save(logits(tmp_path / "out"), tmp_path / "logits.pt")
    code = (
        "import sys; sys.modules['moesaic'] = None\n"
        "import torch; from transformers import AutoModelForCausalLM\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(tmp_path / 'out')!r}, trust_remote_code=True,"
        " dtype=torch.float64, experts_implementation='eager').eval()\n"
        f"ids = torch.tensor({TOKENS.tolist()})\n"
        f"expected = torch.load({str(tmp_path / 'logits.pt')!r})\n"
        "with torch.no_grad(): print(torch.equal(model(ids, use_cache=False).logits, expected))\n"
        f"model.save_pretrained({str(tmp_path / 'saved')!r})\n"
    )
    environment = {"HF_MODULES_CACHE": str(tmp_path / "cache"), "PATH": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.strip() == "True", done.stderr[-2000:]
    assert distance(tmp_path / "saved", source) < 1e-10


@pytest.mark.parametrize("kind", ROUTERS)
def test_export_back_uses_all_copies(tmp_path, kind):
    family, settings = ROUTERS[kind]
    source = save_tiny_moe(tmp_path / "source", family, **settings)
    grow(source, tmp_path / "out", experts=16, delta=0)
    moesaic.export(tmp_path / "out", tmp_path / "back", to=family)
    config = config_of(tmp_path / "back")
    assert (config["model_type"], config["num_experts_per_tok"], "auto_map" in config) == (family, 4, False)
    assert not (tmp_path / "back" / "modeling_moesaic.py").exists()
    assert distance(tmp_path / "back", source, torch.float32) < 1e-4
    assert distance(tmp_path / "back", source) < 1e-6  # transformers' routers round to float32


def test_export_back_refuses_what_is_not_exact(tmp_path):
    source = save_tiny_moe(tmp_path / "source", "olmoe")
    grow(source, tmp_path / "noisy", experts=16)
    with pytest.raises(MoesaicError, match="copies that differ"):
        moesaic.export(tmp_path / "noisy", tmp_path / "back")
    grow(source, tmp_path / "uneven", experts=11, delta=0)
    with pytest.raises(MoesaicError, match="groups of different sizes"):
        moesaic.export(tmp_path / "uneven", tmp_path / "back")


@pytest.mark.parametrize("family", ["olmoe", "deepseek_v3"])
def test_the_other_verbs_work_on_it(tmp_path, family):
    source = save_tokenizer(save_tiny_moe(tmp_path / "source", family))
    grow(source, tmp_path / "out", experts=16, delta=1e-3)
    report = moesaic.verify(source, tmp_path / "out", quiet=True)
    assert (report.code, report.ok) == ("E2", True)
    everything = moesaic.select(tmp_path / "out", keep="100%", method="random")
    moesaic.extract(tmp_path / "out", everything, tmp_path / "all")
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "all"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    half = moesaic.select(tmp_path / "out", keep="75%", method="random", seed=1)
    moesaic.extract(tmp_path / "out", half, tmp_path / "half")
    model = moesaic.load(tmp_path / "out")
    with moesaic.restrict(model, half), torch.no_grad():
        restricted = model(TOKENS, use_cache=False).logits
    assert torch.allclose(restricted, logits(tmp_path / "half", torch.float32), atol=1e-5)
    assert detect_moe(open_checkpoint(tmp_path / "half")).num_experts == 12
    grow_again = moesaic.expand(tmp_path / "out", tmp_path / "more", experts=32, quiet=True)
    assert config_of(tmp_path / "more")["expert_groups"] != config_of(tmp_path / "out")["expert_groups"]
    assert grow_again.plan.grouped


@pytest.mark.parametrize(("family", "losses"), [("olmoe", {"balance": {"coefficient": 0.01}}), ("deepseek_v3", {})])
def test_it_trains_and_keeps_its_routing(tmp_path, family, losses):
    source = save_tokenizer(save_tiny_moe(tmp_path / "source", family))
    grow(source, tmp_path / "out", experts=16, delta=1e-3)
    recipe = tiny_recipe(
        tmp_path / "in",
        model=str(tmp_path / "out"),
        tokenizer=None,
        losses=losses,
        optimizer={"lr": 1e-2, "warmup_steps": 0},
        budget={"steps": 1},
    )
    moesaic.train(recipe, tmp_path / "trained", quiet=True)
    config = config_of(tmp_path / "trained")
    assert (config["model_type"], config["routing_rule"]) == (f"moesaic_{family}", "one_per_group")
    assert (tmp_path / "trained" / "modeling_moesaic.py").exists()
    assert 0 < distance(tmp_path / "trained", tmp_path / "out", torch.float32) < 10


def test_rules_of_ours_are_refused_where_the_family_decides_itself(tmp_path):
    source = save_tiny_moe(tmp_path / "source", "deepseek_v3")
    grow(source, tmp_path / "out", experts=16, delta=0)
    model = moesaic.load(tmp_path / "out")
    expected = logits(tmp_path / "out", torch.float32)
    installed = install(model, RuleConfig())
    assert all(router.__dict__["_moesaic_router"].settings.groups for router in installed.routers)
    with torch.no_grad():
        assert torch.equal(model(TOKENS, use_cache=False).logits, expected)
    for refused in (
        RuleConfig(rule="topk"),
        RuleConfig(rule="one_per_group", group_score="mean"),
        RuleConfig(rule="document_pool", pool_size=4),
    ):
        with pytest.raises(MoesaicError, match="routing"):
            install(model, refused)
    with pytest.raises(MoesaicError, match=r"losses\.bias_balancing"):
        install(model, RuleConfig(), selection_bias=True)


def test_the_balance_of_a_bias_that_the_block_hands_to_its_router(tmp_path):
    source = save(tmp_path / "source", "lfm2_moe")
    grow(source, tmp_path / "out", experts=2 * EXPERTS, delta=0)
    recipe = tiny_recipe(
        tmp_path / "in",
        model=str(tmp_path / "out"),
        tokenizer=None,
        optimizer={"lr": 1e-2, "warmup_steps": 0},
        budget={"steps": 1},
    )
    moesaic.train(recipe, tmp_path / "trained", quiet=True)
    assert 0 < distance(tmp_path / "trained", tmp_path / "out", torch.float32) < 10


def test_moesaic_family_is_looked_up_as_its_family():
    assert find("moesaic_olmoe").model_type == "olmoe"
    assert find("moesaic_llama").model_type == find("moesaic_*").model_type == "moesaic_*"
    with pytest.raises(MoesaicError, match="moesaic_olmo3x"):
        find("moesaic_olmo3x")
