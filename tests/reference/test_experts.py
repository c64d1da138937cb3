"""The experts against a naive float64 loop over tokens and choices: values and all gradients."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moesaic.modeling import modeling_moesaic
from moesaic.modeling.modeling_moesaic import MoesaicSparseMoeBlock
from tests.tiny_models import tiny_moe_config

HIDDEN, WIDTH, EXPERTS = 32, 24, 6
TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
BASES = {"silu": "llama", "gelu": "gemma2"}
ACTIVATIONS = {"silu": F.silu, "gelu": lambda x: F.gelu(x, approximate="tanh")}


def make_experts(dtype: torch.dtype, *, act: str = "silu", bias: bool = False) -> Any:
    config = tiny_moe_config(BASES[act], expert_mlp_bias=bias, experts_implementation="eager")
    experts = MoesaicSparseMoeBlock(config, 0).experts
    generator = torch.Generator().manual_seed(0)
    for parameter in experts.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).mul(0.3).to(dtype)
    return experts


def make_inputs(dtype: torch.dtype, tokens: int, top_k: int, unused: tuple[int, ...] = ()):
    generator = torch.Generator().manual_seed(1)
    scores_TE = torch.rand(tokens, EXPERTS, generator=generator)
    scores_TE[:, list(unused)] = -1
    ids_TK = scores_TE.topk(top_k).indices
    hidden_TD = torch.randn(tokens, HIDDEN, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weights_TK = torch.rand(tokens, top_k, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden_TD, ids_TK, weights_TK


def naive(experts, act, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, parameters: dict[str, Tensor]) -> Tensor:
    rows = []
    for token, ids in enumerate(ids_TK.tolist()):
        total = torch.zeros(HIDDEN, dtype=torch.float64)
        for k, expert in enumerate(ids):
            gate_up = parameters["gate_up_proj"][expert] @ hidden_TD[token]
            if "gate_up_proj_bias" in parameters:
                gate_up = gate_up + parameters["gate_up_proj_bias"][expert]
            output = parameters["down_proj"][expert] @ (act(gate_up[:WIDTH]) * gate_up[WIDTH:])
            if "down_proj_bias" in parameters:
                output = output + parameters["down_proj_bias"][expert]
            total = total + weights_TK[token, k] * output
        rows.append(total)
    return torch.stack(rows)


def check(experts, act: str, inputs, *, tolerance: float) -> list[Tensor]:
    hidden_TD, ids_TK, weights_TK = inputs
    upstream_TD = torch.randn(hidden_TD.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    output_TD = experts(*inputs)
    assert output_TD.dtype == hidden_TD.dtype
    leaves = [hidden_TD, weights_TK, *experts.parameters()]
    found = torch.autograd.grad(output_TD, leaves, upstream_TD.to(output_TD.dtype))

    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    named = dict(zip([name for name, _ in experts.named_parameters()], exact[2:], strict=True))
    expected_TD = naive(experts, ACTIVATIONS[act], exact[0], ids_TK, exact[1], named)
    expected = torch.autograd.grad(expected_TD, exact, upstream_TD.to(output_TD.dtype).double())
    for ours, reference in zip((output_TD, *found), (expected_TD, *expected), strict=True):
        assert ours.shape == reference.shape
        assert (ours.double() - reference).norm() <= tolerance * reference.norm()
    return list(found)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("act", BASES)
def test_values_and_gradients(act: str, bias: bool, dtype: torch.dtype) -> None:
    # 80 tokens x 2 reach the row padding of 16-bit floats (at least 16 rows per expert), with uneven counts
    check(make_experts(dtype, act=act, bias=bias), act, make_inputs(dtype, 80, 2), tolerance=TOLERANCE[dtype])


@pytest.mark.parametrize("top_k", [1, 3, EXPERTS])
@pytest.mark.parametrize("tokens", [1, 2, 33])
def test_any_number_of_tokens_and_choices(tokens: int, top_k: int) -> None:
    check(make_experts(torch.float64), "silu", make_inputs(torch.float64, tokens, top_k), tolerance=1e-14)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_unused_experts_get_zero_gradients(dtype: torch.dtype) -> None:
    experts = make_experts(dtype, bias=True)
    found = check(experts, "silu", make_inputs(dtype, 100, 3, unused=(0, 4)), tolerance=TOLERANCE[dtype])
    for gradient in found[2:]:
        assert (gradient.flatten(1) == 0).all(1).tolist() == [True, False, False, False, True, False]


def test_no_tokens() -> None:
    experts = make_experts(torch.float32)
    hidden_TD, ids_TK, weights_TK = make_inputs(torch.float32, 0, 2)
    output_TD = experts(hidden_TD, ids_TK, weights_TK)
    assert output_TD.shape == (0, HIDDEN)
    output_TD.sum().backward()
    assert experts.down_proj.grad.count_nonzero() == 0


def test_assignments_to_other_ranks_contribute_nothing() -> None:
    # transformers' expert parallelism marks them with the id `num_experts` and the weight 0
    experts = make_experts(torch.float64)
    hidden_TD, ids_TK, weights_TK = make_inputs(torch.float64, 20, 2)
    here_TK = ids_TK < 3
    masked = experts(hidden_TD, ids_TK.where(here_TK, EXPERTS), weights_TK * here_TK)
    expected = experts(hidden_TD, ids_TK, weights_TK * here_TK)
    torch.testing.assert_close(masked, expected, rtol=1e-14, atol=1e-15)
    for found, wanted in zip(
        torch.autograd.grad(masked.sum(), (hidden_TD, experts.down_proj)),
        torch.autograd.grad(expected.sum(), (hidden_TD, experts.down_proj)),
        strict=True,
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("bias", [False, True])
def test_transformers_implementations_agree(bias: bool, implementation: str) -> None:
    experts = make_experts(torch.float32, bias=bias)
    inputs = make_inputs(torch.float32, 30, 2)
    ours = experts(*inputs)
    experts.config._experts_implementation = implementation
    torch.testing.assert_close(experts(*inputs), ours, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_at_least_as_accurate_as_grouped_mm(dtype: torch.dtype) -> None:
    experts = make_experts(dtype)
    hidden_TD, ids_TK, weights_TK = make_inputs(dtype, 200, 4)
    exact = [tensor.detach().double() for tensor in (hidden_TD, weights_TK)]
    named = {name: parameter.detach().double() for name, parameter in experts.named_parameters()}
    expected_TD = naive(experts, F.silu, exact[0], ids_TK, exact[1], named)
    errors = {}
    for implementation in ("eager", "grouped_mm"):
        experts.config._experts_implementation = implementation
        errors[implementation] = (experts(hidden_TD, ids_TK, weights_TK).double() - expected_TD).norm()
    assert errors["eager"] <= 1.02 * errors["grouped_mm"]


def test_frozen_parameters_and_inputs() -> None:
    experts = make_experts(torch.float64, bias=True)
    hidden_TD, ids_TK, weights_TK = make_inputs(torch.float64, 40, 2)
    (expected,) = torch.autograd.grad(experts(hidden_TD, ids_TK, weights_TK).sum(), experts.down_proj)
    experts.gate_up_proj.requires_grad_(False)
    experts.down_proj_bias.requires_grad_(False)
    experts(hidden_TD.detach(), ids_TK, weights_TK.detach()).sum().backward()
    assert experts.gate_up_proj.grad is None
    assert experts.down_proj_bias.grad is None
    assert experts.down_proj.grad.equal(expected)


def test_autocast_is_that_of_linear() -> None:
    experts = make_experts(torch.float32)
    hidden_TD, ids_TK, weights_TK = make_inputs(torch.float32, 40, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output_TD = experts(hidden_TD, ids_TK, weights_TK)
        assert output_TD.dtype == F.linear(hidden_TD, experts.down_proj[0].t()).dtype == torch.bfloat16
        output_TD.sum().backward()
    low = copy.deepcopy(experts).to(torch.bfloat16)
    assert output_TD.equal(low(hidden_TD.bfloat16(), ids_TK, weights_TK.bfloat16()))
    assert hidden_TD.grad is not None
    assert hidden_TD.grad.dtype == experts.down_proj.grad.dtype == torch.float32


def test_checkpointing_and_repetition_give_the_same_bits() -> None:
    experts = make_experts(torch.float32)
    hidden_TD, ids_TK, weights_TK = make_inputs(torch.float32, 64, 2)
    leaves = [hidden_TD, weights_TK, *experts.parameters()]

    def gradients(output: Tensor) -> list[Tensor]:
        return [output, *torch.autograd.grad(output.square().sum(), leaves)]

    once = gradients(experts(hidden_TD, ids_TK, weights_TK))
    again = gradients(experts(hidden_TD, ids_TK, weights_TK))
    recomputed = gradients(checkpoint(experts, hidden_TD, ids_TK, weights_TK, use_reentrant=False))
    for first, second, third in zip(once, again, recomputed, strict=True):
        assert first.equal(second)
        assert first.equal(third)


def test_nothing_is_kept_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = make_experts(torch.float32)
    inputs = make_inputs(torch.float32, 16, 2)
    expected = experts(*inputs)
    saved = []
    monkeypatch.setattr(
        torch.autograd.function.FunctionCtx, "save_for_backward", lambda ctx, *tensors: saved.append(tensors)
    )
    with torch.no_grad():
        assert experts(*inputs).equal(expected)
    assert not saved
    experts(*inputs)
    assert saved  # so the line above means something


def test_only_the_experts_that_were_hit_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = make_experts(torch.float32)
    hidden_TD, ids_TK, weights_TK = make_inputs(torch.float32, 1, 2)
    run = []
    original = modeling_moesaic._linear
    monkeypatch.setattr(modeling_moesaic, "_linear", lambda spans, *rest: run.extend(spans) or original(spans, *rest))
    experts(hidden_TD, ids_TK, weights_TK)
    assert sorted({expert for expert, _, _ in run}) == sorted(ids_TK[0].tolist())


@pytest.mark.parametrize("rows", [1, 64, 96])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_chunks_of_any_size(dtype: torch.dtype, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_moesaic, "_CHUNK_ROWS", rows)
    check(make_experts(dtype, bias=True), "silu", make_inputs(dtype, 80, 2, unused=(2,)), tolerance=TOLERANCE[dtype])


def test_copies_and_pickles() -> None:
    config = tiny_moe_config("llama", routing_rule="one_per_group", expert_groups=[0, 0, 1, 1, 2, 2])
    config._experts_implementation = "eager"
    block = MoesaicSparseMoeBlock(config, 0)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter)
    hidden = torch.randn(2, 5, HIDDEN, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = block(hidden)
    for twin in (block, copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        output = twin(hidden)
        assert output.equal(expected)
        output.sum().backward()  # although the first call was in inference mode


def test_compiles() -> None:
    config = tiny_moe_config("llama", routing_rule="one_per_group", expert_groups=[0, 0, 1, 1, 2, 2])
    config._experts_implementation = "eager"
    block = MoesaicSparseMoeBlock(config, 0)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    hidden = torch.randn(2, 5, HIDDEN, generator=torch.Generator().manual_seed(0))
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(hidden), block(hidden), rtol=1e-5, atol=1e-6)
