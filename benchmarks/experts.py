"""Time of the expert block, forward and backward: ours, transformers' and a dense FFN with the same active FLOPs.

    python benchmarks/experts.py --threads 2 --dtype float32 bfloat16 --experts 16/2 64/8

Every repetition routes anew, as training does (16-bit matrix products are compiled per shape, and a fixed routing would
hide that). The candidates take turns within a repetition. The table gives the minimum over the repetitions in ms, its
ratio to the dense minimum, and the median. `products alone` is the floor of all that multiply expert by expert: the six
matrix products of each expert on its share of the rows, into memory that is there already, and nothing else. ``--clock
cpu`` counts the processor time of the process instead, which
other programs on the machine change less (for one thread only: the waiting threads of a team count as busy).
"""

import argparse
import time
from collections.abc import Callable
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moesaic.modeling.modeling_moesaic import MoesaicExperts, route_topk

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
Block = Callable[[Tensor, Tensor, Tensor], Tensor]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--width", type=int, default=256, help="intermediate size of one expert")
    parser.add_argument("--experts", nargs="+", default=["16/2", "64/8"], metavar="EXPERTS/ACTIVE")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--eager", action="store_true", help="also time the loop of transformers' families (slow)")
    return parser.parse_args()


def sort_and_linear(experts: Any) -> Block:
    """One sort, then two ``F.linear`` per expert under autograd: what one writes first."""

    def forward(hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        ids_A = ids_TK.reshape(-1)
        order_A = ids_A.argsort(stable=True)
        counts = ids_A.bincount(minlength=experts.num_experts).tolist()
        outputs = []
        for rows, gate_up, down in zip(
            hidden_TD[order_A // ids_TK.shape[1]].split(counts),
            experts.gate_up_proj.unbind(),
            experts.down_proj.unbind(),
            strict=True,
        ):
            gate, up = F.linear(rows, gate_up).chunk(2, dim=-1)
            outputs.append(F.linear(experts.act_fn(gate) * up, down))
        weighted_AD = torch.cat(outputs) * weights_TK.reshape(-1)[order_A].unsqueeze(-1)
        return weighted_AD[order_A.argsort()].view(*ids_TK.shape, -1).sum(dim=1)

    return forward


def native_eager(experts: Any) -> Block:
    """The reference loop of transformers' families."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    loop = Qwen3MoeExperts.forward.__wrapped__  # pyright: ignore[reportFunctionMemberAccess]
    return lambda hidden_TD, ids_TK, weights_TK: loop(experts, hidden_TD, ids_TK, weights_TK)


def implementation(experts: Any, name: str) -> Block:
    def forward(*inputs: Tensor) -> Tensor:
        experts.config._experts_implementation = name
        return experts(*inputs)

    return forward


def products_alone(experts: Any, rows: int) -> Callable[[], None]:
    """The matrix products of forward and backward with `rows` rows for each expert: what no block of GEMMs can beat."""
    gate_up_EHD, down_EDI = experts.gate_up_proj.detach(), experts.down_proj.detach()
    num_experts, hidden, inner = down_EDI.shape
    input_ERD, gate_up_ERH, inner_ERI, output_ERD = (
        torch.zeros(num_experts, rows, width, dtype=down_EDI.dtype) for width in (hidden, 2 * inner, inner, hidden)
    )
    grad_gate_up_EHD, grad_down_EDI = torch.zeros_like(gate_up_EHD), torch.zeros_like(down_EDI)

    def run() -> None:
        for expert in range(num_experts):
            torch.mm(input_ERD[expert], gate_up_EHD[expert].t(), out=gate_up_ERH[expert])
            torch.mm(inner_ERI[expert], down_EDI[expert].t(), out=output_ERD[expert])
        for expert in range(num_experts):
            torch.mm(output_ERD[expert], down_EDI[expert], out=inner_ERI[expert])
            torch.mm(output_ERD[expert].t(), inner_ERI[expert], out=grad_down_EDI[expert])
            torch.mm(gate_up_ERH[expert].t(), input_ERD[expert], out=grad_gate_up_EHD[expert])
            torch.mm(gate_up_ERH[expert], gate_up_EHD[expert], out=input_ERD[expert])

    return run


class DenseFFN(nn.Module):
    """A gated FFN as wide as the active experts together."""

    def __init__(self, hidden: int, width: int):
        super().__init__()
        self.gate = nn.Linear(hidden, width, bias=False)
        self.up = nn.Linear(hidden, width, bias=False)
        self.down = nn.Linear(width, hidden, bias=False)

    def forward(self, hidden_TD: Tensor, _ids_TK: Tensor, _weights_TK: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(hidden_TD)) * self.up(hidden_TD))


def measure(arguments: argparse.Namespace, dtype: torch.dtype, num_experts: int, top_k: int) -> dict[str, list[float]]:
    torch.manual_seed(0)
    config = SimpleNamespace(
        num_experts=num_experts,
        hidden_size=arguments.hidden,
        moe_intermediate_size=arguments.width,
        expert_mlp_bias=False,
        hidden_act="silu",
        _experts_implementation="eager",
    )
    experts = MoesaicExperts(config).to(dtype)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.02)
    dense = DenseFFN(arguments.hidden, top_k * arguments.width).to(dtype)
    candidates: dict[str, Block] = {
        "dense": dense,
        "ours": implementation(experts, "eager"),
        "grouped_mm": implementation(experts, "grouped_mm"),
        "sort + linear": sort_and_linear(experts),
    }
    if arguments.eager:
        candidates["native eager"] = native_eager(experts)

    clock = CLOCKS[arguments.clock]
    hidden_TD = torch.randn(arguments.tokens, arguments.hidden).to(dtype).requires_grad_()
    upstream_TD = torch.randn(arguments.tokens, arguments.hidden).to(dtype)
    floor = products_alone(experts, arguments.tokens * top_k // num_experts)
    times: dict[str, list[float]] = {name: [] for name in (*candidates, "products alone")}
    for repetition in range(arguments.repeats + 1):
        logits_TE = torch.randn(arguments.tokens, num_experts) + 0.5 * torch.randn(num_experts)
        weights_TK, ids_TK = route_topk(logits_TE, top_k, "selected")
        weights_TK = weights_TK.to(dtype).requires_grad_()
        for name, block in candidates.items():
            for tensor in (hidden_TD, weights_TK, *experts.parameters(), *dense.parameters()):
                tensor.grad = None
            start = clock()
            block(hidden_TD, ids_TK, weights_TK).backward(upstream_TD)
            if repetition:  # the first one warms up
                times[name].append(clock() - start)
        start = clock()
        floor()
        if repetition:
            times["products alone"].append(clock() - start)
    return times


def main() -> None:
    arguments = parse_arguments()
    print(
        f"torch {torch.__version__}, {arguments.tokens} tokens, D={arguments.hidden}, I={arguments.width}, "
        f"forward + backward, {arguments.repeats} repetitions, {arguments.clock} clock: minimum in ms (ratio), median"
    )
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        for dtype_name in arguments.dtype:
            for sizes in arguments.experts:
                num_experts, top_k = map(int, sizes.split("/"))
                times = measure(arguments, getattr(torch, dtype_name), num_experts, top_k)
                dense = min(times["dense"])
                cells = [
                    f"{name} {1e3 * min(all_):.1f} ({min(all_) / dense:.2f}), {1e3 * median(all_):.1f}"
                    for name, all_ in times.items()
                ]
                print(f"{threads} threads  {dtype_name:9}{sizes:>6}  " + "   ".join(cells), flush=True)


if __name__ == "__main__":
    main()
