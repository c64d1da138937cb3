"""The figures of one layer against plain loops over tokens."""

import math

import pytest
import torch
from torch import nn

from moesaic.verifying.measure import LayerView, compare_logits, measure_layer, rho, run_dense, scaled_dense

TOKENS, HIDDEN, EXPERTS, K = 40, 6, 6, 3


@pytest.fixture
def view():
    g = torch.Generator().manual_seed(3)
    logits_TE = torch.randn(TOKENS, EXPERTS, generator=g)
    ids_TK = torch.stack([torch.randperm(EXPERTS, generator=g)[:K] for _ in range(TOKENS)])
    return LayerView(
        layer=7,
        hidden_TD=torch.randn(TOKENS, HIDDEN, generator=g),
        ffn_TD=torch.randn(TOKENS, HIDDEN, generator=g),
        logits_TE=logits_TE,
        weights_TK=torch.rand(TOKENS, K, generator=g),
        ids_TK=ids_TK,
        routed_TD=torch.randn(TOKENS, HIDDEN, generator=g),
        output_TD=torch.randn(TOKENS, HIDDEN, generator=g),
    )


def norm(values):
    return math.sqrt(sum(float(v) ** 2 for v in values))


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_figures_equal_loops_over_tokens(view, shards):
    groups = torch.tensor([0, 0, 1, 1, 2, 2])
    expected = torch.randn(TOKENS, HIDDEN)
    got = measure_layer(view, shards=shards, scaling=2.0, groups_E=groups, identity=lambda _: expected, rho=None)
    error = ratio = identity = covered = distinct = 0.0
    for t in range(TOKENS):
        error += norm(view.output_TD[t] - view.ffn_TD[t]) / norm(view.ffn_TD[t]) / TOKENS
        ratio += norm(view.output_TD[t]) / norm(view.ffn_TD[t]) / TOKENS
        identity += norm(view.routed_TD[t] - expected[t]) / norm(expected[t]) / TOKENS
        covered += ({int(e) % shards for e in view.ids_TK[t]} == set(range(shards))) / TOKENS
        distinct += (len({int(e) // 2 for e in view.ids_TK[t]}) == K) / TOKENS
    assert got.layer == 7
    assert got.error == pytest.approx(error, rel=1e-5)
    assert got.norm_ratio == pytest.approx(ratio, rel=1e-5)
    assert got.identity_error == pytest.approx(identity, rel=1e-5)
    assert got.coverage == (None if shards == 1 else pytest.approx(covered))
    assert got.distinct == pytest.approx(distinct)
    assert 0 < distinct < 1
    assert got.weight_sum_error == pytest.approx(max(abs(float(w.sum()) / 2 - 1) for w in view.weights_TK), rel=1e-5)
    assert got.rho is None


def test_rho_is_the_formula_of_n2():
    """E/G * sum over the G selected groups of the probability of one member, members tied."""
    shards, groups = 2, torch.randn(TOKENS, 3, generator=torch.Generator().manual_seed(1))
    logits_TE = groups.repeat_interleave(shards, dim=1)
    chosen = groups.topk(2).indices
    ids_TK = torch.cat([chosen * 2, chosen * 2 + 1], dim=1)
    blank = torch.zeros(TOKENS, HIDDEN)
    view = LayerView(
        layer=0,
        hidden_TD=blank,
        ffn_TD=torch.ones(TOKENS, HIDDEN),
        logits_TE=logits_TE,
        weights_TK=torch.zeros(TOKENS, 4),
        ids_TK=ids_TK,
        routed_TD=blank,
        output_TD=blank,
    )
    factor = rho(shards=shards)(view)
    for t in range(TOKENS):
        total = sum(math.exp(float(v)) for v in logits_TE[t])
        expected = 6 / 2 * sum(math.exp(float(groups[t, g])) / total for g in chosen[t])
        assert float(factor[t]) == pytest.approx(expected, rel=1e-5)
    assert (factor >= 1 - 1e-6).all()
    expected_TD = scaled_dense(shards=shards, share=0.5)(view)
    assert expected_TD is not None
    torch.testing.assert_close(expected_TD, 0.5 * factor.expand(-1, HIDDEN))


def test_a_token_without_ffn_output_does_not_make_the_mean_infinite(view):
    view.ffn_TD[0] = 0
    got = measure_layer(view, shards=2, scaling=1.0, groups_E=None, identity=None, rho=None)
    assert math.isfinite(got.error)
    assert got.distinct is None
    assert got.identity_error is None


class Stub(nn.Module):
    """One layer, an embedding as FFN input and a head: enough for hooks and logits."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(11, HIDDEN)
        self.mlp = nn.Linear(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, 11)

    def get_decoder(self):
        return _Decoder(self.mlp)

    def forward(self, input_ids, use_cache):
        assert not use_cache
        hidden = self.embedding(input_ids)
        return type("Output", (), {"logits": self.head(hidden + self.mlp(hidden))})


class _Decoder:
    def __init__(self, mlp):
        self.layers = [type("Layer", (), {"mlp": mlp})]


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_what_the_dense_run_keeps_and_the_comparison_of_logits(batch_size):
    source, target = Stub(0), Stub(1)
    tokens = torch.randint(11, (5, 8), generator=torch.Generator().manual_seed(0))
    ticks = []
    dense = run_dense(source, tokens, [0], batch_size, ticks.append)
    flat = tokens.flatten()
    torch.testing.assert_close(dense.hidden_TD[0], source.embedding(flat).detach())
    torch.testing.assert_close(dense.ffn_TD[0], source.mlp(source.embedding(flat)).detach())
    assert sum(ticks) == 40
    assert not source.mlp._forward_hooks
    difference, ours, theirs = compare_logits(target, tokens, dense, batch_size, ticks.append)
    with torch.no_grad():
        logits = [model(tokens, use_cache=False).logits for model in (source, target)]
    assert difference == pytest.approx(float((logits[0] - logits[1]).abs().max()), rel=1e-5)
    for perplexity, values in ((ours, logits[0]), (theirs, logits[1])):
        log_p = values.double().log_softmax(-1)
        terms = [-float(log_p[b, i, tokens[b, i + 1]]) for b in range(5) for i in range(7)]
        assert perplexity == pytest.approx(math.exp(sum(terms) / len(terms)), rel=1e-5)
