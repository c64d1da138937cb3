"""Why `optimizer: scale` divides moments among replicas: gradients of a grown layer in float64, through autograd."""

import pytest
import torch

from moesaic.expansion.allocation import sources_of
from moesaic.modeling.modeling_moesaic import group_members, route_one_per_group, route_topk

EXPERTS, TOP_K, HIDDEN, WIDTH, TOKENS = 6, 2, 8, 5, 80
NAMES = ("router", "gate", "up", "down")


@pytest.fixture
def layer():
    draw = torch.Generator().manual_seed(1)
    shapes = ((EXPERTS, HIDDEN), (EXPERTS, WIDTH, HIDDEN), (EXPERTS, WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH))
    x = torch.randn(TOKENS, HIDDEN, generator=draw, dtype=torch.float64)
    return x, [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]


def gradients(x, weights, route):
    """Of some loss, one token and expert at a time."""
    router, gate, up, down = leaves = [weight.clone().requires_grad_() for weight in weights]
    weights_TK, ids_TK = route(x @ router.T)
    loss = torch.zeros((), dtype=torch.float64)
    for token, hidden in enumerate(x):
        output = torch.zeros(HIDDEN, dtype=torch.float64)
        for weight, expert in zip(weights_TK[token], ids_TK[token].tolist(), strict=True):
            inner = torch.nn.functional.silu(gate[expert] @ hidden) * (up[expert] @ hidden)
            output = output + weight * (down[expert] @ inner)
        loss = loss + (output * output.detach().roll(1)).sum() + output.sin().sum()
    return dict(zip(NAMES, torch.autograd.grad(loss, leaves), strict=True))


@pytest.mark.parametrize("times", [2, 3])
@pytest.mark.parametrize("weighting", ["selected", "all"])
def test_copies_that_are_used_together_share_the_gradient_equally(layer, weighting, times):
    """Statement (a): the router's rows as well."""
    x, weights = layer
    sources = sources_of([times - 1] * EXPERTS)
    before = gradients(x, weights, lambda logits: route_topk(logits, TOP_K, weighting))
    after = gradients(x, [w[sources] for w in weights], lambda logits: route_topk(logits, times * TOP_K, weighting))
    for name in NAMES:
        torch.testing.assert_close(after[name], before[name][sources] / times, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("score", ["mean", "log_mean_exp"])
def test_copies_of_one_group_have_the_gradient_of_their_source_between_them(layer, score):
    """Statement (b): the router's rows share it equally, the experts by the tokens that each of them gets."""
    x, weights = layer
    copies = [3, 0, 1, 0, 2, 1]
    sources = sources_of(copies)
    members = torch.tensor(group_members(sources))
    before = gradients(x, weights, lambda logits: route_topk(logits, TOP_K, "selected"))
    after = gradients(
        x,
        [w[sources] for w in weights],
        lambda logits: route_one_per_group(logits, members, TOP_K, "selected", score),
    )
    replicas = torch.tensor([1.0 + copies[source] for source in sources], dtype=torch.float64)
    torch.testing.assert_close(after["router"], before["router"][sources] / replicas[:, None], rtol=1e-12, atol=1e-12)
    for name in NAMES[1:]:
        sums = torch.zeros_like(before[name]).index_add_(0, torch.tensor(sources), after[name])
        torch.testing.assert_close(sums, before[name], rtol=1e-12, atol=1e-12)
