"""Every statistic of an inspection against a naive computation, token by token in float64."""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from moesaic.analysis import capture as capturing
from moesaic.analysis.capture import Capture, create_tokens
from moesaic.analysis.describe import Source, characteristic, co_experts, describe_experts
from moesaic.analysis.documents import Vocabulary, frequent_tokens
from moesaic.analysis.measure import derive, first_token_cosine, measure
from moesaic.routing.capture import Scoring
from tests.tiny_texts import made_up_sample

LAYERS, EXPERTS, ACTIVE = 2, 6, 2
LENGTHS = [5, 9, 3, 7, 12, 4, 8]
DOMAINS = [0, 0, 0, 1, 1, 2, 2]
SAMPLE = made_up_sample(LENGTHS, DOMAINS)
GROUPS = ((0, 0, 0, 1, 1, 1), (0, 1, 2, 0, 1, 2))


@contextmanager
def written(folder: Path, *arrays: np.ndarray) -> Iterator[Capture]:
    with ExitStack() as stack:
        files = []
        for index, array in enumerate(arrays):
            file = stack.enter_context(create_tokens(folder / f"{index}.npy", array.shape, array.dtype))
            file.write(0, array)
            files.append(file)
        yield Capture(logits=files[0], ids=files[1], weights=files[2])


class Naive:
    """The routers' decisions as plain lists."""

    def __init__(self, scoring: Scoring) -> None:
        draw = np.random.default_rng(1)
        self.logits = (draw.standard_normal((SAMPLE.tokens, LAYERS, EXPERTS)) * 2).astype(np.float16)
        self.ids = np.argsort(-self.logits.astype(float), axis=-1)[..., :ACTIVE].astype(np.uint8)
        self.weights = np.take_along_axis(self.logits, self.ids.astype(int), axis=-1)
        self.p = np.zeros(self.logits.shape)
        for token in range(SAMPLE.tokens):
            for layer in range(LAYERS):
                scores = [
                    math.exp(float(x)) if scoring == "softmax" else 1 / (1 + math.exp(-float(x)))
                    for x in self.logits[token, layer]
                ]
                self.p[token, layer] = [score / sum(scores) for score in scores]

    def similar(self) -> np.ndarray:
        """Mean per document, then per domain."""
        means = [self.p[SAMPLE.document_T == d].mean(axis=0) for d in range(len(LENGTHS))]
        return np.array([np.mean([means[d] for d in range(len(LENGTHS)) if DOMAINS[d] == n], axis=0) for n in range(3)])

    def tokens_of(self, domain: int | None) -> list[int]:
        domain_T = SAMPLE.domain_D[SAMPLE.document_T]
        return [t for t in range(SAMPLE.tokens) if domain is None or domain_T[t] == domain]


@pytest.fixture(params=["softmax", "sigmoid"])
def case(request, tmp_path, monkeypatch):
    monkeypatch.setattr(capturing.blocks, "__defaults__", (10,))  # several blocks per domain
    naive = Naive(request.param)
    with written(tmp_path, naive.logits, naive.ids, naive.weights) as capture:
        vocabulary = frequent_tokens(SAMPLE.ids_T)
        measured = measure(capture, SAMPLE, request.param, vocabulary, document_tokens=12)
    return naive, measured, derive(measured, naive.similar(), active=ACTIVE, groups=GROUPS), vocabulary


def cosine(a, b) -> float:
    return float(np.dot(a, b) / math.sqrt(np.dot(a, a) * np.dot(b, b)))


def test_load_and_collapse_per_layer_and_domain(case):
    naive, _, numbers, _ = case
    for scope, domain in enumerate([None, 0, 1, 2]):
        tokens = naive.tokens_of(domain)
        for layer in range(LAYERS):
            counts = [sum(expert in naive.ids[t, layer] for t in tokens) for expert in range(EXPERTS)]
            load = [count / sum(counts) for count in counts]
            entropy = -sum(share * math.log(share) for share in load if share)
            best = sorted(load, reverse=True)
            at = (scope, layer)
            assert numbers["counts_SLE"][at].tolist() == counts
            assert numbers["load_SLE"][at] == pytest.approx(load, rel=1e-12)
            assert numbers["entropy_SL"][at] == pytest.approx(entropy / math.log(EXPERTS), rel=1e-12)
            assert numbers["effective_SL"][at] == pytest.approx(math.exp(entropy), rel=1e-12)
            assert numbers["largest_SL"][at] == pytest.approx(best[0], rel=1e-12)
            assert numbers["two_busiest_SL"][at] == pytest.approx(best[0] + best[1], rel=1e-12)
            assert numbers["dead_SL"][at] == counts.count(0)


def test_confidence_and_mass(case):
    naive, _, numbers, _ = case
    for scope, domain in enumerate([None, 0, 1, 2]):
        tokens = naive.tokens_of(domain)
        for layer in range(LAYERS):
            rows = [naive.p[t, layer] for t in tokens]
            at = (scope, layer)
            assert numbers["mass_SLE"][at] == pytest.approx(sum(rows) / len(rows), rel=1e-5)
            assert numbers["confidence_SL"][at] == pytest.approx(sum(max(row) for row in rows) / len(rows), rel=1e-5)
            entropy = -sum(float(x) * math.log(x) for row in rows for x in row) / len(rows)
            assert numbers["uncertainty_SL"][at] == pytest.approx(entropy / math.log(EXPERTS), rel=1e-5)


def test_pairs_and_within_group_coselection(case):
    naive, _, numbers, _ = case
    for scope, domain in enumerate([None, 0, 1, 2]):
        for layer in range(LAYERS):
            pairs = np.zeros((EXPERTS, EXPERTS), dtype=int)
            inside = outside = 0
            for t in naive.tokens_of(domain):
                a, b = map(int, naive.ids[t, layer])
                for first in (a, b):
                    for second in (a, b):
                        pairs[first, second] += 1
                same = GROUPS[layer][a] == GROUPS[layer][b]
                inside, outside = inside + same, outside + (not same)
            assert numbers["coselection_SL"][scope, layer] == pytest.approx(inside / (inside + outside), rel=1e-12)
            if domain is None:
                assert (numbers["pairs_LEE"][layer] == pairs).all()


def test_domain_similarity_is_the_cosine_of_domains(case):
    naive, _, numbers, _ = case
    domains = naive.similar()
    assert (numbers["probability_NLE"] == domains).all()
    for one in range(3):
        for other in range(3):
            for layer in range(LAYERS):
                expected = cosine(domains[one][layer], domains[other][layer])
                assert numbers["similarity_LNN"][layer, one, other] == pytest.approx(expected, rel=1e-5)
            expected = cosine(domains[one].ravel(), domains[other].ravel())
            assert numbers["similarity_NN"][one, other] == pytest.approx(expected, rel=1e-5)


def test_routing_over_positions(case):
    naive, measured, numbers, _ = case
    assert numbers["bucket_start_B"].tolist() == [0, 1, 2, 4, 8]
    edges = [0, 1, 2, 4, 8, 12]
    position, document = SAMPLE.position_T, SAMPLE.document_T
    for bucket in range(5):
        tokens = [t for t in range(SAMPLE.tokens) if edges[bucket] <= position[t] < edges[bucket + 1]]
        assert numbers["bucket_tokens_B"][bucket] == len(tokens)
        for layer in range(LAYERS):
            mean = [naive.p[document == document[t], layer].mean(axis=0) for t in tokens]
            confidence = np.mean([naive.p[t, layer].max() for t in tokens])
            alike = np.mean([cosine(naive.p[t, layer], m) for t, m in zip(tokens, mean, strict=True)])
            counts = np.bincount(naive.ids[tokens, layer].ravel(), minlength=EXPERTS) / (ACTIVE * len(tokens))
            entropy = -sum(share * math.log(share) for share in counts if share) / math.log(EXPERTS)
            at = (bucket, layer)
            assert numbers["position_confidence_BL"][at] == pytest.approx(confidence, rel=1e-5)
            assert numbers["position_to_document_BL"][at] == pytest.approx(alike, rel=1e-5)
            assert numbers["position_entropy_BL"][at] == pytest.approx(entropy, rel=1e-9)
            if bucket:
                before = np.mean([cosine(naive.p[t, layer], naive.p[t - 1, layer]) for t in tokens])
                assert numbers["position_to_previous_BL"][at] == pytest.approx(before, rel=1e-5)
            else:
                assert np.isnan(numbers["position_to_previous_BL"][at])
    for layer, found in enumerate(first_token_cosine(measured)):
        first, rest = naive.p[position == 0, layer].mean(axis=0), naive.p[position > 0, layer].mean(axis=0)
        assert found == pytest.approx(cosine(first, rest), rel=1e-6)


def test_expert_cards(case):
    naive, measured, numbers, vocabulary = case
    source = Source(sample=SAMPLE, vocabulary=vocabulary, string=lambda token: f"<{token}>")
    cards = describe_experts(source, measured, (3, 7), numbers["counts_SLE"][0], numbers["pairs_LEE"])
    assert [(card.layer, card.expert) for card in cards] == [(layer, e) for layer in (3, 7) for e in range(EXPERTS)]
    for index, card in enumerate(cards):
        layer, expert = divmod(index, EXPERTS)
        means = [naive.p[SAMPLE.document_T == d, layer, expert].mean() for d in range(len(LENGTHS))]
        best = sorted(range(len(LENGTHS)), key=lambda d, means=means: -means[d])[:5]
        assert [one.document for one in card.documents] == best
        assert [one.share for one in card.documents] == pytest.approx([means[d] for d in best], rel=1e-5)
        uses = (naive.ids[:, layer] == expert).any(axis=1)
        for one in card.tokens:
            here = SAMPLE.ids_T == int(one.name.strip("<>"))
            assert one.count == (here & uses).sum()
            assert one.share == pytest.approx(one.count / here.sum())
            assert one.share > uses.mean()
        for one in card.experts:
            others = (naive.ids[:, layer] == one.expert).any(axis=1)
            assert one.share == pytest.approx((uses & others).sum() / uses.sum())
            assert one.lift == pytest.approx(one.share / others.mean())
        shares = [one.share for one in card.experts]
        assert shares == sorted(shares, reverse=True)


def test_co_experts_of_an_expert_that_nobody_selects():
    assert co_experts(np.zeros((3, 3), dtype=np.int64), 1, 10) == ()


def test_characteristic_strings_are_those_used_more_than_expected():
    vocabulary = Vocabulary(
        ids_V=np.array([10, 11, 12, 13]), counts_V=np.array([100, 50, 10, 20]), index_T=np.zeros(0, dtype=np.int64)
    )
    # Expected share 0.25: 25%, 60%, 80% and 10% of the occurrences go there.
    found = characteristic(Source(sample=SAMPLE, vocabulary=vocabulary, string=str), np.array([25, 30, 8, 2]), 0.25)
    scores = {"11": 30 * math.log(0.6 / 0.25), "12": 8 * math.log(0.8 / 0.25)}
    assert [one.name for one in found] == sorted(scores, key=lambda name: -scores[name])
    assert [(one.count, one.share) for one in found] == [(30, 0.6), (8, 0.8)]


def test_rare_strings_are_left_out():
    ids = np.array([7] * 6 + [3] * 5 + [9] * 4, dtype=np.uint32)
    vocabulary = frequent_tokens(ids)
    assert vocabulary.ids_V.tolist() == [7, 3]
    assert vocabulary.counts_V.tolist() == [6, 5]
    assert vocabulary.index_T.tolist() == [0] * 6 + [1] * 5 + [2] * 4


def test_probabilities_of_extreme_half_precision_logits_are_finite():
    logits = np.array([[[-60000.0, -60000.0]], [[60000.0, -60000.0]]], dtype=np.float16)
    for scoring in ("softmax", "sigmoid"):
        p = capturing.router_probabilities(logits, scoring)
        assert torch.allclose(p.sum(-1), torch.ones(2, 1))
        assert p[0, 0].tolist() == [0.5, 0.5]
