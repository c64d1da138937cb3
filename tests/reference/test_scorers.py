"""Every scorer against plain loops in float64 over tokens and experts, for every kind of router, with padding.

The loops take hidden states from hooks on an ordinary forward pass of each document alone. They share no code with the
package: routing, experts, norms and cosines are written out per token.
"""

import math

import pytest
import torch

from moesaic.checkpoint.source import open_checkpoint
from moesaic.families.identity import describe
from moesaic.families.moe import detect_moe
from moesaic.loading import load
from moesaic.selection.collect import collect_statistics
from moesaic.selection.scorers import score
from tests.unit.selection.kinds import save_kind

DOCUMENTS = [[5, 9, 33, 7, 80, 41, 12, 64, 3], [17, 4, 28], [50, 51, 52, 53, 60, 70]]


def softmax(values):
    most = max(values)
    exps = [math.exp(value - most) for value in values]
    return [value / sum(exps) for value in exps]


def sigmoid(value):
    return 1 / (1 + math.exp(-value))


def best(values, number):
    return sorted(range(len(values)), key=lambda index: -values[index])[:number]


def route_all(logits, _router):
    weights = softmax(logits)
    return {expert: weights[expert] for expert in best(logits, 2)}


def route_selected(logits, _router):
    chosen = best(logits, 2)
    return dict(zip(chosen, softmax([logits[expert] for expert in chosen]), strict=True))


def route_sigmoid_groups(logits, router):
    scores = [sigmoid(value) for value in logits]
    biased = [value + bias for value, bias in zip(scores, router.e_score_correction_bias.tolist(), strict=True)]
    size = len(logits) // router.num_group
    groups = [sum(sorted(biased[g * size : (g + 1) * size])[-2:]) for g in range(router.num_group)]
    allowed = best(groups, router.topk_group)
    open_experts = [e for e in range(len(logits)) if e // size in allowed]
    chosen = sorted(open_experts, key=lambda e: -biased[e])[: router.top_k]
    total = sum(scores[e] for e in chosen) if router.norm_topk_prob else 1.0
    return {e: scores[e] / total * router.routed_scaling_factor for e in chosen}


def route_softmax_groups(logits, router):
    scores = softmax(logits)
    size = len(logits) // router.num_group
    allowed = best([max(scores[g * size : (g + 1) * size]) for g in range(router.num_group)], router.topk_group)
    chosen = best([s if e // size in allowed else 0 for e, s in enumerate(scores)], router.top_k)
    return {e: scores[e] * router.routed_scaling_factor for e in chosen}


def route_one_per_group(logits, _router):
    groups = [[0, 1], [2, 3], [4, 5]]
    winners = sorted((max(group, key=lambda e: logits[e]) for group in groups), key=lambda e: -logits[e])[:2]
    return dict(zip(winners, softmax([logits[e] for e in winners]), strict=True))


def silu(value):
    return value * torch.sigmoid(value)


def gated(experts, expert, token):
    gate_up = experts.gate_up_proj[expert].double() @ token
    gate, up = gate_up.chunk(2)
    return experts.down_proj[expert].double() @ (silu(gate) * up)


def gated_gpt_oss(experts, expert, token):
    gate_up = token @ experts.gate_up_proj[expert].double() + experts.gate_up_proj_bias[expert].double()
    gate, up = gate_up[0::2].clamp(max=7.0), gate_up[1::2].clamp(-7.0, 7.0)
    inner = (up + 1) * gate * torch.sigmoid(1.702 * gate)
    return inner @ experts.down_proj[expert].double() + experts.down_proj_bias[expert].double()


KINDS = {
    "olmoe": (route_all, gated),
    "flex_olmo": (route_all, gated),
    "qwen2_moe": (route_all, gated),
    "mixtral": (route_selected, gated),
    "gpt_oss": (route_selected, gated_gpt_oss),
    "granitemoeshared": (route_selected, gated),
    "deepseek_v2_grouped": (route_softmax_groups, gated),
    "deepseek_v3": (route_sigmoid_groups, gated),
    "deepseek_v3_top4": (route_sigmoid_groups, gated),
    "glm4_moe": (route_sigmoid_groups, gated),
    "ours_topk": (route_selected, gated),
    "ours_max": (route_one_per_group, gated),
}
SIGMOID = ("deepseek_v3", "deepseek_v3_top4", "glm4_moe")


def watch(model, kind):
    """Per MoE layer: its block, and lists of (residual, block input, output with shared experts) per document."""
    layers = [layer for layer in model.model.layers if hasattr(getattr(layer, "mlp", layer.children()), "experts")]
    if kind == "granitemoeshared":
        layers = list(model.model.layers)
    seen = []
    for layer in layers:
        block = getattr(layer, "block_sparse_moe", None) or layer.mlp
        record = {"block": block, "residual": [], "input": [], "output": [], "shared": []}
        before = block if kind == "flex_olmo" else layer.post_attention_layernorm
        before.register_forward_pre_hook(lambda _m, args, r=record: r["residual"].append(args[0]))
        block.register_forward_pre_hook(lambda _m, args, r=record: r["input"].append(args[0]))
        block.register_forward_hook(
            lambda _m, _args, out, r=record: r["output"].append(out[0] if isinstance(out, tuple) else out)
        )
        if kind == "granitemoeshared":
            layer.shared_mlp.register_forward_hook(lambda _m, _args, out, r=record: r["shared"].append(out))
        seen.append(record)
    return seen


def cosine(a, b):
    return float(a @ b / (a.norm() * b.norm()))


def naive(record, kind):
    """Sums per expert: probability, selections, g * norm, and that times the drift of each variant."""
    route, run = KINDS[kind]
    block = record["block"]
    router = getattr(block, "gate", None) or block.router
    number = router.weight.shape[0]
    sums = {name: [0.0] * number for name in ("probability", "counts", "norm", "original", "emo")}
    for document in range(len(DOCUMENTS)):
        tokens = zip(
            *(record[name][document].double().reshape(-1, 32) for name in ("residual", "input", "output")), strict=True
        )
        for position, (residual, token, output) in enumerate(tokens):
            logits = (router.weight.double() @ token + getattr(router, "bias", torch.zeros(number))).tolist()
            if kind in SIGMOID:
                scores = [sigmoid(value) for value in logits]
                share = [value / sum(scores) for value in scores]
            else:
                share = softmax(logits)
            weights = route(logits, router)
            outputs = {expert: run(block.experts, expert, token) for expert in weights}
            routed = sum(weights[expert] * outputs[expert] for expert in weights)
            if record["shared"]:
                output = output + record["shared"][document].double().reshape(-1, 32)[position]
            drift = max(0.0, 1 - cosine(residual, residual + routed))
            drift_emo = max(0.0, 1 - cosine(token, token + output))
            for expert in range(number):
                sums["probability"][expert] += share[expert]
                if expert in weights:
                    part = weights[expert] * float(outputs[expert].norm())
                    sums["counts"][expert] += 1
                    sums["norm"][expert] += part
                    sums["original"][expert] += part * drift
                    sums["emo"][expert] += part * drift_emo
    return sums


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_scores_equal_plain_loops(tmp_path, kind):
    folder = save_kind(tmp_path / "m", kind)
    checkpoint = open_checkpoint(folder)
    moe = detect_moe(checkpoint)
    source = describe(checkpoint, moe)
    statistics = collect_statistics(checkpoint, moe, source, {"d": DOCUMENTS}, batch_size=len(DOCUMENTS))[0]
    model = load(folder)
    seen = watch(model, kind)
    for document in DOCUMENTS:
        model(torch.tensor([document]), use_cache=False)
    tokens = sum(map(len, DOCUMENTS))
    assert statistics.tokens == tokens
    found = {
        "router": score([statistics], "router"),
        "original": score([statistics], "easy_ep"),
        "emo": score([statistics], "easy_ep", "emo"),
        "reap": score([statistics], "reap"),
        "frequency": score([statistics], "frequency"),
    }
    assert len(seen) == len(source.layers)
    for layer, record in enumerate(seen):
        sums = naive(record, kind)
        assert statistics.counts_LE[layer].tolist() == sums["counts"]
        expected = {
            "router": [value / tokens for value in sums["probability"]],
            "original": sums["original"],
            "emo": sums["emo"],
            "reap": [norm / count if count else 0.0 for norm, count in zip(sums["norm"], sums["counts"], strict=True)],
            "frequency": [count / tokens for count in sums["counts"]],
        }
        for name, values in expected.items():
            torch.testing.assert_close(
                torch.tensor(found[name][layer]),
                torch.tensor(values, dtype=torch.float64),
                rtol=2e-5,
                atol=1e-9,
                msg=lambda text, name=name: f"{kind} {name}: {text}",
            )
