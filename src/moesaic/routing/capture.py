"""What the MoE layers of a loaded model do with tokens: where their parts are, and what passes through them in a call.

Letters: T tokens, D hidden, E experts, K active, H twice the experts' width, R rows of one expert.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn

from moesaic.common.errors import MoesaicError

Scoring = Literal["softmax", "sigmoid"]

_ROUTER_NAMES = ("gate", "router")

_SHARED_BESIDE = ("shared_mlp",)
"""Shared experts that the decoder layer, not the MoE block, adds (Granite-MoE-shared)."""

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

    @property
    def num_experts(self) -> int:
        """E."""
        return self.experts.down_proj.shape[0]


def find_block(layer: nn.Module) -> MoEBlock | None:
    """The MoE block of a decoder layer; None for a dense layer."""
    for block in layer.modules():
        experts = getattr(block, "experts", None)
        router = next((getattr(block, name) for name in _ROUTER_NAMES if hasattr(block, name)), None)
        if isinstance(experts, nn.Module) and hasattr(experts, "down_proj") and isinstance(router, nn.Module):
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
    num_experts, active = experts.down_proj.shape[0], ids_TK.shape[1]
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
    if not experts.has_gate or experts.has_post_expert_norm:
        ids_R1 = torch.full((len(hidden_RD), 1), expert, device=hidden_RD.device)
        return type(experts).forward(experts, hidden_RD, ids_R1, torch.ones_like(ids_R1, dtype=hidden_RD.dtype))
    bias = experts.has_bias
    gate_up_RH = _linear(experts, hidden_RD, experts.gate_up_proj[expert])
    if bias:
        gate_up_RH = gate_up_RH + experts.gate_up_proj_bias[expert]
    output_RD = _linear(experts, experts._apply_gate(gate_up_RH), experts.down_proj[expert])
    return output_RD + experts.down_proj_bias[expert] if bias else output_RD


def _linear(experts: Any, input_RX: Tensor, weight: Tensor) -> Tensor:
    return input_RX @ weight if experts.is_transposed else F.linear(input_RX, weight)


def decision_of(output: Sequence[Tensor], returns: str) -> tuple[Tensor, Tensor, Tensor]:
    """Logits TE, weights TK and ids TK of what a router gave; of scores, logits that give the same scores."""
    first_TE, weights_TK, ids_TK = output[:3]
    inverse = {"logits": lambda values: values, "softmax": _logarithm, "sigmoid": torch.logit}[returns]
    logits_TE = inverse(first_TE).reshape(-1, first_TE.shape[-1])
    return logits_TE, weights_TK.reshape(len(logits_TE), -1), ids_TK.reshape(len(logits_TE), -1)


def _logarithm(values: Tensor) -> Tensor:
    return values.clamp_min(torch.finfo(values.dtype).tiny).log()  # of 0 there is no gradient


def probabilities(logits_TE: Float[Tensor, "tokens experts"], scoring: Scoring) -> Float[Tensor, "tokens experts"]:
    """The router's probabilities in float64: softmax over all experts, or sigmoid scores divided by their sum.

    Without selection bias and groups: these decide which experts are used, not what they are worth.
    """
    logits_TE = logits_TE.double()
    if scoring == "softmax":
        return logits_TE.softmax(dim=-1)
    scores_TE = logits_TE.sigmoid()
    return scores_TE / scores_TE.sum(dim=-1, keepdim=True)


@dataclass(frozen=True, kw_only=True, eq=False)
class Routed:
    """What one MoE layer did with some tokens."""

    logits_TE: Float[Tensor, "tokens experts"]
    ids_TK: Int64[Tensor, "tokens active"]
    weights_TK: Float[Tensor, "tokens active"]
    norms_TK: Float[Tensor, "tokens active"]
    """2-norm of the selected experts' outputs, before weighting."""
    input_TD: Float[Tensor, "tokens hidden"]
    """What the block got."""
    residual_TD: Float[Tensor, "tokens hidden"]
    """The residual stream: the input before the norm that comes right before the block, where there is one."""
    routed_TD: Float[Tensor, "tokens hidden"]
    """Weighted sum of the routed experts."""
    output_TD: Float[Tensor, "tokens hidden"]
    """The same with the shared experts, as the model weighs them."""

    def select(self, tokens: slice | Tensor) -> "Routed":
        """Only some of the tokens: a range, or a mask."""
        return Routed(**{name: value[tokens] for name, value in vars(self).items()})


@contextmanager
def observed(layer: nn.Module, returns: str = "logits") -> Iterator[Callable[[], Routed]]:
    """Watch a decoder layer with an MoE block; gives a function that says what the last call did, and forgets it.

    `returns` is what the family's router gives first (`MoEFamily.returns`).
    """
    block = find_block(layer)
    assert block is not None, "a dense layer"
    seen: dict[nn.Module, tuple[Any, Any]] = {}

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        seen[module] = (args[0] if args else kwargs.get("hidden_states"), output)

    def forward(hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        routed_TD, norms_TK = run_experts(block.experts, hidden_TD, ids_TK, weights_TK)
        seen[block.experts] = (norms_TK, routed_TD)
        return routed_TD

    def routed() -> Routed:
        found = _routed(layer, block, seen, returns)
        seen.clear()
        return found

    with ExitStack() as stack:
        stack.enter_context(replaced_forward(block.experts, forward))
        around = (module for module in layer.children() if module is not block.experts)
        for module in dict.fromkeys((*around, block.router, block.block)):
            stack.callback(module.register_forward_hook(keep, with_kwargs=True).remove)
        yield routed


def _routed(layer: nn.Module, block: MoEBlock, seen: Mapping[nn.Module, tuple[Any, Any]], returns: str) -> Routed:
    """Of what each module was given and gave in one call, that which matters; tokens flattened."""
    assert block.router in seen, "the layer was not called"
    logits_TE, weights_TK, ids_TK = decision_of(seen[block.router][1], returns)
    norms_TK, routed_TD = seen[block.experts]
    beside_ffn = block.block is layer  # Gemma 4: the experts stand beside the FFN, and the router sees the residual
    given: Tensor = seen[block.router if beside_ffn else block.block][0]
    output: Tensor = routed_TD.reshape(given.shape) if beside_ffn else _first(seen[block.block][1])
    residual = given
    for before, after in seen.values():
        if _first(after) is given and before.shape == given.shape:  # the norm right before the block
            residual = before
    beside = [_first(seen[child][1]) for name, child in layer.named_children() if name in _SHARED_BESIDE]
    width = given.shape[-1]
    return Routed(
        logits_TE=logits_TE,
        ids_TK=ids_TK,
        weights_TK=weights_TK,
        norms_TK=norms_TK,
        input_TD=given.reshape(-1, width),
        residual_TD=residual.reshape(-1, width),
        routed_TD=routed_TD,
        output_TD=sum(beside, start=output).reshape(-1, width),
    )


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output
