"""N1, N2, D1, D2, D3 and S1 of docs/statements.md, in float64, against naive loops.

The loops below know nothing of the package: they route token by token and call one expert at a time.
"""

import itertools
import math

import pytest
import torch
from torch import Tensor

from moesaic.families.experts import ExpertWeights
from moesaic.upcycling.choices import LayerSpec, choose
from moesaic.upcycling.recipe import Specialist, UpcycleRecipe
from tests.upcycled_layer import MoELayer, build_layer

HIDDEN, WIDTH, TOKENS = 8, 24, 40
EXACT = 1e-12


def random_ffn(seed: int, *, biases: bool = False, width: int = WIDTH) -> ExpertWeights:
    stream = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=stream, dtype=torch.float64)

    return ExpertWeights(
        gate_ID=draw(width, HIDDEN),
        up_ID=draw(width, HIDDEN),
        down_DI=draw(HIDDEN, width),
        gate_bias_I=draw(width) if biases else None,
        up_bias_I=draw(width) if biases else None,
        down_bias_D=draw(HIDDEN) if biases else None,
    )


def tokens(count: int = TOKENS, seed: int = 99) -> Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def naive_ffn(ffn: ExpertWeights, x_D: Tensor) -> Tensor:
    gate = ffn.gate_ID @ x_D + (0 if ffn.gate_bias_I is None else ffn.gate_bias_I)
    up = ffn.up_ID @ x_D + (0 if ffn.up_bias_I is None else ffn.up_bias_I)
    return ffn.down_DI @ (gate * torch.sigmoid(gate) * up) + (0 if ffn.down_bias_D is None else ffn.down_bias_D)


def naive_route(layer: MoELayer, spec: LayerSpec, x_D: Tensor) -> list[tuple[int, float]]:
    """(expert, weight) pairs of one token; ties go to the lowest number."""
    logits = [sum(float(w) * float(x) for w, x in zip(row, x_D, strict=True)) for row in layer.router_ED.double()]
    candidates = list(range(spec.experts))
    if layer.groups is not None:
        members = [[e for e in candidates if layer.groups[e] == group] for group in sorted(set(layer.groups))]
        candidates = [max(group, key=lambda e: (logits[e], -e)) for group in members]
    chosen = sorted(candidates, key=lambda e: (-logits[e], e))[: spec.top_k]
    competitors = chosen if spec.weighting == "selected" else range(spec.experts)
    total = sum(math.exp(logits[e]) for e in competitors)
    return [(e, math.exp(logits[e]) / total) for e in chosen]


def one_expert(stacked: ExpertWeights, number: int) -> ExpertWeights:
    return stacked.map(lambda _, value: value[number])


def naive_moe(layer: MoELayer, spec: LayerSpec, x_D: Tensor) -> Tensor:
    y_D = torch.zeros(HIDDEN, dtype=torch.float64)
    for expert, weight in naive_route(layer, spec, x_D):
        y_D = y_D + layer.scaling * weight * naive_ffn(one_expert(layer.experts, expert), x_D)
    return y_D if layer.shared is None else y_D + naive_ffn(layer.shared, x_D)


def make(recipe: UpcycleRecipe, base: ExpertWeights, *specialists: ExpertWeights) -> tuple[LayerSpec, MoELayer]:
    biases = base.down_bias_D is not None
    spec = choose(recipe, hidden=HIDDEN, intermediate=base.intermediate, biases=biases).layer
    return spec, build_layer(spec, 0, (base, *specialists))


def virtual_group(**more) -> UpcycleRecipe:
    return UpcycleRecipe(base="base", method="virtual_group", router_std=0.5, **more)


def divmoe(count: int, **more) -> UpcycleRecipe:
    names = tuple(Specialist(name=f"s{i}", path=f"s{i}") for i in range(count))
    return UpcycleRecipe(base="base", method="divmoe", specialists=names, **{"router_std": 0.5, **more})


def largest_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max())


def output(layer: MoELayer, spec: LayerSpec, x_TD: Tensor) -> Tensor:
    return torch.stack([naive_moe(layer, spec, x_D) for x_D in x_TD])


def dense(ffn: ExpertWeights, x_TD: Tensor) -> Tensor:
    return torch.stack([naive_ffn(ffn, x_D) for x_D in x_TD])


def members_probability(layer: MoELayer, spec: LayerSpec, x_D: Tensor) -> float:
    """rho of N2: (E_exp*G/T) * sum over the T selected groups of the probability of one member."""
    selected = naive_route(layer, spec, x_D)
    groups = spec.top_k // spec.shards
    return spec.experts / groups * sum(weight for _, weight in selected) / spec.shards


# --- shards -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("shards", [1, 2, 3, 4, 6])
def test_shards_add_up_to_the_ffn(shards, biases):
    ffn, x_TD = random_ffn(1, biases=biases), tokens()
    parts = torch.stack([dense(ffn.shard(j, shards), x_TD) for j in range(shards)]).sum(0)
    assert largest_error(parts, dense(ffn, x_TD)) < EXACT


# --- N1, N2 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize(
    ("experts", "shards", "top_k"), [(8, 2, 2), (8, 2, 4), (6, 2, 4), (9, 3, 3), (9, 3, 6), (12, 4, 4), (5, 1, 3)]
)
def test_n1_tied_rows_give_the_dense_output(experts, shards, top_k, biases):
    base = random_ffn(2, biases=biases)
    for seed in range(3):
        spec, layer = make(virtual_group(experts=experts, shards=shards, top_k=top_k, seed=seed), base)
        assert largest_error(output(layer, spec, tokens()), dense(base, tokens())) < EXACT


def test_n1_needs_whole_groups():
    base = random_ffn(2)
    spec, layer = make(virtual_group(experts=8, shards=2, top_k=3), base)
    assert largest_error(output(layer, spec, tokens()), dense(base, tokens())) > 1e-2


def test_n1_needs_tied_rows():
    base = random_ffn(2)
    spec, layer = make(virtual_group(experts=8, shards=2, top_k=2, router_init="random"), base)
    assert largest_error(output(layer, spec, tokens()), dense(base, tokens())) > 1e-2


@pytest.mark.parametrize(("experts", "shards", "top_k"), [(8, 2, 2), (8, 2, 4), (6, 2, 4), (9, 3, 6), (5, 1, 2)])
def test_n2_softmax_over_all_gives_rho_times_the_dense_output(experts, shards, top_k):
    base, x_TD = random_ffn(3), tokens()
    spec, layer = make(virtual_group(experts=experts, shards=shards, top_k=top_k, weighting="all"), base)
    rho_T = torch.tensor([members_probability(layer, spec, x_D) for x_D in x_TD], dtype=torch.float64)
    assert largest_error(output(layer, spec, x_TD), rho_T[:, None] * dense(base, x_TD)) < EXACT
    assert rho_T.min() > 1.0
    assert rho_T.max() > 1.1  # not the dense output: that is why N2 is an identity of its own


def test_n2_is_the_dense_output_for_a_flat_router():
    base, x_TD = random_ffn(3), tokens()
    spec, layer = make(virtual_group(experts=8, shards=2, top_k=4, weighting="all", router_init="zeros"), base)
    assert largest_error(output(layer, spec, x_TD), dense(base, x_TD)) < EXACT


@pytest.mark.parametrize("weighting", ["selected", "all"])
def test_sparse_copies_preserve_whatever_the_router(weighting):
    base, x_TD = random_ffn(4), tokens()
    recipe = UpcycleRecipe(base="base", method="sparse", experts=7, top_k=3, weighting=weighting, router_std=0.5)
    spec, layer = make(recipe, base)
    rho = [members_probability(layer, spec, x_D) if weighting == "all" else 1.0 for x_D in x_TD]
    expected = torch.tensor(rho, dtype=torch.float64)[:, None] * dense(base, x_TD)
    assert largest_error(output(layer, spec, x_TD), expected) < EXACT


# --- D1 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "shards", "top_k"), [(4, 2, 2), (5, 2, 3), (3, 4, 2), (5, 3, 4)])
def test_d1_distinct_domains_and_weights_that_sum_to_one(count, shards, top_k):
    """Also where M does not divide N, and where K is not a multiple of M."""
    specialists = [random_ffn(10 + i) for i in range(count)]
    recipe = divmoe(count, shards=shards, top_k=top_k, router_init="random", scale="none")
    spec, layer = make(recipe, random_ffn(2), *specialists)
    for x_D in tokens():
        selected = naive_route(layer, spec, x_D)
        assert len({expert // shards for expert, _ in selected}) == top_k
        assert sum(weight for _, weight in selected) == pytest.approx(1.0, abs=1e-14)
        parts = [weight * naive_ffn(specialists[e // shards].shard(e % shards, shards), x_D) for e, weight in selected]
        expected = torch.stack(parts).sum(0)
        assert largest_error(naive_moe(layer, spec, x_D), expected) < EXACT


@pytest.mark.parametrize(("count", "shards"), [(4, 2), (4, 3), (4, 4)])
def test_d1_a_random_router_covers_all_shards_for_few_tokens(count, shards):
    """The share of tokens that get all M shards at K = M is M!/M^M: 50%, 22%, 9%."""
    hits, total = 0, 0
    x_TD = tokens(200)
    for seed in range(20):
        _, layer = make(
            divmoe(count, shards=shards, top_k=shards, router_init="random", seed=seed),
            random_ffn(2),
            *([random_ffn(2)] * count),
        )
        best_TN = (x_TD @ layer.router_ED.double().T).unflatten(1, (count, shards)).max(-1)
        top_TK = best_TN.values.topk(shards).indices
        taken_TK = best_TN.indices.gather(1, top_TK)
        hits += sum(len(set(row)) == shards for row in taken_TK.tolist())
        total += len(x_TD)
    expected = math.factorial(shards) / shards**shards
    assert hits / total == pytest.approx(expected, abs=0.05)


def test_d1_a_zero_router_always_takes_shard_0():
    spec, layer = make(divmoe(4, shards=2, top_k=2, router_init="zeros"), random_ffn(2), *([random_ffn(2)] * 4))
    assert {expert % 2 for x_D in tokens() for expert, _ in naive_route(layer, spec, x_D)} == {0}


# --- D2, D3 -----------------------------------------------------------------------------------------------------------

LATIN = [(4, 2, 2), (4, 2, 4), (6, 2, 4), (6, 3, 3), (6, 3, 6), (8, 4, 4), (3, 1, 2)]
"""(N, M, K) where M divides N and K is a multiple of M; also N and E that are no powers of two."""


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("routing", ["one_per_group", "topk"])
@pytest.mark.parametrize(("count", "shards", "top_k"), LATIN)
def test_d2_identical_specialists_give_the_dense_output(count, shards, top_k, routing, biases):
    base = random_ffn(5, biases=biases)
    for seed in range(2):
        recipe = divmoe(count, shards=shards, top_k=top_k, routing=routing, seed=seed)
        spec, layer = make(recipe, base, *([base] * count))
        assert spec.router_init == "latin_square"
        assert largest_error(output(layer, spec, tokens()), dense(base, tokens())) < EXACT


@pytest.mark.parametrize(("count", "shards", "top_k"), LATIN)
def test_d2_softmax_over_all_gives_rho_times_the_dense_output(count, shards, top_k):
    base, x_TD = random_ffn(5), tokens()
    spec, layer = make(divmoe(count, shards=shards, top_k=top_k, weighting="all"), base, *([base] * count))
    rho_T = torch.tensor([members_probability(layer, spec, x_D) for x_D in x_TD], dtype=torch.float64)
    assert largest_error(output(layer, spec, x_TD), rho_T[:, None] * dense(base, x_TD)) < EXACT


@pytest.mark.parametrize(("top_k", "routing"), [(1, "one_per_group"), (3, "one_per_group"), (3, "topk")])
def test_d2_misses_when_k_is_not_a_multiple_of_m(top_k, routing):
    base, x_TD = random_ffn(5), tokens()
    """By a third of the difference of the two shards at K=3 with a flat router, by all of it at K=1."""
    recipe = divmoe(4, shards=2, top_k=top_k, routing=routing, router_init="latin_square", router_std=1e-6)
    spec, layer = make(recipe, base, *([base] * 4))
    difference = dense(base.shard(0, 2), x_TD) - dense(base.shard(1, 2), x_TD)
    missed = (output(layer, spec, x_TD) - dense(base, x_TD)).abs()
    assert largest_error(missed, difference.abs() / top_k) < 1e-4


def test_d2_for_virtual_groups_under_one_per_group():
    base = random_ffn(5)
    spec, layer = make(virtual_group(experts=8, shards=2, top_k=2, routing="one_per_group"), base)
    assert spec.router_init == "latin_square"
    assert largest_error(output(layer, spec, tokens()), dense(base, tokens())) < EXACT


@pytest.mark.parametrize("routing", ["one_per_group", "topk"])
@pytest.mark.parametrize(("count", "shards"), [(4, 2), (6, 2), (6, 3), (8, 4)])
def test_d3_different_specialists_give_one_whole_ffn_of_their_shards(count, shards, routing):
    specialists = [random_ffn(20 + i) for i in range(count)]
    spec, layer = make(divmoe(count, shards=shards, top_k=shards, routing=routing), random_ffn(2), *specialists)
    for x_D in tokens():
        domain_of_shard = {e % shards: e // shards for e, _ in naive_route(layer, spec, x_D)}
        assert sorted(domain_of_shard) == list(range(shards))
        assert len(set(domain_of_shard.values())) == shards
        parts = [naive_ffn(specialists[d].shard(j, shards), x_D) for j, d in domain_of_shard.items()]
        expected = torch.stack(parts).sum(0)
        assert largest_error(naive_moe(layer, spec, x_D), expected) < EXACT


def test_m_that_does_not_divide_n_falls_back_to_random_rows():
    specialists = [random_ffn(20 + i) for i in range(5)]
    choices = choose(divmoe(5, shards=2, top_k=2), hidden=HIDDEN, intermediate=WIDTH)
    assert choices.layer.router_init == "random"
    assert "--shards 2 does not divide the number of domains (5)" in choices.notices[0]
    spec, layer = make(divmoe(5, shards=2, top_k=2), random_ffn(2), *specialists)
    covered = [len({e % 2 for e, _ in naive_route(layer, spec, x_D)}) == 2 for x_D in tokens()]
    assert any(covered)
    assert not all(covered)


# --- S1 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("shared", [1, 2, 3])
@pytest.mark.parametrize("method", ["sparse", "virtual_group", "divmoe"])
def test_s1_shared_experts_and_half_the_routed_part_give_the_dense_output(method, shared, biases):
    base = random_ffn(6, biases=biases)
    recipes = {
        "sparse": UpcycleRecipe(base="base", method="sparse", shared_experts=shared, router_std=0.5),
        "virtual_group": virtual_group(experts=6, shared_experts=shared),
        "divmoe": divmoe(4, shared_experts=shared),
    }
    spec, layer = make(recipes[method], base, *([base] * (4 if method == "divmoe" else 0)))
    assert largest_error(output(layer, spec, tokens()), dense(base, tokens())) < EXACT


@pytest.mark.parametrize("shared", [1, 2])
def test_without_exact_scaling_shared_experts_are_added_whole(shared):
    base, x_TD = random_ffn(6), tokens()
    spec, layer = make(virtual_group(experts=6, shared_experts=shared, scale="none"), base)
    # M = 2 shards with weights that sum to 1 and no factor: the routed part is half the FFN.
    assert largest_error(output(layer, spec, x_TD), (shared + 0.5) * dense(base, x_TD)) < EXACT


# --- equation 5 -------------------------------------------------------------------------------------------------------


def wide_ffn(pre_activation: float, width: int = 512) -> ExpertWeights:
    ffn = random_ffn(7, width=width)
    return ffn.scale(gate_up=pre_activation / math.sqrt(HIDDEN), down=1 / math.sqrt(width))


@pytest.mark.parametrize(("factor", "least", "most"), [(2, 0.04, 0.08), (8, 0.10, 0.25)])
@pytest.mark.parametrize("pre_activation", [0.3, 0.5, 1.0, 1.5])
def test_a_factor_spread_over_gate_up_and_down_is_not_exact(pre_activation, factor, least, most):
    ffn, x_TD = wide_ffn(pre_activation), tokens(200)
    root = factor ** (1 / 3)
    spread = dense(ffn.scale(gate_up=root, down=root), x_TD)
    error = float((spread - factor * dense(ffn, x_TD)).norm() / (factor * dense(ffn, x_TD)).norm())
    assert least < error < most


def test_the_paper_factor_makes_the_output_far_too_large():
    """N=4, M=K=2: 4 times in the linear limit; SiLU makes it 4.4 for complementary shards, more for a random router."""
    base, x_TD = wide_ffn(1.0), tokens(100)
    ratios = {}
    for router in ("latin_square", "random"):
        recipe = divmoe(4, scale="paper", router_init=router, router_std=0.02)
        spec, layer = make(recipe, base, *([base] * 4))
        ratios[router] = float(output(layer, spec, x_TD).norm() / dense(base, x_TD).norm())
    assert 4.3 < ratios["latin_square"] < 4.6
    assert 4.9 < ratios["random"] < 6.2


def test_the_cube_root_is_exact_for_gated_plain_relu():
    ffn, x_TD = random_ffn(8), tokens()
    root = 8 ** (1 / 3)

    def relu_ffn(weights: ExpertWeights) -> Tensor:
        return (torch.relu(x_TD @ weights.gate_ID.T) * (x_TD @ weights.up_ID.T)) @ weights.down_DI.T

    assert largest_error(relu_ffn(ffn.scale(gate_up=root, down=root)), 8 * relu_ffn(ffn)) < EXACT


# --- the latin square itself ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "shards"), [(4, 2), (6, 3), (8, 4)])
def test_latin_square_rows(count, shards):
    _, layer = make(divmoe(count, shards=shards), random_ffn(2), *([random_ffn(2)] * count))
    rows = layer.router_ED.unflatten(0, (count // shards, shards, shards))  # virtual group, position, shard
    for group, t, j in itertools.product(range(count // shards), range(shards), range(shards)):
        assert torch.equal(rows[group, t, j], rows[group, 0, (j - t) % shards])
    assert len({tuple(row.tolist()) for row in layer.router_ED}) == count
