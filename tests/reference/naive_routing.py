"""The rules and losses of docs/routing.md written down slowly: float64, one token, document and expert at a time.

Logits stay scalar tensors, so that gradients of the loops come from autograd and are as independent as the values.
"""

import math
import random
from collections.abc import Sequence

import torch
from torch import Tensor


def random_documents(seed: int, *, sequences: int = 3, length: int = 14) -> Tensor:
    """Packed sequences: uneven documents, some of one token, padding (-1) at the end of some rows; ids restart."""
    chance = random.Random(seed)
    rows = []
    for row in range(sequences):
        ids: list[int] = []
        document = 0
        while len(ids) < length:
            ids += [document] * chance.choice([1, 1, 2, 5, 8])
            document += 1
        ids = ids[:length]
        padding = 0 if row == 0 else chance.randrange(length // 2)
        rows.append(ids[: length - padding] + [-1] * padding)
    return torch.tensor(rows)


def number(value: Tensor) -> float:
    return float(value.detach())


def softmax(values: list[Tensor]) -> list[Tensor]:
    highest = max(number(value) for value in values)
    exponentials = [torch.exp(value - highest) for value in values]
    total = sum(exponentials, torch.zeros((), dtype=torch.float64))
    return [value / total for value in exponentials]


def over_their_sum(values: list[Tensor]) -> list[Tensor]:
    """Sigmoids, divided by their sum."""
    scores = [1 / (1 + torch.exp(-value)) for value in values]
    total = sum(scores, torch.zeros((), dtype=torch.float64))
    return [score / total for score in scores]


def probabilities(values: list[Tensor], weighting: str) -> list[Tensor]:
    return over_their_sum(values) if weighting == "sigmoid" else softmax(values)


def best(scores: list[float], size: int) -> list[int]:
    """Positions of the `size` highest scores, the highest first, the lower position first among equals."""
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:size]


def pools(
    logits_TE: Tensor,
    document_ids: list[int],
    sizes: list[int],
    bias: list[float] | None = None,
    weighting: str = "selected",
) -> list[set]:
    """Each document's set of experts."""
    experts = logits_TE.shape[1]
    result = []
    for document, size in enumerate(sizes):
        tokens = [t for t, d in enumerate(document_ids) if d == document]
        mean = [0.0] * experts
        for t in tokens:
            for e, p in enumerate(probabilities(list(logits_TE[t]), weighting)):
                mean[e] += number(p) / len(tokens)
        if bias is not None:
            mean = [m + b for m, b in zip(mean, bias, strict=True)]
        result.append(set(best(mean, size)))
    return result


def weigh(logits: list[Tensor], allowed: list[int], chosen: list[int], weighting: str) -> list[Tensor]:
    if weighting == "selected":
        return softmax([logits[e] for e in chosen])
    if weighting == "sigmoid":
        return over_their_sum([logits[e] for e in chosen])
    over_allowed = dict(zip(allowed, softmax([logits[e] for e in allowed]), strict=True))
    return [over_allowed[e] for e in chosen]


def route(
    logits_TE: Tensor, k: int, weighting: str, allowed: list[set] | None = None, bias: list[float] | None = None
) -> tuple[list[list[int]], list[list[Tensor]]]:
    """Top-k among each token's allowed experts, by probability plus bias; weights without the bias."""
    ids, weights = [], []
    for t in range(logits_TE.shape[0]):
        logits = list(logits_TE[t])
        usable = sorted(allowed[t]) if allowed is not None else list(range(len(logits)))
        scores = [number(p) for p in probabilities([logits[e] for e in usable], weighting)]
        if bias is not None:
            scores = [score + bias[e] for score, e in zip(scores, usable, strict=True)]
        chosen = [usable[i] for i in best(scores, k)]
        ids.append(chosen)
        weights.append(weigh(logits, usable, chosen, weighting))
    return ids, weights


def group_score(values: list[Tensor], score: str) -> Tensor:
    if score == "max":
        return max(values, key=number)
    if score == "mean":
        return sum(values[1:], values[0]) / len(values)
    return torch.log(sum((torch.exp(v) for v in values[1:]), torch.exp(values[0])) / len(values))


def route_groups(
    logits_TE: Tensor, groups: Sequence[int], k: int, weighting: str, score: str, bias: list[float] | None = None
) -> tuple[list[list[int]], list[list[Tensor]]]:
    """DivMoE algorithm 1: the best expert of each group, the k best groups, weights from the groups' scores."""
    ids, weights = [], []
    members = {g: [e for e, other in enumerate(groups) if other == g] for g in sorted(set(groups))}
    for t in range(logits_TE.shape[0]):
        logits = list(logits_TE[t])
        by = [number(p) for p in probabilities(logits, weighting)] if bias is not None else [number(v) for v in logits]
        by = [b + c for b, c in zip(by, bias or [0.0] * len(by), strict=True)]
        winners = {g: max(es, key=lambda e: (by[e], -e)) for g, es in members.items()}
        scores = {g: group_score([logits[e] for e in es], score) for g, es in members.items()}
        ranked_by = {g: by[winners[g]] if bias is not None else number(scores[g]) for g in members}
        if bias is not None and score != "max":
            shares = dict(zip(members, probabilities(list(scores.values()), weighting), strict=True))
            for g, es in members.items():
                within = [number(p) + bias[e] for p, e in zip(softmax([logits[e] for e in es]), es, strict=True)]
                winners[g] = es[max(range(len(es)), key=lambda i: (within[i], -i))]
                ranked_by[g] = number(shares[g]) + sum(bias[e] for e in es) / len(es)
        order = sorted(members, key=lambda g: (-ranked_by[g], g))[:k]
        chosen = [winners[g] for g in order]
        ids.append(chosen)
        if bias is not None and score == "max":
            weights.append(weigh(logits, list(range(len(logits))), chosen, weighting))
        elif weighting != "all":
            weights.append(probabilities([scores[g] for g in order], weighting))
        elif score == "max":
            weights.append(weigh(logits, list(range(len(logits))), chosen, "all"))
        else:
            over_groups = dict(zip(members, softmax(list(scores.values())), strict=True))
            weights.append([over_groups[g] for g in order])
    return ids, weights


def balance(
    logits_LTE: Tensor,
    ids_LTK: list[list[list[int]]],
    real: list[bool],
    allowed_LT: list[list[set]] | None = None,
    weighting: str = "selected",
) -> Tensor:
    """`E * sum_i f_i P_i`, mean over layers, over the tokens that are real."""
    total = torch.zeros((), dtype=torch.float64)
    layers, tokens, experts = logits_LTE.shape
    count = sum(real)
    for layer in range(layers):
        k = len(ids_LTK[layer][0])
        for e in range(experts):
            f, p = 0.0, torch.zeros((), dtype=torch.float64)
            for t in range(tokens):
                if not real[t]:
                    continue
                f += ids_LTK[layer][t].count(e) / (count * k)
                usable = list(range(experts)) if allowed_LT is None else sorted(allowed_LT[layer][t])
                if e in usable:
                    over_usable = probabilities([logits_LTE[layer, t, u] for u in usable], weighting)
                    p = p + over_usable[usable.index(e)] / count
            total = total + experts * f * p / layers
    return total


def router_z(logits_LTE: Tensor, real: list[bool], allowed_LT: list[list[set]] | None = None) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    layers, tokens, experts = logits_LTE.shape
    for layer in range(layers):
        for t in range(tokens):
            if real[t]:
                usable = range(experts) if allowed_LT is None else sorted(allowed_LT[layer][t])
                exponentials = sum((torch.exp(logits_LTE[layer, t, e]) for e in usable), torch.zeros(()).double())
                total = total + torch.log(exponentials) ** 2 / (layers * sum(real))
    return total


def cross_entropy(logits_TV: Tensor, labels: list[int]) -> tuple[Tensor, Tensor, int]:
    """Sums of -log p and of log-partition squared over tokens with a label, and how many there are."""
    loss, squared, labelled = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64), 0
    for t, label in enumerate(labels):
        if label != -100:
            partition = torch.log(sum((torch.exp(v) for v in logits_TV[t]), torch.zeros((), dtype=torch.float64)))
            loss = loss + partition - logits_TV[t, label]
            squared = squared + partition**2
            labelled += 1
    return loss, squared, labelled


def load_entropy(counts: list[int]) -> float:
    total = sum(counts)
    return -sum(c / total * math.log(c / total) for c in counts if c) / math.log(len(counts))
