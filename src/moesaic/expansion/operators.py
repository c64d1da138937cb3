"""What a duplicate starts from: eleven operators for experts, ten for router rows; and the noise on copies.

Expert Upcycling, appendix D, as the paper's public code has them (amazon-science/expert-upcycling d42f7c6), written
from the formulas and with its constants; `random` is ours. An expert is two matrices there, fc1 (gate and up
together, gate first) and fc2 (down), and each is drawn and scaled by itself. docs/peers.md says where ours still
differ. All are pure: they compute in the dtype of their input and draw from the generator only. The paper's own
finding is that none beats `copy` by more than 1e-3 in validation loss.

D hidden, I intermediate, E experts of the layer, N of the grown layer, M duplicates; fc1 is (2I, D), fc2 (D, I).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from moesaic.common import seeds
from moesaic.families.experts import ExpertWeights

# --- experts ----------------------------------------------------------------------------------------------------------

MatrixOperator = Callable[[Tensor, Tensor, torch.Generator], Tensor]
"""(fc1 or fc2 of the source, the same of its partner, generator) -> that of the duplicate."""


@dataclass(frozen=True, kw_only=True)
class ExpertOperator:
    """How a duplicate is made of its source."""

    matrix: MatrixOperator
    """Of fc1, then of fc2."""
    partner: Literal["next", "any"] | None = None
    """Another expert of the layer that it looks at: the next one (after the last comes the first), or any, drawn
    uniformly, the source itself included; None: it looks at the source alone."""
    biases: Literal["source", "zero"] = "source"

    def partner_of(self, source: int, experts: int, generator: torch.Generator) -> int:
        """The expert that it looks at besides `source`."""
        if self.partner == "next":
            return (source + 1) % experts
        return int(torch.randint(experts, (1,), generator=generator)) if self.partner == "any" else source

    def __call__(self, source: ExpertWeights, partner: ExpertWeights, generator: torch.Generator) -> ExpertWeights:
        """The duplicate."""
        fc1 = self.matrix(_fc1(source), _fc1(partner), generator)
        gate_ID, up_ID = fc1.split(source.intermediate)
        made = replace(
            source, gate_ID=gate_ID, up_ID=up_ID, down_DI=self.matrix(source.down_DI, partner.down_DI, generator)
        )
        if self.biases == "source":
            return made
        return made.map(lambda name, value: torch.zeros_like(value) if "bias" in name else value)


def _fc1(expert: ExpertWeights) -> Tensor:
    return torch.cat([expert.gate_ID, expert.up_ID])


def copy_matrix(w: Tensor, _partner: Tensor, _generator: torch.Generator) -> Tensor:
    """The source's: same function."""
    return w


def random_matrix(w: Tensor, _partner: Tensor, generator: torch.Generator) -> Tensor:
    """Fresh N(0, std of the replaced matrix): the baseline. Preserves the scale only."""
    return _noise(w, _std(w), generator)


def add_noise(w: Tensor, _partner: Tensor, generator: torch.Generator, *, ratio: float) -> Tensor:
    """Plus noise of `ratio` times the standard deviation of all entries."""
    return w + _noise(w, ratio * _std(w), generator)


def redraw_columns(w: Tensor, _partner: Tensor, generator: torch.Generator, *, ratio: float) -> Tensor:
    """A share of the columns anew, by Xavier's uniform rule for a matrix of the size of what is redrawn.

    Its scale follows from that size alone, so it is far from the source's where that was trained to be small.
    """
    rows, columns = w.shape
    chosen = torch.randperm(columns, generator=generator)[: int(ratio * columns)]
    limit = math.sqrt(6 / (rows + len(chosen)))
    drawn = torch.rand(rows, len(chosen), generator=generator, dtype=w.dtype) * (2 * limit) - limit
    return w.index_copy(1, chosen, drawn)


def shuffle_columns(w: Tensor, _partner: Tensor, generator: torch.Generator) -> Tensor:
    """All columns in another order, another one for fc1 and for fc2. Preserves entries, norm and spectrum."""
    return w[:, torch.randperm(w.shape[1], generator=generator)]


def lerp_matrix(w: Tensor, partner: Tensor, _generator: torch.Generator, *, share: float) -> Tensor:
    """`1 - share` of the source and `share` of the partner."""
    return torch.lerp(w, partner, share)


def orthogonalise(w: Tensor, _partner: Tensor, generator: torch.Generator, *, ratio: float) -> Tensor:
    """The orthonormal factor of (w + noise), scaled to w's Frobenius norm: same norm, flat spectrum."""
    noisy = w + _noise(w, ratio * _std(w), generator)
    wide = w.shape[0] < w.shape[1]
    q = torch.linalg.qr(noisy.T if wide else noisy).Q
    return (q.T if wide else q) * (torch.linalg.matrix_norm(w) / torch.linalg.matrix_norm(q))


def scale_matrix(w: Tensor, _partner: Tensor, _generator: torch.Generator, *, factor: float) -> Tensor:
    """Times `factor`: same directions and ratios of singular values."""
    return w * factor


def perturb_svd(
    w: Tensor, _partner: Tensor, generator: torch.Generator, *, values: float = 0.1, vectors: float = 0.05
) -> Tensor:
    """Noise on singular values (`values` times each) and on singular vectors (`vectors`), these made orthonormal again.

    The factor Q of a QR decomposition is that of Householder's method, whose columns come out with either sign: about
    half of the singular pairs are negated, and the result is as far from the source as a random matrix.
    """
    u, s, vh = torch.linalg.svd(w, full_matrices=False)
    s = (s * (1 + _noise(s, values, generator))).clamp_min(1e-8)
    u = torch.linalg.qr(u + _noise(u, vectors, generator)).Q
    v = torch.linalg.qr(vh.T + _noise(vh.T, vectors, generator)).Q
    return (u * s) @ v.T


def mix_svd(w: Tensor, partner: Tensor, generator: torch.Generator, *, share: float) -> Tensor:
    """A random share of the pairs of singular vectors are the partner's of the same rank; all values stay."""
    u, s, vh = torch.linalg.svd(w, full_matrices=False)
    partner_u, _, partner_vh = torch.linalg.svd(partner, full_matrices=False)
    taken = torch.randperm(len(s), generator=generator)[: int(share * len(s))]
    u = u.index_copy(1, taken, partner_u[:, taken])
    vh = vh.index_copy(0, taken, partner_vh[taken])
    return (u * s) @ vh


def mix_sparse_codes(
    w: Tensor, partner: Tensor, generator: torch.Generator, *, atoms: int, sparsity: float, share: float, steps: int
) -> Tensor:
    """Code both in a random dictionary, take a random share of the atoms' codes from the partner, and decode.

    The dictionary has at most `atoms` unit columns as long as those of w. The codes are what `steps` of ISTA reach for
    `||dictionary @ codes - w||^2 / 2 + l ||codes||_1`, l being `sparsity * ||w||_F / columns`; the step is the inverse
    of the Frobenius norm of the Gram matrix. It is short, so the source does not come back even without mixing.
    """
    rows = w.shape[0]
    dictionary = seeds.normal((rows, min(atoms, rows)), 1.0, generator, dtype=w.dtype)
    dictionary = dictionary / (torch.linalg.vector_norm(dictionary, dim=0) + 1e-8)
    codes, partner_codes = (_sparse_codes(one, dictionary, sparsity, steps) for one in (w, partner))
    taken = torch.randperm(len(codes), generator=generator)[: int(share * len(codes))]
    return dictionary @ codes.index_copy(0, taken, partner_codes[taken])


def _sparse_codes(w: Tensor, dictionary: Tensor, sparsity: float, steps: int) -> Tensor:
    gram, target = dictionary.T @ dictionary, dictionary.T @ w
    step = 1 / (torch.linalg.matrix_norm(gram) + 1e-8)
    threshold = step * sparsity * torch.linalg.matrix_norm(w) / w.shape[1]
    codes = torch.zeros_like(target)
    for _ in range(steps):
        codes = codes - step * (gram @ codes - target)
        codes = codes.sign() * (codes.abs() - threshold).clamp_min(0)
    return codes


def _noise(like: Tensor, std: float, generator: torch.Generator) -> Tensor:
    """Draws N(0, std) in the shape and dtype of `like`."""
    return std * seeds.normal(like.shape, 1.0, generator, dtype=like.dtype)


def _std(w: Tensor) -> float:
    """Standard deviation of all entries, the unbiased one."""
    return w.std().item()


EXPERT_OPERATORS: dict[str, ExpertOperator] = {
    "copy": ExpertOperator(matrix=copy_matrix),
    "random": ExpertOperator(matrix=random_matrix, biases="zero"),
    "copy_noise": ExpertOperator(matrix=partial(add_noise, ratio=0.01)),
    "drop": ExpertOperator(matrix=partial(redraw_columns, ratio=0.5)),
    "shuffle": ExpertOperator(matrix=shuffle_columns),
    "interpolate": ExpertOperator(matrix=partial(lerp_matrix, share=0.5), partner="next"),
    "orthogonal": ExpertOperator(matrix=partial(orthogonalise, ratio=0.1)),
    "scaled_copy": ExpertOperator(matrix=partial(scale_matrix, factor=0.95)),
    "svd_perturb": ExpertOperator(matrix=perturb_svd),
    "svd_mix": ExpertOperator(matrix=partial(mix_svd, share=0.3), partner="any"),
    "sparse_code_mix": ExpertOperator(
        matrix=partial(mix_sparse_codes, atoms=512, sparsity=0.1, share=0.3, steps=100), partner="any"
    ),
}


# --- router rows ------------------------------------------------------------------------------------------------------

RouterOperator = Callable[[Float[Tensor, "E D"], Int64[Tensor, " M"], torch.Generator], Float[Tensor, "M D"]]
"""(rows of the layer, source of each duplicate, generator) -> the duplicates' rows."""


def copy_rows(rows_ED: Tensor, sources_M: Tensor, _generator: torch.Generator) -> Tensor:
    """The source's row: equal logits."""
    return rows_ED[sources_M]


def rows_noise(rows_ED: Tensor, sources_M: Tensor, generator: torch.Generator, *, ratio: float) -> Tensor:
    """The rows plus noise of `ratio` times the standard deviation of the whole router."""
    rows_MD = rows_ED[sources_M]
    return rows_MD + _noise(rows_MD, ratio * _std(rows_ED), generator)


def rows_perturb_new(rows_ED: Tensor, sources_M: Tensor, generator: torch.Generator, *, ratio: float) -> Tensor:
    """The rows plus noise of `ratio` times the standard deviation of the duplicates' own rows."""
    rows_MD = rows_ED[sources_M]
    return rows_MD + _noise(rows_MD, ratio * _std(rows_MD), generator)


def rows_interpolate(rows_ED: Tensor, sources_M: Tensor, _generator: torch.Generator, *, share: float) -> Tensor:
    """`1 - share` of the row and `share` of the next expert's; after the last comes the first."""
    return torch.lerp(rows_ED[sources_M], rows_ED[(sources_M + 1) % len(rows_ED)], share)


def rows_scaled(rows_ED: Tensor, sources_M: Tensor, _generator: torch.Generator, *, factor: float) -> Tensor:
    """The rows times `factor`: the same direction; below 1 the duplicate's logits are nearer to 0."""
    return rows_ED[sources_M] * factor


def rows_orthogonal(rows_ED: Tensor, sources_M: Tensor, generator: torch.Generator) -> Tensor:
    """For each a random direction orthogonal to the source's row, of its norm.

    The public code adds noise to the row and takes the row out again, which leaves the noise.
    """
    rows_MD = rows_ED[sources_M]
    draws_MD = _noise(rows_MD, 1.0, generator)
    norms_M1 = torch.linalg.vector_norm(rows_MD, dim=1, keepdim=True)
    units_MD = rows_MD / norms_M1.clamp_min(torch.finfo(rows_ED.dtype).tiny)
    rest_MD = draws_MD - (draws_MD * units_MD).sum(1, keepdim=True) * units_MD
    return rest_MD * (norms_M1 / torch.linalg.vector_norm(rest_MD, dim=1, keepdim=True))


def rows_adversarial(rows_ED: Tensor, sources_M: Tensor, _generator: torch.Generator, *, share: float) -> Tensor:
    """The row minus `share` of its difference from the mean row: nearer to what all experts have in common."""
    rows_MD = rows_ED[sources_M]
    return rows_MD - share * (rows_MD - rows_ED.mean(0))


def rows_svd_perturb(rows_ED: Tensor, sources_M: Tensor, generator: torch.Generator) -> Tensor:
    """Rows of the whole router perturbed once as `perturb_svd` does it: copies of one expert have equal rows."""
    return perturb_svd(rows_ED, rows_ED, generator)[sources_M]


ROUTER_OPERATORS: dict[str, RouterOperator] = {
    "copy": copy_rows,
    "copy_noise": partial(rows_noise, ratio=0.01),
    "interpolate": partial(rows_interpolate, share=0.5),
    "bias_only": copy_rows,  # the difference is in the selection bias, which `expand` adds to every duplicate
    "scaled_copy": partial(rows_scaled, factor=0.95),
    "perturb_new_only": partial(rows_perturb_new, ratio=0.02),
    "orthogonal": rows_orthogonal,
    "adversarial": partial(rows_adversarial, share=0.1),
    "temperature_scaled": partial(rows_scaled, factor=0.9),
    "svd_perturb": rows_svd_perturb,
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
    sources_N, duplicate_N = torch.tensor(sources), torch.tensor(duplicates_of(sources))
    rows_ND = rows_ED[sources_N]
    rows_ND[duplicate_N] = operator(rows_ED, sources_N[duplicate_N], generator)
    return rows_ND


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
