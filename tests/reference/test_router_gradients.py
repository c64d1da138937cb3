"""`router_gradient` for every method, weighting and K, against float64 autograd through naive loops.

The experts are those of the method with noise on them, as after some training: so what is zero is so by construction.
"""

import pytest
import torch
from torch import Tensor

from moesaic.families.experts import ExpertWeights
from moesaic.routing.gradient import RouterChoices, gradient_warning, router_gradient
from moesaic.upcycling.choices import LayerSpec, choose
from moesaic.upcycling.recipe import Specialist, UpcycleRecipe
from tests.reference.test_upcycle_statements import HIDDEN, WIDTH, naive_ffn, one_expert, random_ffn, tokens
from tests.upcycled_layer import build_layer

ZERO = 1e-12

METHODS = {
    "scratch": {},
    "sparse": {},
    "drop": {},
    "drop with tied rows": {"method": "drop", "shards": 2, "router_init": "tied"},
    "virtual_group": {},
    "virtual_group of 4": {"method": "virtual_group", "shards": 4},
    "virtual_group, one_per_group": {"method": "virtual_group", "routing": "one_per_group"},
    "btx": {},
    "divmoe": {},
    "divmoe, topk": {"method": "divmoe", "routing": "topk"},
    "divmoe, random rows": {"method": "divmoe", "router_init": "random"},
}
CASES = [(name, weighting, k) for name in METHODS for weighting in ("selected", "all") for k in (1, 2, 4)]


def recipe_of(name: str, **more) -> UpcycleRecipe:
    settings = {"method": name.split(",")[0], **METHODS[name], **more}
    if settings["method"] in ("btx", "divmoe"):
        settings["specialists"] = tuple(Specialist(name=f"s{i}", path=f"s{i}") for i in range(4))
    else:
        settings["experts"] = 8
    return UpcycleRecipe(base="base", router_std=0.5, **settings)


def naive_weights(spec: LayerSpec, logits_E: Tensor) -> dict[int, Tensor]:
    """Expert -> weight for one token; ties go to the lowest number."""
    values = logits_E.detach().tolist()
    candidates = list(range(spec.experts))
    if spec.groups is not None:
        groups = [[e for e in candidates if spec.groups[e] == group] for group in sorted(set(spec.groups))]
        candidates = [max(group, key=lambda e: (values[e], -e)) for group in groups]
    chosen = sorted(candidates, key=lambda e: (-values[e], e))[: spec.top_k]
    competitors = chosen if spec.weighting == "selected" else range(spec.experts)
    total = torch.stack([logits_E[e].exp() for e in competitors]).sum()
    return {e: logits_E[e].exp() / total for e in chosen}


def row_gradients(spec: LayerSpec, noise: float) -> tuple[Tensor, float]:
    """The gradient of a random linear loss by each router row, (E, D); and the size of one of its terms."""
    layer = build_layer(spec, 0, (random_ffn(1), *(random_ffn(10 + i) for i in range(spec.specialists))))
    stream = torch.Generator().manual_seed(3)

    def trained(_: str, value: Tensor) -> Tensor:
        return value.double() + noise * torch.randn(value.shape, generator=stream, dtype=torch.float64)

    experts: ExpertWeights = layer.experts.map(trained)
    rows_ED = layer.router_ED.double().requires_grad_()
    loss, size = torch.zeros((), dtype=torch.float64), 0.0
    for x_D in tokens(12):
        for expert, weight in naive_weights(spec, rows_ED @ x_D).items():
            direction_D = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
            part = layer.scaling * weight * (direction_D @ naive_ffn(one_expert(experts, expert), x_D))
            loss, size = loss + part, max(size, abs(part.item()))
    return torch.autograd.grad(loss, rows_ED)[0], size


def measured(spec: LayerSpec, noise: float = 0.3) -> str:
    gradient_ED, size = row_gradients(spec, noise)
    if gradient_ED.abs().max() < ZERO * size:
        return "none"
    tied = spec.router_choices.tied
    if tied > 1 and gradient_ED.unflatten(0, (-1, tied)).sum(1).abs().max() < ZERO * size:
        return "within groups"
    return "full"


@pytest.mark.parametrize(("name", "weighting", "top_k"), CASES)
def test_the_table(name, weighting, top_k):
    spec = choose(recipe_of(name, weighting=weighting, top_k=top_k), hidden=HIDDEN, intermediate=WIDTH).layer
    assert measured(spec) == router_gradient(spec.router_choices)


def test_the_table_has_all_three():
    found = {
        router_gradient(
            choose(recipe_of(n, weighting=w, top_k=k), hidden=HIDDEN, intermediate=WIDTH).layer.router_choices
        )
        for n, w, k in CASES
    }
    assert found == {"none", "within groups", "full"}


@pytest.mark.parametrize(("weighting", "expected"), [("selected", "none"), ("all", "full")])
def test_equal_experts_under_equal_rows(weighting, expected):
    recipe = recipe_of("sparse", weighting=weighting, top_k=2, router_init="zeros")
    spec = choose(recipe, hidden=HIDDEN, intermediate=WIDTH).layer
    assert measured(spec, noise=0.0) == router_gradient(spec.router_choices) == expected


def test_sigmoid_weights_and_one_expert():
    assert router_gradient(RouterChoices(weighting="sigmoid", experts=8, top_k=1)) == "none"
    assert router_gradient(RouterChoices(weighting="sigmoid", experts=8, top_k=2)) == "full"
    assert router_gradient(RouterChoices(weighting="all", experts=1, top_k=1)) == "none"
    logits_E = torch.randn(8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    best = logits_E.sigmoid().max()
    assert torch.autograd.grad(best / best, logits_E)[0].abs().max() == 0


@pytest.mark.parametrize("method", ["sparse", "btx"])
def test_one_whole_expert_per_token_is_weighted_over_all(method):
    assert choose(recipe_of(method, top_k=1), hidden=HIDDEN, intermediate=WIDTH).layer.weighting == "all"
    assert choose(recipe_of(method, top_k=2), hidden=HIDDEN, intermediate=WIDTH).layer.weighting == "selected"


@pytest.mark.parametrize("method", ["virtual_group", "divmoe", "drop", "scratch"])
def test_other_methods_keep_their_weighting(method):
    assert choose(recipe_of(method, top_k=1), hidden=HIDDEN, intermediate=WIDTH).layer.weighting == "selected"


def test_each_zero_is_one_line_with_a_cure():
    lines = [
        gradient_warning(RouterChoices(weighting="selected", experts=8, top_k=1)),
        gradient_warning(RouterChoices(weighting="selected", experts=8, top_k=2, tied=2)),
        gradient_warning(RouterChoices(weighting="selected", experts=8, top_k=2, tied=8, copies=True)),
        gradient_warning(RouterChoices(weighting="all", experts=1, top_k=1)),
    ]
    assert lines[0] is not None
    assert lines[0].endswith("use weighting all, or 2 active experts")
    assert lines[1] is not None
    assert lines[1].endswith("use weighting all, or 4 active experts")
    assert all(line and line.startswith("the text's loss has no gradient") and "\n" not in line for line in lines)
    assert gradient_warning(RouterChoices(weighting="all", experts=8, top_k=1)) is None
