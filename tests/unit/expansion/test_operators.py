"""What operators on duplicates preserve, and that they are pure. Their formulas: tests/reference."""

import pytest
import torch
import torch.nn.functional as F

from moesaic.expansion.operators import EXPERT_OPERATORS, ROUTER_OPERATORS
from moesaic.families.experts import ExpertWeights

D, I, E = 12, 20, 5  # noqa: E741
MATRICES = ("gate_ID", "up_ID", "down_DI")


def expert(seed: int, *, biases: bool = True) -> ExpertWeights:
    g = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=g, dtype=torch.float64)

    extra = {"gate_bias_I": draw(I), "up_bias_I": draw(I), "down_bias_D": draw(D)} if biases else {}
    return ExpertWeights(gate_ID=draw(I, D), up_ID=draw(I, D), down_DI=draw(D, I), **extra)


def apply(operator: str, source: ExpertWeights, partner: ExpertWeights, seed: int = 7) -> ExpertWeights:
    return EXPERT_OPERATORS[operator](source, partner, torch.Generator().manual_seed(seed))


def ffn(weights: ExpertWeights, x):
    gate = F.linear(x, weights.gate_ID, weights.gate_bias_I)
    return F.linear(F.silu(gate) * F.linear(x, weights.up_ID, weights.up_bias_I), weights.down_DI, weights.down_bias_D)


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("operator", EXPERT_OPERATORS)
def test_deterministic_pure_and_different_from_the_source(operator, biases):
    source, partner = expert(0, biases=biases), expert(1, biases=biases)
    before = [getattr(source, name).clone() for name in MATRICES]
    first, second = apply(operator, source, partner), apply(operator, source, partner)
    x = torch.randn(6, D, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    assert torch.equal(ffn(first, x), ffn(second, x))
    assert torch.equal(ffn(first, x), ffn(source, x)) == (operator == "copy")
    assert all(torch.equal(getattr(source, name), old) for name, old in zip(MATRICES, before, strict=True))


@pytest.mark.parametrize("operator", EXPERT_OPERATORS)
def test_only_operators_with_a_partner_look_at_one(operator):
    source = expert(0)
    one, two = apply(operator, source, expert(1)), apply(operator, source, expert(2))
    assert torch.equal(one.down_DI, two.down_DI) == (EXPERT_OPERATORS[operator].partner is None)


def test_spectra_and_norms():
    source = expert(0)
    w = source.down_DI

    def spectrum(operator):
        return torch.linalg.svdvals(apply(operator, source, expert(1)).down_DI)

    torch.testing.assert_close(spectrum("shuffle"), torch.linalg.svdvals(w))
    flat = spectrum("orthogonal")
    torch.testing.assert_close(flat, torch.full_like(flat, flat[0].item()))
    torch.testing.assert_close(flat.norm(), torch.linalg.matrix_norm(w))


@pytest.mark.parametrize("operator", ROUTER_OPERATORS)
def test_router_operators_are_deterministic_and_say_what_they_change(operator):
    rows = torch.randn(E, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def made():
        return ROUTER_OPERATORS[operator](rows, torch.tensor([2, 2, 4]), torch.Generator().manual_seed(5))

    assert torch.equal(made(), made())
    assert torch.equal(made(), rows[[2, 2, 4]]) == (operator in {"copy", "bias_only"})
