"""One MoE block of a loaded model: where its parts are, and its experts run with the norm of every output.

Letters: T tokens, D hidden, E experts, K active, H twice the experts' width, R rows of one expert.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn

from moesaic.common.errors import MoesaicError

_ROUTER_NAMES = ("gate", "router")

_COMPILED_PER_SHAPE = (torch.bfloat16, torch.float16)
"""On CPUs, oneDNN compiles a kernel for every number of rows in these types: 2 ms, and 1.6 MB that it keeps."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MoEBlock:
    """The modules of one MoE layer."""

    block: nn.Module
    router: nn.Module
    """Returns (logits, weights, ids)."""
    experts: Any
    """All routed experts, stacked; called with (hidden, ids, weights)."""


def find_block(layer: nn.Module) -> MoEBlock | None:
    """The MoE block of a decoder layer; None for a dense layer."""
    for block in layer.modules():
        experts = getattr(block, "experts", None)
        router = next((getattr(block, name) for name in _ROUTER_NAMES if hasattr(block, name)), None)
        if isinstance(experts, nn.Module) and hasattr(experts, "gate_up_proj") and isinstance(router, nn.Module):
            return MoEBlock(block=block, router=router, experts=experts)
    return None


def find_blocks(model: nn.Module) -> list[MoEBlock]:
    """The MoE blocks of a model, in the order of its layers."""
    layers = next(
        (module for name, module in model.named_modules() if name.split(".")[-1] == "layers"), nn.ModuleList()
    )
    blocks = [block for block in map(find_block, layers.children()) if block is not None]
    if not blocks:
        raise MoesaicError(f"{type(model).__name__}: has no mixture-of-experts layer with a router and stacked experts")
    return blocks


@contextmanager
def replaced_forward(module: nn.Module, forward: Any) -> Iterator[None]:
    """Give one module another forward for a while; hooks still run around it."""
    before = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.__dict__["forward"]
        else:
            module.forward = before


def run_experts(
    experts: Any,
    hidden_TD: Float[Tensor, "tokens hidden"],
    ids_TK: Int64[Tensor, "tokens active"],
    weights_TK: Float[Tensor, "tokens active"],
) -> tuple[Float[Tensor, "tokens hidden"], Float[Tensor, "tokens active"]]:
    """The experts' weighted sum as the model's own code computes it, and the 2-norm of each expert's output.

    The norms are of the outputs before weighting, in fp32 (fp64 in an fp64 model). The assignments are sorted by expert
    once, so the pass costs what a plain one does. Works on every experts module of transformers' interface: transposed
    matrices, biases and gates of its own (GPT-OSS) included.
    """
    num_experts, active = experts.gate_up_proj.shape[0], ids_TK.shape[1]
    wide = torch.promote_types(hidden_TD.dtype, torch.float32)
    order_A = ids_TK.reshape(-1).argsort(stable=True)
    counts = ids_TK.reshape(-1).bincount(minlength=num_experts).tolist()
    weights_A = weights_TK.reshape(-1).to(wide)
    sum_TD = hidden_TD.new_zeros(hidden_TD.shape, dtype=wide)
    norms_A = weights_A.new_empty(weights_A.shape)
    start = 0
    for expert, count in enumerate(counts):
        if count:
            rows_R = order_A[start : start + count]
            token_R = rows_R // active
            padded_P = F.pad(token_R, (0, _number_of_rows(count, hidden_TD) - count))
            output_RD = _one_expert(experts, expert, hidden_TD[padded_P])[:count].to(wide)
            norms_A[rows_R] = torch.linalg.vector_norm(output_RD, dim=-1)
            sum_TD.index_add_(0, token_R, output_RD * weights_A[rows_R].unsqueeze(-1))
            start += count
    return sum_TD.to(hidden_TD.dtype), norms_A.view_as(ids_TK)


def _number_of_rows(count: int, hidden_TD: Tensor) -> int:
    """How many rows to run an expert on instead of `count`: few different numbers, at most an eighth (or 15) more."""
    if hidden_TD.device.type != "cpu" or hidden_TD.dtype not in _COMPILED_PER_SHAPE:
        return count
    step = 1 << max(4, count.bit_length() - 4)
    return -(-count // step) * step


def _one_expert(experts: Any, expert: int, hidden_RD: Tensor) -> Tensor:
    bias = experts.has_bias
    gate_up_RH = _linear(experts, hidden_RD, experts.gate_up_proj[expert])
    if bias:
        gate_up_RH = gate_up_RH + experts.gate_up_proj_bias[expert]
    output_RD = _linear(experts, experts._apply_gate(gate_up_RH), experts.down_proj[expert])
    return output_RD + experts.down_proj_bias[expert] if bias else output_RD


def _linear(experts: Any, input_RX: Tensor, weight: Tensor) -> Tensor:
    return input_RX @ weight if experts.is_transposed else F.linear(input_RX, weight)
