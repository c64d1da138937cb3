"""Cost of the training rules against plain top-k, as a share of a training step.

    OMP_NUM_THREADS=1 python benchmarks/routing.py [--rounds 15]

A step is forward, cross-entropy, global balancing, router z-loss, backward and fused AdamW on packed documents. Rules
take turns within a round, and the smallest time of each over all rounds is compared, so that drifts of the machine hit
all alike. The routers alone (forward and backward of the decision, all layers) are timed the same way: their difference
to top-k over the time of a step is the overhead with far less noise. CPU time of one thread, because other work on the
machine disturbs it less than the clock.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.modeling import modeling_moesaic
from moesaic.modeling.cross_entropy import token_losses
from moesaic.routing.config import RuleConfig
from moesaic.routing.install import find_routers, install, routing_context
from moesaic.routing.losses import balance_loss, measure_load, router_z_loss
from moesaic.routing.pools import RoutingContext
from moesaic.routing.rules import build_rule, decide

LAYERS, HIDDEN, VOCABULARY, SEQUENCES, LENGTH = 2, 512, 4096, 2, 1024


@dataclass(frozen=True, kw_only=True)
class Size:
    experts: int
    top_k: int
    width: int


SIZES = (Size(experts=16, top_k=2, width=256), Size(experts=64, top_k=8, width=128))


def rules(size: Size) -> dict[str, RuleConfig]:
    groups = tuple(expert // 2 for expert in range(size.experts))
    return {
        "topk": RuleConfig(rule="topk"),
        "one_per_group": RuleConfig(rule="one_per_group", expert_groups=groups),
        "document_pool": RuleConfig(rule="document_pool"),
    }


def build(size: Size) -> torch.nn.Module:
    torch.manual_seed(0)
    config = modeling_moesaic.MoesaicQwen3Config(
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        vocab_size=VOCABULARY,
        num_experts=size.experts,
        num_experts_per_tok=size.top_k,
        moe_intermediate_size=size.width,
    )
    return modeling_moesaic.MoesaicQwen3ForCausalLM(config).train()


def make_step(model: torch.nn.Module, inputs: dict[str, Tensor], context: RoutingContext) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)
    labels_T = inputs["input_ids"].flatten().roll(-1)

    def step() -> None:
        optimizer.zero_grad()
        with routing_context(model, context) as record:
            logits = model(**inputs, use_cache=False).logits
            mask_T = context.token_mask_T
            balance, _ = balance_loss(record.decisions, mask_T, measure_load(record.decisions, mask_T))
            z = router_z_loss(record.decisions, mask_T, batch_tokens=LENGTH * SEQUENCES)
            (token_losses(logits.flatten(0, 1), labels_T)[0].mean() + 0.1 * balance + 0.001 * z).backward()
        optimizer.step()

    return step


def make_router(model: torch.nn.Module, config: RuleConfig, context: RoutingContext) -> Callable[[], None]:
    settings = find_routers(model)[0][1]
    rule = build_rule(config, settings)
    logits_LTE = torch.randn(LAYERS, LENGTH * SEQUENCES, settings.num_experts, requires_grad=True)

    def route() -> None:
        for layer in range(LAYERS):
            decision = decide(rule, logits_LTE[layer], context=context, layer=layer)
            decision.weights_TK.sum().backward()

    return route


def interleaved_minima(runs: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    best = dict.fromkeys(runs, float("inf"))
    for number in range(rounds + 1):
        for name, run in runs.items():
            start = time.process_time()
            run()
            if number:  # the first round warms up
                best[name] = min(best[name], time.process_time() - start)
    return best


def measure(size: Size, rounds: int) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = [180, 12, 400, 432, 700, 1, 323]  # two sequences of 1024 tokens
    documents_BS = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).view(SEQUENCES, LENGTH)
    positions = torch.cat([torch.arange(length) for length in lengths]).view(SEQUENCES, LENGTH)
    tokens = torch.randint(0, VOCABULARY, (SEQUENCES, LENGTH), generator=generator)
    inputs = {"input_ids": tokens, "position_ids": positions}
    context = RoutingContext.from_sequences(documents_BS)

    steps, routers = {}, {}
    for name, config in rules(size).items():
        model = build(size)
        routers[name] = make_router(model, config, context)
        install(model, config)
        steps[name] = make_step(model, inputs, context)
    step_s = interleaved_minima(steps, rounds)
    router_s = interleaved_minima(routers, 5 * rounds)
    print(
        f"{size.experts} experts, {size.top_k} active, width {size.width}, {LAYERS} layers, {LENGTH * SEQUENCES} tokens"
    )
    print("| rule | step ms | against topk | routers ms | overhead of a step |")
    print("|---|---|---|---|---|")
    for name in steps:
        ratio = step_s[name] / step_s["topk"] - 1
        overhead = (router_s[name] - router_s["topk"]) / step_s["topk"]
        print(
            f"| {name} | {step_s[name] * 1e3:.1f} | {ratio:+.1%} | {router_s[name] * 1e3:.2f} | {overhead:+.2%} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    for size in SIZES:
        measure(size, arguments.rounds)


if __name__ == "__main__":
    main()
