"""What each operator on a duplicate says it preserves: function, norms, spectra, entries, intact neurons."""

import pytest
import torch
import torch.nn.functional as F

from moesaic.expansion.operators import EXPERT_OPERATORS, MATRICES, ROUTER_OPERATORS, RouterRows
from moesaic.families.experts import ExpertWeights

D, I, E = 12, 20, 5  # noqa: E741


def expert(seed: int, *, biases: bool = True) -> ExpertWeights:
    g = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=g, dtype=torch.float64)

    extra = {"gate_bias_I": draw(I), "up_bias_I": draw(I), "down_bias_D": draw(D)} if biases else {}
    return ExpertWeights(gate_ID=draw(I, D), up_ID=draw(I, D), down_DI=draw(D, I), **extra)


def apply(operator: str, source: ExpertWeights, other: ExpertWeights, seed: int = 7) -> ExpertWeights:
    return EXPERT_OPERATORS[operator](source, other, torch.Generator().manual_seed(seed))


def ffn(weights: ExpertWeights, x):
    gate = F.linear(x, weights.gate_ID, weights.gate_bias_I)
    return F.linear(F.silu(gate) * F.linear(x, weights.up_ID, weights.up_bias_I), weights.down_DI, weights.down_bias_D)


def spectrum(w):
    return torch.linalg.svdvals(w)


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("operator", EXPERT_OPERATORS)
def test_deterministic_pure_and_different_from_the_source(operator, biases):
    source, other = expert(0, biases=biases), expert(1, biases=biases)
    before = [getattr(source, name).clone() for name in sorted(MATRICES)]
    first, second = apply(operator, source, other), apply(operator, source, other)
    x = torch.randn(6, D, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    assert torch.equal(ffn(first, x), ffn(second, x))
    assert torch.equal(ffn(first, x), ffn(source, x)) == (operator == "copy")
    assert all(torch.equal(getattr(source, name), old) for name, old in zip(sorted(MATRICES), before, strict=True))


@pytest.mark.parametrize("operator", EXPERT_OPERATORS)
def test_only_mixing_operators_look_at_the_other_expert(operator):
    source = expert(0)
    one, two = apply(operator, source, expert(1)), apply(operator, source, expert(2))
    mixes = operator in {"interpolate", "svd_mix", "sparse_code_mix"}
    assert torch.equal(one.up_ID, two.up_ID) != mixes


@pytest.mark.parametrize("name", sorted(MATRICES))
def test_spectra_and_norms(name):
    source, other = expert(0), expert(1)

    def of(operator):
        return getattr(apply(operator, source, other), name)

    w = getattr(source, name)
    torch.testing.assert_close(spectrum(of("shuffle")), spectrum(w))
    torch.testing.assert_close(spectrum(of("scaled_copy")), 0.95 * spectrum(w))
    torch.testing.assert_close(torch.linalg.matrix_norm(of("orthogonal")), torch.linalg.matrix_norm(w))
    flat = spectrum(of("orthogonal"))
    torch.testing.assert_close(flat, torch.full_like(flat, flat[0].item()))
    ratio = (torch.linalg.matrix_norm(of("copy_noise") - w) / torch.linalg.matrix_norm(w)).item()
    assert 0.007 < ratio < 0.013
    assert of("random").std().item() == pytest.approx(w.std().item(), rel=0.2)
    torch.testing.assert_close(of("interpolate"), (w + getattr(other, name)) / 2)


@pytest.mark.parametrize("name", sorted(MATRICES))
def test_svd_perturb_keeps_the_singular_vectors(name):
    w = getattr(expert(0), name)
    perturbed = getattr(apply("svd_perturb", expert(0), expert(1)), name)
    u, s, v = torch.linalg.svd(w, full_matrices=False)
    core = u.T @ perturbed @ v.T
    torch.testing.assert_close(core, torch.diag(core.diagonal()))
    assert (core.diagonal() / s - 1).std().item() == pytest.approx(0.1, abs=0.06)


@pytest.mark.parametrize("name", sorted(MATRICES))
def test_svd_mix_takes_thirty_percent_of_the_pairs(name):
    source, other = expert(0), expert(1)
    mixed = getattr(apply("svd_mix", source, other), name)
    u, s, v = torch.linalg.svd(getattr(source, name), full_matrices=False)
    other_u, other_s, other_v = torch.linalg.svd(getattr(other, name), full_matrices=False)
    pairs = torch.einsum("ir,rj->rij", u * s, v)
    other_pairs = torch.einsum("ir,rj->rij", other_u * other_s, other_v)
    basis = torch.cat([pairs, other_pairs]).flatten(1).T
    taken = torch.linalg.lstsq(basis, mixed.flatten()[:, None]).solution[:, 0].round(decimals=6)
    assert sorted(taken.tolist()) == [0.0] * len(s) + [1.0] * len(s)
    assert taken[len(s) :].sum().item() == round(0.3 * len(s))


@pytest.mark.parametrize(("operator", "share"), [("drop", 0.5), ("sparse_code_mix", 0.3)])
def test_the_same_neurons_change_in_gate_up_and_down(operator, share):
    source, other = expert(0), expert(1)
    result = apply(operator, source, other)
    changed = [
        (result.gate_ID != source.gate_ID).any(1),
        (result.up_ID != source.up_ID).any(1),
        (result.down_DI != source.down_DI).any(0),
    ]
    assert torch.equal(changed[0], changed[1])
    assert torch.equal(changed[0], changed[2])
    assert changed[0].sum().item() == round(share * I)
    if operator == "sparse_code_mix":
        assert torch.equal(result.down_DI[:, changed[2]], other.down_DI[:, changed[2]])


def test_shuffle_permutes_half_of_the_rows_of_up_alone():
    source = expert(0)
    result = apply("shuffle", source, expert(1))
    assert torch.equal(result.gate_ID, source.gate_ID)
    assert torch.equal(result.down_DI, source.down_DI)
    assert (result.up_ID != source.up_ID).any(1).sum().item() == I // 2


def rows(source=2):
    draws = torch.randn(E, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return RouterRows(rows_ED=draws, source=source)


def router(operator, source=2, seed=5):
    return ROUTER_OPERATORS[operator](rows(source), torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("operator", ROUTER_OPERATORS)
def test_router_operators_are_deterministic_and_say_what_they_change(operator):
    assert torch.equal(router(operator), router(operator))
    assert torch.equal(router(operator), rows().row_D) == (operator in {"copy", "bias_only"})


def test_router_rows():
    row, matrix = rows().row_D, rows().rows_ED
    assert (router("orthogonal") @ row).item() == pytest.approx(0, abs=1e-12)
    assert router("orthogonal").norm().item() == pytest.approx(row.norm().item())
    torch.testing.assert_close(router("scaled_copy"), 0.95 * row)
    torch.testing.assert_close(router("temperature_scaled"), 0.9 * row)
    torch.testing.assert_close(router("adversarial"), row - 0.1 * (row - matrix.mean(0)))
    assert (router("copy_noise") - row).std().item() == pytest.approx(0.01 * row.std().item(), rel=0.6)
    assert (router("perturb_new_only") - row).std().item() == pytest.approx(0.02, rel=0.6)


def test_router_interpolation_meets_every_other_expert_and_never_itself():
    met = set()
    for seed in range(60):
        other = 2 * router("interpolate", seed=seed) - rows().row_D
        met |= {e for e in range(E) if torch.allclose(other, rows().rows_ED[e])}
    assert met == {0, 1, 3, 4}


def test_router_svd_perturb_stays_in_the_row_space_of_the_singular_vectors():
    u, s, v = torch.linalg.svd(rows().rows_ED, full_matrices=False)
    factors = (router("svd_perturb") @ v.T) / (u[2] * s)
    assert (factors - 1).abs().max().item() < 0.5
    torch.testing.assert_close((u[2] * s * factors) @ v, router("svd_perturb"))
