"""Everything that wants to be known of a GPU, in one file to send back.

    python benchmarks/gpu.py gpu.json
    python -m pytest tests/cuda -q | tee gpu-tests.txt

Block (forward and backward), router, gather and step are timed for our model, a dense one of the same active size and
transformers' Qwen3-MoE, with every implementation of the experts that transformers has here; one that cannot run (no
`kernels` package, an older GPU) leaves its reason. Contestants take turns within a repetition; minimum and median are
kept. Without a GPU the same runs on the CPU, in small sizes (`--small`), so that CI keeps this file working.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from moesaic.modeling.modeling_moesaic import (
    MoesaicExperts,
    MoesaicQwen3Config,
    MoesaicQwen3ForCausalLM,
    group_members,
    route_one_per_group,
    route_topk,
)
from moesaic.routing.config import RuleConfig
from moesaic.routing.install import install, routing_context
from moesaic.routing.losses import balance_loss, measure_load
from moesaic.routing.pools import RoutingContext

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Work = Callable[[], Any]


@dataclass(frozen=True, kw_only=True)
class Size:
    """E experts of width I on a hidden size D, K of them active; T tokens in a block, B documents of S in a step."""

    experts: int
    active: int
    hidden: int
    width: int
    tokens: int
    layers: int
    sequences: int
    length: int
    vocabulary: int


_STEP = {"tokens": 16_384, "sequences": 8, "length": 2048, "vocabulary": 32_768}
FULL = (
    Size(experts=16, active=2, hidden=1024, width=1024, layers=8, **_STEP),
    Size(experts=64, active=8, hidden=1024, width=512, layers=8, **_STEP),
    Size(experts=128, active=8, hidden=2048, width=768, layers=4, **_STEP),
)
SMALL = (Size(experts=4, active=2, hidden=32, width=16, tokens=64, layers=2, sequences=2, length=32, vocabulary=64),)


def synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def timed(works: dict[str, Work], repeats: int) -> dict[str, Any]:
    """Milliseconds and peak memory of each work; the reason in words where one cannot run."""
    results: dict[str, Any] = {}
    times: dict[str, list[float]] = {}
    for name, work in works.items():
        try:
            work()  # compiles, tunes and warms up
            times[name] = []
        except Exception as error:  # each library has its own
            results[name] = {"absent": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
    for _ in range(repeats):
        for name in times:
            synchronize()
            start = time.perf_counter()
            works[name]()
            synchronize()
            times[name].append(1e3 * (time.perf_counter() - start))
    for name, values in times.items():
        results[name] = {"min_ms": min(values), "median_ms": statistics.median(values)} | peak(works[name])
    return results


def peak(work: Work) -> dict[str, int]:
    if DEVICE.type != "cuda":
        return {}
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    synchronize()
    return {"peak_bytes": torch.cuda.max_memory_allocated() - before}


def block(size: Size, dtype: torch.dtype, repeats: int) -> dict[str, Any]:
    """The experts of one layer against a dense FFN as wide as the active ones."""
    config = SimpleNamespace(
        num_experts=size.experts,
        hidden_size=size.hidden,
        moe_intermediate_size=size.width,
        expert_mlp_bias=False,
        hidden_act="silu",
        _experts_implementation="eager",
    )
    with DEVICE:
        experts: Any = MoesaicExperts(config).to(dtype)
        experts.has_bias = False
        for parameter in experts.parameters():
            nn.init.normal_(parameter, std=0.02)
        gate_up = nn.Linear(size.hidden, 2 * size.active * size.width, bias=False, dtype=dtype)
        down = nn.Linear(size.active * size.width, size.hidden, bias=False, dtype=dtype)
        hidden_TD = torch.randn(size.tokens, size.hidden, dtype=dtype, requires_grad=True)
        upstream_TD = torch.randn(size.tokens, size.hidden, dtype=dtype)
        weights_TK, ids_TK = route_topk(torch.randn(size.tokens, size.experts), size.active, "selected")
    weights_TK = weights_TK.to(dtype).requires_grad_()

    def dense() -> None:
        gate_TI, up_TI = gate_up(hidden_TD).chunk(2, dim=-1)
        down(F.silu(gate_TI) * up_TI).backward(upstream_TD)

    def ours(implementation: str) -> Work:
        def work() -> None:
            experts.config._experts_implementation = implementation
            experts(hidden_TD, ids_TK, weights_TK).backward(upstream_TD)

        return work

    names = ("eager", *ALL_EXPERTS_FUNCTIONS.valid_keys())
    return timed({"dense": dense} | {f"experts, {name}": ours(name) for name in names}, repeats)


def routers(size: Size, repeats: int) -> dict[str, Any]:
    """Rules on random logits, and the sort and the gather that every implementation starts with."""
    with DEVICE:
        logits_TE = torch.randn(size.tokens, size.experts)
        hidden_TD = torch.randn(size.tokens, size.hidden, dtype=torch.bfloat16)
        members_GM = torch.tensor(group_members([expert // 2 for expert in range(size.experts)]))
        ids_A = route_topk(logits_TE, size.active, "selected")[1].flatten()
        order_A = ids_A.argsort()
    return timed(
        {
            "topk": lambda: route_topk(logits_TE, size.active, "selected"),
            "one_per_group": lambda: route_one_per_group(logits_TE, members_GM, size.active, "selected", "max"),
            "sort": lambda: ids_A.argsort(stable=True),
            "gather": lambda: hidden_TD[order_A // size.active],
        },
        repeats,
    )


def step(size: Size, dtype: torch.dtype, repeats: int) -> dict[str, Any]:
    """A training step (loss, balancing, backward, fused AdamW) on packed documents, in tokens per second as well."""
    works: dict[str, Work] = {"dense": _training_step(_dense(size, dtype), size, None)}
    for rule in ("topk", "document_pool"):
        works[f"moesaic, {rule}"] = _training_step(_moesaic(size, dtype), size, RuleConfig(rule=rule))
    works["native"] = _training_step(_native(size, dtype), size, RuleConfig(rule="topk"))
    results = timed(works, repeats)
    for values in results.values():
        if "min_ms" in values:
            values["tokens_per_second"] = 1e3 * size.sequences * size.length / values["min_ms"]
    return results


def _values(size: Size) -> dict[str, Any]:
    return {
        "vocab_size": size.vocabulary,
        "hidden_size": size.hidden,
        "intermediate_size": size.active * size.width,
        "num_hidden_layers": size.layers,
        "num_attention_heads": 4 if size.hidden < 128 else size.hidden // 64,
        "num_key_value_heads": 2,
        "head_dim": 16 if size.hidden < 128 else 64,
    }


def _dense(size: Size, dtype: torch.dtype) -> Any:
    config = transformers.Qwen3Config(**_values(size))
    model: Any = transformers.Qwen3ForCausalLM(config)
    return model.to(DEVICE, dtype)


def _moesaic(size: Size, dtype: torch.dtype) -> Any:
    moe: dict[str, Any] = {
        "num_experts": size.experts,
        "num_experts_per_tok": size.active,
        "moe_intermediate_size": size.width,
    }
    return MoesaicQwen3ForCausalLM(MoesaicQwen3Config(**_values(size), **moe)).to(DEVICE, dtype)


def _native(size: Size, dtype: torch.dtype) -> Any:
    moe: dict[str, Any] = {
        "num_experts": size.experts,
        "num_experts_per_tok": size.active,
        "moe_intermediate_size": size.width,
    }
    model: Any = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**_values(size), **moe))
    model.set_experts_implementation("grouped_mm")
    return model.to(DEVICE, dtype)


def _training_step(model: Any, size: Size, rule: RuleConfig | None) -> Work:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)
    generator = torch.Generator(DEVICE).manual_seed(0)
    shape = size.sequences, size.length
    ids_BS = torch.randint(size.vocabulary, shape, device=DEVICE, generator=generator)
    positions_BS = (torch.arange(size.length, device=DEVICE) % (size.length // 2)).expand(shape)  # two documents a row
    if rule is not None:
        install(model.train(), rule)
    number = 2 * size.sequences
    documents_N = torch.arange(number, device=DEVICE)
    documents_T = documents_N.repeat_interleave(size.length // 2)
    context = RoutingContext(document_ids_T=documents_T, num_documents=number, document_keys_N=documents_N)

    def work() -> None:
        optimizer.zero_grad()
        inputs = {"input_ids": ids_BS, "position_ids": positions_BS, "use_cache": False}
        if rule is None:
            _loss(model(**inputs).logits, ids_BS).backward()
        else:
            with routing_context(model, context) as record:
                loss = _loss(model(**inputs).logits, ids_BS)
                load = measure_load(record.decisions, context.token_mask_T)
                (loss + 0.01 * balance_loss(record.decisions, context.token_mask_T, load)[0]).backward()
        optimizer.step()

    return work


def _loss(logits_BSV: Tensor, ids_BS: Tensor) -> Tensor:
    return F.cross_entropy(logits_BSV[:, :-1].flatten(0, 1).float(), ids_BS[:, 1:].flatten())


def machine() -> dict[str, Any]:
    facts: dict[str, Any] = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": str(DEVICE),
    }
    if DEVICE.type == "cuda":
        properties = torch.cuda.get_device_properties(DEVICE)
        facts |= {"name": properties.name, "memory_bytes": properties.total_memory, "cuda": torch.version.cuda}
    return facts | {"processor": platform.processor() or platform.machine()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the JSON file to write")
    parser.add_argument("--small", action="store_true", help="sizes of a second on a CPU")
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args()
    results: list[dict[str, Any]] = []
    for size in SMALL if options.small else FULL:
        rows: dict[str, Any] = {"size": asdict(size), "routers": routers(size, options.repeats)}
        for dtype in (torch.float32, torch.bfloat16):
            name = str(dtype).removeprefix("torch.")
            rows[name] = {
                "block": block(size, dtype, options.repeats),
                "step": step(size, dtype, options.repeats),
            }
        results.append(rows)
        options.out.write_text(json.dumps({"machine": machine(), "results": results}, indent=2) + "\n")
        print(f"{size.experts}/{size.active}: done", flush=True)


if __name__ == "__main__":
    main()
