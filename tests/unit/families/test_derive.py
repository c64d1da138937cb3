"""A row read off transformers' class says what a written one says; a router is known by what it does."""

import pytest
import torch
from torch import nn

from moesaic.common.errors import MoesaicError
from moesaic.families.decide import Asked, Decision, decision_of
from moesaic.families.derive import derive, flags_of
from moesaic.families.moe import USUAL
from moesaic.families.moe_table import MOE_FAMILIES, family_of

EXPERTS, HIDDEN = 8, 16


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_what_can_be_seen_is_what_was_written(family):
    row = MOE_FAMILIES[family]
    flags = (("norm_topk_prob", True),) if row.weighting == "norm_topk_prob" else ()
    seen = derive(family, flags)
    assert seen.top_k_key == row.top_k_key
    assert row.experts_key == seen.experts_key or {row.experts_key, seen.experts_key} == {
        "num_experts",
        "num_local_experts",
    }
    for name in ("scoring", "selection_bias", "transposed", "interleaved", "gated", "uniform", "adds_up"):
        assert getattr(seen, name) == getattr(row, name), name
    assert seen.normalises({}) == row.normalises(dict(flags))
    assert seen.places is not None
    for name, place in seen.places.stacked.items():
        assert USUAL.stacked[name] == place
    assert seen.places.own.items() <= USUAL.own.items()
    assert set(seen.places.shared) <= set(USUAL.shared)


def test_a_switch_of_the_config_counts():
    config = {"model_type": "dots1", "n_routed_experts": 8, "norm_topk_prob": True, "hidden_act": "silu"}
    assert flags_of(config) == (("norm_topk_prob", True),)
    rows = [family_of(config | {"norm_topk_prob": value}) for value in (True, False)]
    assert [row and row.weighting for row in rows] == ["selected", "all"]
    assert family_of({"model_type": "llama", "num_experts": 8}) is None
    assert family_of({"model_type": "llama"}) is None


@pytest.mark.parametrize(
    ("family", "reason"),
    [("deepseek_v4", "table of token ids"), ("inkling_text", "10 rows for 8"), ("zaya", "9 rows for 8")],
)
def test_what_cannot_be_cut_is_refused_with_the_reason(family, reason):
    with pytest.raises(MoesaicError, match=reason):
        derive(family)


class _Router(nn.Module):
    """A router that decides by any function of logits and bias."""

    def __init__(self, decide):
        super().__init__()
        stream = torch.Generator().manual_seed(7)
        self.weight = nn.Parameter(torch.randn(EXPERTS, HIDDEN, generator=stream, dtype=torch.float64))
        self.bias = nn.Parameter(torch.randn(EXPERTS, generator=stream, dtype=torch.float64))
        self.decide = decide

    def forward(self, hidden):
        logits = hidden @ self.weight.T
        return self.decide(logits, self.bias)


def _top(scores, weights, factor=1.0, *, renormalise):
    ids = scores.topk(3, dim=-1).indices
    chosen = weights.gather(1, ids)
    return chosen / chosen.sum(-1, keepdim=True) * factor if renormalise else chosen * factor, ids


def _softmax_of_the_best(logits, _):
    values, ids = logits.topk(3, dim=-1)
    return logits, values.softmax(-1), ids


def _biased_logits(logits, bias):
    return logits, *_top(logits + bias, logits.sigmoid(), 2.5, renormalise=False)


def _probabilities_given(logits, bias):
    scores = logits.softmax(-1)
    weights, ids = _top(scores, scores, renormalise=True)
    return scores, weights * bias[ids], ids


def _squared(logits, _):
    return logits, *_top(logits, logits.softmax(-1) ** 2, renormalise=True)


@pytest.mark.parametrize(
    ("decide", "expected"),
    [
        (_softmax_of_the_best, ("softmax", "selected", "none", "logits")),
        (_biased_logits, ("sigmoid", "all", "logits", "logits")),
        (_probabilities_given, ("softmax", "selected", "weights", "softmax")),
        (_squared, None),
    ],
)
def test_a_router_is_known_by_what_it_does(decide, expected):
    router = _Router(decide)
    asked = Asked(router=router, biases={"bias": router.bias.detach()}, arguments=())
    found = decision_of(asked, hidden=HIDDEN, groups=1, chosen=1)
    names = ("scoring", "weighting", "bias_on", "returns")
    if expected is None:
        assert found is None
    else:
        assert isinstance(found, Decision)
        assert tuple(getattr(found, name) for name in names) == expected
