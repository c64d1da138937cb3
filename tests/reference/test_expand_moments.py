"""Optimizer states of copies: `adaptive_scale` against its formula (docs/peers.md, row 6)."""

import pytest
import torch

from moesaic.training.moments import adaptive_shares

SOURCES = [0, 1, 2, 1, 1, 2]


def test_adaptive_shares():
    """One copy equal to its source, one near it, one so far that the least share holds."""
    draw = torch.Generator().manual_seed(0)
    weights = torch.randn(6, 4, 3, generator=draw, dtype=torch.float64)
    weights[3] = weights[1]
    weights[4] = weights[1] + 0.1 * torch.randn(4, 3, generator=draw, dtype=torch.float64)
    shares = adaptive_shares(weights, SOURCES).tolist()
    assert shares[:4] == [1.0, 1.0, 1.0, pytest.approx(0.5)]
    old, new = (weights[number].flatten().tolist() for number in (1, 4))
    change = sum(abs(b - a) for a, b in zip(old, new, strict=True)) / (sum(map(abs, old)) + 12e-8)
    assert 0.02 < change < 0.5
    assert shares[4] == pytest.approx(0.5 * (1 - change), rel=1e-12)
    assert shares[5] == pytest.approx(0.05, rel=1e-12)
