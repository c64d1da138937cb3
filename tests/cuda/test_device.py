"""The references on a GPU where there is one; on the CPU the same code, by the path that a GPU takes.

python -m pytest tests/cuda
"""

import json
import sys
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import gpu
from moesaic.common.recipe import load_recipe
from moesaic.modeling.modeling_moesaic import ROUTING_WEIGHTINGS
from moesaic.routing.config import RuleConfig
from moesaic.routing.install import install, routing_context
from moesaic.routing.losses import balance_loss, measure_load, router_z_loss
from moesaic.routing.pools import RoutingContext
from moesaic.routing.rules import RouterSettings, build_rule, decide
from moesaic.training.recipe import TrainRecipe
from moesaic.training.run import train
from moesaic.training.state import list_states
from tests.reference import naive_routing as naive
from tests.tiny_models import tiny_moe_model
from tests.tiny_training import tiny_recipe

pytestmark = pytest.mark.cuda

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GROUPS = (0, 1, 0, 2, 2, 1)


@pytest.mark.parametrize("weighting", ROUTING_WEIGHTINGS)
@pytest.mark.parametrize("rule", ["topk", "one_per_group"])
def test_rules_against_naive_loops(rule, weighting):
    logits_TE = torch.randn(40, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    groups = {"groups": GROUPS, "group_score": "mean"} if rule == "one_per_group" else {}
    settings = RouterSettings(num_experts=6, top_k=2, weighting=weighting, cast_weights=False, **groups)
    decision = decide(build_rule(RuleConfig(), settings), logits_TE.to(DEVICE))
    ids, weights = (
        naive.route_groups(logits_TE, GROUPS, 2, weighting, "mean") if groups else naive.route(logits_TE, 2, weighting)
    )
    assert decision.expert_ids_TK.tolist() == ids
    expected_TK = torch.stack([torch.stack(row) for row in weights])
    torch.testing.assert_close(decision.weights_TK.cpu(), expected_TK, rtol=0, atol=1e-12)


def model_on_device(rule: str, implementation: str = "grouped_mm"):
    """A model whose experts run as on a GPU, also where there is none. Only batched_mm takes float64."""
    groups = {"routing_rule": rule, "expert_groups": [0, 0, 1, 1, 2, 2]} if rule == "one_per_group" else {}
    model = tiny_moe_model("llama", num_layers=2, **groups).to(DEVICE)
    model.set_experts_implementation(implementation)
    install(model.train(), RuleConfig(rule=rule))
    ids_BS = torch.randint(model.config.vocab_size, (2, 16), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    documents_N = torch.arange(4, device=DEVICE)
    context = RoutingContext(
        document_ids_T=documents_N.repeat_interleave(8), num_documents=4, document_keys_N=documents_N
    )
    return model, ids_BS, context


def loss_of(model, ids_BS, context):
    # A mask given as a whole: transformers would find the documents in the position ids, and wait for a look at them.
    documents_BS = context.document_ids_T.view(2, 16)
    places_S = torch.arange(16, device=ids_BS.device)
    mask_B1SS = ((documents_BS[:, :, None] == documents_BS[:, None]) & (places_S[:, None] >= places_S))[:, None]
    inputs = {"input_ids": ids_BS, "position_ids": (places_S % 8).expand(2, 16), "attention_mask": mask_B1SS}
    with routing_context(model, context) as record:
        logits_BSV = model(**inputs, use_cache=False).logits
        mask_T = context.token_mask_T
        balance, _ = balance_loss(record.decisions, mask_T, measure_load(record.decisions, mask_T))
        z_loss = router_z_loss(record.decisions, mask_T, batch_tokens=32)
    return torch.nn.functional.cross_entropy(logits_BSV.flatten(0, 1), ids_BS.flatten()) + balance + z_loss


class Waits(TorchDispatchMode):
    """Collects the operators after which a program waits for its device, because it wants a value or a size."""

    def __init__(self):
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2"}:
            self.seen.append(str(func))
        return func(*args, **kwargs or {})


@contextmanager
def never_waiting():
    """On a GPU torch itself refuses to wait; elsewhere the operators that would are counted."""
    if DEVICE.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
    else:
        with Waits() as waits:
            yield
        assert not waits.seen


@pytest.mark.parametrize("rule", ["topk", "one_per_group", "document_pool"])
def test_forward_and_losses_never_wait_for_the_device(rule):
    model, ids_BS, context = model_on_device(rule)
    loss_of(model, ids_BS, context)  # the first call makes what is kept on the device
    with never_waiting():
        loss_of(model, ids_BS, context)


def test_waiting_is_seen():
    tensor = torch.ones(3, device=DEVICE)
    with pytest.raises((AssertionError, RuntimeError)), never_waiting():
        tensor.sum().item()


@pytest.mark.parametrize("rule", ["topk", "one_per_group", "document_pool"])
def test_model_in_float64_against_the_cpu(rule):
    model, ids_BS, context = model_on_device(rule, "batched_mm")
    model.double()
    loss = loss_of(model, ids_BS, context)
    loss.backward()
    gradients = {
        name: parameter.grad.cpu() for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    other, _, _ = model_on_device(rule)
    other.double().cpu().set_experts_implementation("eager")
    context_cpu = RoutingContext(
        document_ids_T=context.document_ids_T.cpu(),
        num_documents=4,
        document_keys_N=context.document_keys_N.cpu(),
    )
    expected = loss_of(other, ids_BS.cpu(), context_cpu)
    torch.testing.assert_close(loss.detach().cpu(), expected.detach(), rtol=0, atol=1e-11)
    expected.backward()
    for name, parameter in other.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=0, atol=1e-11)


def test_resumed_run_is_bit_identical(tmp_path, monkeypatch):
    monkeypatch.setenv("MOESAIC_CACHE", str(tmp_path / "cache"))
    values = tiny_recipe(tmp_path / "in", routing={"rule": "document_pool", "pool_size": [2, 6]})
    whole = load_recipe(TrainRecipe, values | {"budget": {"steps": 6}, "checkpoint": {"every_steps": 3}})
    train(whole, tmp_path / "whole")
    train(whole, tmp_path / "parts")
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "parts" / name).unlink()
    (list_states(tmp_path / "parts" / "state")[-1] / "run.json").unlink()  # as if it had been killed after step 3
    train(whole, tmp_path / "parts", resume=True)
    expected, found = (load_file(tmp_path / run / "model.safetensors") for run in ("whole", "parts"))
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_the_benchmark_of_a_gpu_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gpu.py", str(tmp_path / "gpu.json"), "--small", "--repeats", "1"])
    gpu.main()
    (result,) = json.loads((tmp_path / "gpu.json").read_text())["results"]
    for dtype in ("float32", "bfloat16"):
        assert result[dtype]["step"].keys() == {"dense", "moesaic, topk", "moesaic, document_pool", "native"}
        assert all(row["tokens_per_second"] > 0 for row in result[dtype]["step"].values())
        block = result[dtype]["block"]
        assert {"dense", "experts, eager", "experts, grouped_mm", "experts, sonicmoe"} <= block.keys()
        assert all(row.keys() & {"min_ms", "absent"} for row in block.values())
