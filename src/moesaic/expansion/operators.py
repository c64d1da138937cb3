"""What a duplicate starts from: eleven operators for experts, ten for router rows; and the noise on copies.

Expert Upcycling, appendix D, names its heuristics without giving them; apart from `copy` and `random` these are
reconstructions, and their docstrings say what each preserves. All are pure: they compute in the dtype of their input
and draw from the generator only. The paper's own finding is that none beats `copy` by more than 1e-3 in validation
loss.

D hidden, I intermediate, E experts of the layer, N of the grown layer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from moesaic.common import seeds
from moesaic.families.experts import ExpertWeights, redraw

# --- experts ----------------------------------------------------------------------------------------------------------

ExpertOperator = Callable[[ExpertWeights, ExpertWeights, torch.Generator], ExpertWeights]
"""(source, another expert of the layer, generator) -> the duplicate."""

MATRICES = frozenset({"gate_ID", "up_ID", "down_DI"})


def copy_expert(source: ExpertWeights, _other: ExpertWeights, _generator: torch.Generator) -> ExpertWeights:
    """The source itself: same function."""
    return source


def random_expert(source: ExpertWeights, _other: ExpertWeights, generator: torch.Generator) -> ExpertWeights:
    """Fresh weights N(0, std of the replaced matrix), biases zero: the baseline. Preserves the scale only."""

    def draw(name: str, value: Tensor) -> Tensor:
        std = value.std(correction=0).item() if name in MATRICES else 0.0
        return seeds.normal(value.shape, std, generator, dtype=value.dtype)

    return source.map(draw)


def copy_noise(
    source: ExpertWeights, _other: ExpertWeights, generator: torch.Generator, *, ratio: float
) -> ExpertWeights:
    """The copy plus noise of `ratio` times each matrix's standard deviation."""
    return _matrices(source, lambda w: w + seeds.normal(w.shape, ratio * _std(w), generator, dtype=w.dtype))


def drop_neurons(
    source: ExpertWeights, _other: ExpertWeights, generator: torch.Generator, *, ratio: float
) -> ExpertWeights:
    """Re-draw a share of the intermediate neurons, the same in gate, up and down; the others stay bit for bit."""
    chosen = seeds.subset(round(ratio * source.intermediate), source.intermediate, generator)

    def redrawn(_name: str, w: Tensor, axis: int) -> Tensor:
        w = w.clone()
        if len(chosen):
            redraw(w, chosen, axis, generator)
        return w

    return _neurons(source, redrawn)


def shuffle(source: ExpertWeights, _other: ExpertWeights, generator: torch.Generator, *, ratio: float) -> ExpertWeights:
    """Permute a share of the rows of `up` alone: other pairs of gate and up, so another function.

    Permuting gate, up and down alike would change nothing. Preserves every matrix's entries, norm and spectrum.
    """
    chosen = seeds.subset(round(ratio * source.intermediate), source.intermediate, generator)
    order = torch.arange(source.intermediate)
    order[chosen] = chosen.roll(1)  # a cycle moves every chosen row

    def permute(name: str, value: Tensor) -> Tensor:
        return value[order] if name in {"up_ID", "up_bias_I"} else value

    return source.map(permute)


def interpolate(
    source: ExpertWeights, other: ExpertWeights, _generator: torch.Generator, *, share: float
) -> ExpertWeights:
    """`1 - share` of the source and `share` of another expert."""
    return source.map(lambda name, w: torch.lerp(w, getattr(other, name), share))


def orthogonal(
    source: ExpertWeights, _other: ExpertWeights, generator: torch.Generator, *, ratio: float
) -> ExpertWeights:
    """The orthonormal factor of (w + noise), scaled to w's Frobenius norm: same norm, flat spectrum."""

    def flatten(w: Tensor) -> Tensor:
        noisy = w + seeds.normal(w.shape, ratio * _std(w), generator, dtype=w.dtype)
        tall = noisy if w.shape[0] >= w.shape[1] else noisy.T
        q = torch.linalg.qr(tall).Q
        q = q if w.shape[0] >= w.shape[1] else q.T
        return q * (torch.linalg.matrix_norm(w) / torch.linalg.matrix_norm(q))

    return _matrices(source, flatten)


def scaled_copy(
    source: ExpertWeights, _other: ExpertWeights, _generator: torch.Generator, *, factor: float
) -> ExpertWeights:
    """Every matrix times `factor`: same directions and ratios of singular values."""
    return _matrices(source, lambda w: w * factor)


def svd_perturb(
    source: ExpertWeights, _other: ExpertWeights, generator: torch.Generator, *, ratio: float
) -> ExpertWeights:
    """Singular values times (1 + ratio * noise): the singular vectors stay."""

    def perturb(w: Tensor) -> Tensor:
        u, s, v = torch.linalg.svd(w, full_matrices=False)
        return (u * (s * (1 + seeds.normal(s.shape, ratio, generator, dtype=w.dtype)))) @ v

    return _matrices(source, perturb)


def svd_mix(source: ExpertWeights, other: ExpertWeights, generator: torch.Generator, *, share: float) -> ExpertWeights:
    """A random share of the singular pairs replaced by another expert's pairs of the same rank; the others stay."""

    def mix(name: str, w: Tensor) -> Tensor:
        if name not in MATRICES:
            return w
        u, s, v = torch.linalg.svd(w, full_matrices=False)
        other_u, other_s, other_v = torch.linalg.svd(getattr(other, name), full_matrices=False)
        taken = torch.zeros_like(s)
        taken[seeds.subset(round(share * len(s)), len(s), generator)] = 1
        return (u * (s * (1 - taken))) @ v + (other_u * (other_s * taken)) @ other_v

    return source.map(mix)


def sparse_code_mix(
    source: ExpertWeights, other: ExpertWeights, generator: torch.Generator, *, share: float
) -> ExpertWeights:
    """A random share of the neurons (row of gate, row of up, column of down) taken whole from another expert."""
    chosen = seeds.subset(round(share * source.intermediate), source.intermediate, generator)
    return _neurons(
        source,
        lambda name, w, axis: w.index_copy(axis, chosen, getattr(other, name).index_select(axis, chosen)),
    )


def _std(w: Tensor) -> float:
    return w.std(correction=0).item()


def _matrices(source: ExpertWeights, function: Callable[[Tensor], Tensor]) -> ExpertWeights:
    """Apply to gate, up and down; biases stay."""
    return source.map(lambda name, value: function(value) if name in MATRICES else value)


def _neurons(source: ExpertWeights, function: Callable[[str, Tensor, int], Tensor]) -> ExpertWeights:
    """Apply `function(field, tensor, axis of the neurons)`; the output bias belongs to no neuron and stays."""
    columns = {"down_DI": 1}
    return source.map(lambda name, w: w if name == "down_bias_D" else function(name, w, columns.get(name, 0)))


EXPERT_OPERATORS: dict[str, ExpertOperator] = {
    "copy": copy_expert,
    "random": random_expert,
    "copy_noise": partial(copy_noise, ratio=0.01),
    "drop": partial(drop_neurons, ratio=0.5),
    "shuffle": partial(shuffle, ratio=0.5),
    "interpolate": partial(interpolate, share=0.5),
    "orthogonal": partial(orthogonal, ratio=0.1),
    "scaled_copy": partial(scaled_copy, factor=0.95),
    "svd_perturb": partial(svd_perturb, ratio=0.1),
    "svd_mix": partial(svd_mix, share=0.3),
    "sparse_code_mix": partial(sparse_code_mix, share=0.3),
}


# --- router rows ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RouterRows:
    """What a router operator may use: the layer's rows and the source's index."""

    rows_ED: Float[Tensor, "E D"]
    source: int

    @property
    def row_D(self) -> Tensor:
        """The source's row."""
        return self.rows_ED[self.source]


RouterOperator = Callable[[RouterRows, torch.Generator], Tensor]
"""(rows, generator) -> the duplicate's row (D,)."""


def copy_row(rows: RouterRows, _generator: torch.Generator) -> Tensor:
    """The source's row: equal logits."""
    return rows.row_D


def row_noise(rows: RouterRows, generator: torch.Generator, *, ratio: float) -> Tensor:
    """The row plus noise of `ratio` times its standard deviation."""
    return row_perturb(rows, generator, std=ratio * _std(rows.row_D))


def row_interpolate(rows: RouterRows, generator: torch.Generator, *, share: float) -> Tensor:
    """`1 - share` of the row and `share` of another expert's, drawn at random."""
    other = int(torch.randint(len(rows.rows_ED) - 1, (1,), generator=generator)) if len(rows.rows_ED) > 1 else 0
    return torch.lerp(rows.row_D, rows.rows_ED[other + (other >= rows.source and len(rows.rows_ED) > 1)], share)


def row_perturb(rows: RouterRows, generator: torch.Generator, *, std: float) -> Tensor:
    """The row plus noise of absolute standard deviation `std`."""
    return rows.row_D + seeds.normal(rows.row_D.shape, std, generator, dtype=rows.row_D.dtype)


def row_scaled(rows: RouterRows, _generator: torch.Generator, *, factor: float) -> Tensor:
    """The row times `factor`: the same direction; below 1 the duplicate's logits are nearer to 0."""
    return rows.row_D * factor


def row_orthogonal(rows: RouterRows, generator: torch.Generator) -> Tensor:
    """A random direction orthogonal to the row, of the row's norm."""
    draw = seeds.normal(rows.row_D.shape, 1.0, generator, dtype=rows.row_D.dtype)
    norm = torch.linalg.vector_norm(rows.row_D)
    unit = rows.row_D / norm.clamp(min=torch.finfo(draw.dtype).tiny)
    rest = draw - (draw @ unit) * unit
    return rest * (norm / torch.linalg.vector_norm(rest))


def row_adversarial(rows: RouterRows, _generator: torch.Generator, *, share: float) -> Tensor:
    """The row minus `share` of its difference from the mean row: nearer to what all experts have in common."""
    return rows.row_D - share * (rows.row_D - rows.rows_ED.mean(0))


def row_svd_perturb(rows: RouterRows, generator: torch.Generator, *, ratio: float) -> Tensor:
    """The row of the router matrix with its singular values times (1 + ratio * noise)."""
    u, s, v = torch.linalg.svd(rows.rows_ED, full_matrices=False)
    return (u[rows.source] * (s * (1 + seeds.normal(s.shape, ratio, generator, dtype=s.dtype)))) @ v


ROUTER_OPERATORS: dict[str, RouterOperator] = {
    "copy": copy_row,
    "copy_noise": partial(row_noise, ratio=0.01),
    "interpolate": partial(row_interpolate, share=0.5),
    "bias_only": copy_row,  # the difference is in the selection bias, which `expand` adds to every duplicate
    "scaled_copy": partial(row_scaled, factor=0.95),
    "perturb_new_only": partial(row_perturb, std=0.02),
    "orthogonal": row_orthogonal,
    "adversarial": partial(row_adversarial, share=0.1),
    "temperature_scaled": partial(row_scaled, factor=0.9),
    "svd_perturb": partial(row_svd_perturb, ratio=0.1),
}


# --- a grown layer ----------------------------------------------------------------------------------------------------


def duplicates_of(sources: Sequence[int]) -> list[bool]:
    """Which experts of the grown layer are copies: of each source, all but the first."""
    seen: set[int] = set()
    return [source in seen or seen.add(source) is not None for source in sources]


def grown_rows(
    rows_ED: Float[Tensor, "E D"], sources: Sequence[int], operator: RouterOperator, generator: torch.Generator
) -> Float[Tensor, "N D"]:
    """The router's rows: originals as they are, duplicates by the operator."""
    return torch.stack(
        [
            operator(RouterRows(rows_ED=rows_ED, source=source), generator) if duplicate else rows_ED[source]
            for source, duplicate in zip(sources, duplicates_of(sources), strict=True)
        ]
    )


def duplicate_noise(
    sources: Sequence[int], shape: Sequence[int], delta: float, generator: torch.Generator
) -> Float[Tensor, "N *D"]:
    """Noise N(0, delta) for every duplicate, zeros for every original; `shape` is that of one slot."""
    noise_ND = seeds.normal((len(sources), *shape), delta, generator)
    noise_ND[[not duplicate for duplicate in duplicates_of(sources)]] = 0
    return noise_ND


def zero_sum_noise(
    sources: Sequence[int], shape: Sequence[int], delta: float, generator: torch.Generator
) -> Float[Tensor, "N *D"]:
    """Noise of standard deviation delta that adds up to zero over each expert and its copies; none without copies.

    So the mean of a copy group's logits is the source's logit whatever the noise, and log-mean-exp is in first order.
    """
    noise_ND = seeds.normal((len(sources), *shape), delta, generator)
    members = torch.tensor(sources)
    for source in set(sources):
        group = members == source
        count = int(group.sum())
        part = noise_ND[group] - noise_ND[group].mean(0)
        noise_ND[group] = part * (count / max(count - 1, 1)) ** 0.5  # centring takes 1/count of the variance
    return noise_ND
