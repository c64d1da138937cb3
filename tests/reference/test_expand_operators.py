"""Every operator on duplicates against its formula, one number at a time in float64 (docs/peers.md, rows 1 and 2).

The draws are the operator's own, taken from an equal generator in the order that its formula names them; singular
value decompositions are torch's, because their signs are nobody's formula.
"""

import math

import pytest
import torch

from moesaic.common import seeds
from moesaic.expansion.operators import EXPERT_OPERATORS, ROUTER_OPERATORS, grown_rows
from moesaic.families.experts import ExpertWeights

D, I, E = 7, 5, 6  # noqa: E741
SOURCES = [*range(E), 0, 0, 2, 5]
"""Of a grown router: the last expert's next is the first, and one expert has two copies."""


def generator():
    return torch.Generator().manual_seed(11)


def draw(seed, *shape):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values + 0.3 * torch.arange(values.numel(), dtype=torch.float64).view(shape) / values.numel()


def expert(seed):
    return ExpertWeights(
        gate_ID=draw(seed, I, D),
        up_ID=draw(seed + 1, I, D),
        down_DI=draw(seed + 2, D, I),
        gate_bias_I=draw(seed + 3, I),
        up_bias_I=draw(seed + 4, I),
        down_bias_D=draw(seed + 5, D),
    )


def normal(shape, g):
    return seeds.normal(shape, 1.0, g, dtype=torch.float64).tolist()


def std(w):
    """The unbiased standard deviation of all entries of a list of rows."""
    flat = [value for row in w for value in row]
    mean = sum(flat) / len(flat)
    return math.sqrt(sum((value - mean) ** 2 for value in flat) / (len(flat) - 1))


def frobenius(w):
    return math.sqrt(sum(value * value for row in w for value in row))


def product(a, b):
    return [[sum(a[i][k] * b[k][j] for k in range(len(b))) for j in range(len(b[0]))] for i in range(len(a))]


def transpose(w):
    return [list(column) for column in zip(*w, strict=True)]


def plus_noise(w, ratio, g):
    noise = normal((len(w), len(w[0])), g)
    return [[w[i][j] + ratio * noise[i][j] for j in range(len(w[0]))] for i in range(len(w))]


def householder(a):
    """Q of a tall matrix: reflections that put each column on its axis, on the side where it is not."""
    rows, columns = len(a), len(a[0])
    a = [list(row) for row in a]
    reflections = []
    for k in range(min(columns, rows - 1)):
        x = [a[i][k] for i in range(k, rows)]
        x[0] += math.copysign(math.sqrt(sum(value * value for value in x)), x[0])
        length = sum(value * value for value in x)
        reflections.append((k, x, length))
        reflect(a, k, x, length)
    q = [[float(i == j) for j in range(columns)] for i in range(rows)]
    for k, x, length in reversed(reflections):
        reflect(q, k, x, length)
    return q


def reflect(a, k, x, length):
    for j in range(len(a[0])):
        share = 2 * sum(x[i] * a[k + i][j] for i in range(len(x))) / length
        for i in range(len(x)):
            a[k + i][j] -= share * x[i]


def svd(w):
    u, s, vh = torch.linalg.svd(torch.tensor(w, dtype=torch.float64), full_matrices=False)
    return u.tolist(), s.tolist(), vh.tolist()


def composed(u, s, vh):
    return product([[u[i][k] * s[k] for k in range(len(s))] for i in range(len(u))], vh)


# --- the formulas, for one matrix w (list of rows), the partner's p, and a generator ----------------------------------


def naive_drop(w, _, g):
    rows, columns = len(w), len(w[0])
    number = math.floor(0.5 * columns)
    chosen = torch.randperm(columns, generator=g)[:number].tolist()
    uniform = torch.rand(rows, number, generator=g, dtype=torch.float64).tolist()
    limit = math.sqrt(6 / (rows + number))
    made = [list(row) for row in w]
    for i in range(rows):
        for place, column in enumerate(chosen):
            made[i][column] = limit * (2 * uniform[i][place] - 1)
    return made


def naive_shuffle(w, _, g):
    order = torch.randperm(len(w[0]), generator=g).tolist()
    return [[row[j] for j in order] for row in w]


def naive_orthogonal(w, _, g):
    noisy = plus_noise(w, 0.1 * std(w), g)
    q = householder(noisy) if len(w) >= len(w[0]) else transpose(householder(transpose(noisy)))
    return [[value * frobenius(w) / frobenius(q) for value in row] for row in q]


def naive_svd_perturb(w, _, g):
    u, s, vh = svd(w)
    noise = seeds.normal((len(s),), 1.0, g, dtype=torch.float64).tolist()
    s = [max(value + value * 0.1 * z, 1e-8) for value, z in zip(s, noise, strict=True)]
    u = householder(plus_noise(u, 0.05, g))
    v = householder(plus_noise(transpose(vh), 0.05, g))
    return composed(u, s, transpose(v))


def naive_svd_mix(w, p, g):
    u, s, vh = svd(w)
    partner_u, _, partner_vh = svd(p)
    for k in torch.randperm(len(s), generator=g)[: math.floor(0.3 * len(s))].tolist():
        vh[k] = partner_vh[k]
        for i in range(len(u)):
            u[i][k] = partner_u[i][k]
    return composed(u, s, vh)


def naive_sparse_code_mix(w, p, g):
    rows = len(w)
    atoms = normal((rows, min(512, rows)), g)
    lengths = [math.sqrt(sum(row[k] ** 2 for row in atoms)) + 1e-8 for k in range(len(atoms[0]))]
    atoms = [[row[k] / lengths[k] for k in range(len(row))] for row in atoms]
    codes, others = naive_ista(w, atoms), naive_ista(p, atoms)
    for k in torch.randperm(len(codes), generator=g)[: math.floor(0.3 * len(codes))].tolist():
        codes[k] = others[k]
    return product(atoms, codes)


def naive_ista(w, atoms):
    back = transpose(atoms)
    step = 1 / (frobenius(product(back, atoms)) + 1e-8)
    shrink = step * 0.1 * frobenius(w) / len(w[0])
    codes = [[0.0] * len(w[0]) for _ in back]
    for _ in range(100):
        decoded = product(atoms, codes)
        error = [[decoded[i][j] - w[i][j] for j in range(len(w[0]))] for i in range(len(w))]
        slope = product(back, error)
        for k in range(len(codes)):
            for j in range(len(w[0])):
                moved = codes[k][j] - step * slope[k][j]
                codes[k][j] = math.copysign(max(abs(moved) - shrink, 0.0), moved)
    return codes


NAIVE = {
    "copy": lambda w, _, __: w,
    "random": lambda w, _, g: plus_noise([[0.0] * len(row) for row in w], std(w), g),
    "copy_noise": lambda w, _, g: plus_noise(w, 0.01 * std(w), g),
    "drop": naive_drop,
    "shuffle": naive_shuffle,
    "interpolate": lambda w, p, _: [
        [(a + b) / 2 for a, b in zip(x, y, strict=True)] for x, y in zip(w, p, strict=True)
    ],
    "orthogonal": naive_orthogonal,
    "scaled_copy": lambda w, _, __: [[0.95 * value for value in row] for row in w],
    "svd_perturb": naive_svd_perturb,
    "svd_mix": naive_svd_mix,
    "sparse_code_mix": naive_sparse_code_mix,
}


@pytest.mark.parametrize("name", EXPERT_OPERATORS)
def test_expert_operators(name):
    """fc1 is gate above up, as one matrix; fc2 is down; biases are no part of the paper's experts and stay."""
    source, partner = expert(0), expert(20)
    made, g = EXPERT_OPERATORS[name](source, partner, generator()), generator()
    stacked = [[*one.gate_ID.tolist(), *one.up_ID.tolist()] for one in (source, partner)]
    fc1 = NAIVE[name](*stacked, g)
    fc2 = NAIVE[name](source.down_DI.tolist(), partner.down_DI.tolist(), g)
    expected = (fc1[:I], fc1[I:], fc2)
    for found, wanted in zip((made.gate_ID, made.up_ID, made.down_DI), expected, strict=True):
        torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64), rtol=0, atol=1e-12)
    assert made.up_bias_I is not None
    assert source.up_bias_I is not None
    assert torch.equal(made.up_bias_I, torch.zeros(I).double() if name == "random" else source.up_bias_I)


def test_partners():
    """`interpolate` takes the next expert, and after the last the first; the mixes any, the source itself included."""
    assert [EXPERT_OPERATORS["interpolate"].partner_of(source, E, generator()) for source in (0, E - 1)] == [1, 0]
    g = generator()
    for name in ("svd_mix", "sparse_code_mix"):
        assert {EXPERT_OPERATORS[name].partner_of(2, E, g) for _ in range(100)} == set(range(E))
    assert EXPERT_OPERATORS["shuffle"].partner_of(2, E, g) == 2


# --- router rows ------------------------------------------------------------------------------------------------------


def naive_router(name, w, sources, g):
    """The duplicates' rows."""
    rows, dimension = [w[source] for source in sources], len(w[0])
    mean = [sum(row[j] for row in w) / len(w) for j in range(dimension)]
    following = [w[(source + 1) % len(w)] for source in sources]

    def blend(others, share):
        return [
            [(1 - share) * a + share * b for a, b in zip(x, y, strict=True)] for x, y in zip(rows, others, strict=True)
        ]

    if name == "svd_perturb":
        perturbed = naive_svd_perturb(w, None, g)
        return [perturbed[source] for source in sources]
    if name == "orthogonal":
        return [
            naive_orthogonal_row(row, noise) for row, noise in zip(rows, normal((len(rows), dimension), g), strict=True)
        ]
    return {
        "copy": lambda: rows,
        "bias_only": lambda: rows,
        "copy_noise": lambda: plus_noise(rows, 0.01 * std(w), g),
        "perturb_new_only": lambda: plus_noise(rows, 0.02 * std(rows), g),
        "interpolate": lambda: blend(following, 0.5),
        "scaled_copy": lambda: blend([[0.0] * dimension] * len(rows), 0.05),
        "temperature_scaled": lambda: blend([[0.0] * dimension] * len(rows), 0.1),
        "adversarial": lambda: blend([mean] * len(rows), 0.1),
    }[name]()


def naive_orthogonal_row(row, noise):
    """The row plus noise, without what lies along the row, as long as the row: noise of any size gives the same."""
    moved = [a + 0.1 * z for a, z in zip(row, noise, strict=True)]
    along = sum(a * b for a, b in zip(moved, row, strict=True)) / sum(a * a for a in row)
    rest = [a - along * b for a, b in zip(moved, row, strict=True)]
    return [a * frobenius([row]) / frobenius([rest]) for a in rest]


@pytest.mark.parametrize("name", ROUTER_OPERATORS)
def test_router_operators(name):
    rows = draw(3, E, D)
    grown = grown_rows(rows, SOURCES, ROUTER_OPERATORS[name], generator())
    expected = naive_router(name, rows.tolist(), SOURCES[E:], generator())
    assert torch.equal(grown[:E], rows)
    torch.testing.assert_close(grown[E:], torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12)


# --- how far a duplicate is from its source ---------------------------------------------------------------------------


def change(made, w):
    return float(torch.linalg.matrix_norm(made - w) / torch.linalg.matrix_norm(w))


def test_perturb_new_only_moves_rows_by_two_percent():
    """Whatever the scale of the router: it was 0.02 absolute, which moved rows of standard deviation 0.02 by 1.01."""
    for scale in (0.02, 1.0):
        rows = scale * torch.randn(64, 256, generator=generator(), dtype=torch.float64)
        made = ROUTER_OPERATORS["perturb_new_only"](rows, torch.arange(64), generator())
        assert change(made, rows) == pytest.approx(0.02, rel=0.01)


def test_half_of_the_singular_pairs_change_sign():
    """So `svd_perturb` is as far from the source (the public code: 1.33, 1.42 for routers) as a random matrix."""
    w = torch.randn(48, 32, generator=generator(), dtype=torch.float64)
    g = generator()
    made = [change(EXPERT_OPERATORS["svd_perturb"].matrix(w, w, g), w) for _ in range(40)]
    assert 1.25 < sum(made) / len(made) < 1.5
