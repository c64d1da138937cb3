"""Router rows and selection biases of a grown layer. E experts before, N after, D hidden."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from moesaic.common.seeds import normal
from moesaic.expansion.operators import RouterOperator, RouterRows


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
    noise_ND = normal((len(sources), *shape), delta, generator)
    noise_ND[[not duplicate for duplicate in duplicates_of(sources)]] = 0
    return noise_ND


def zero_sum_noise(
    sources: Sequence[int], shape: Sequence[int], delta: float, generator: torch.Generator
) -> Float[Tensor, "N *D"]:
    """Noise of standard deviation delta that adds up to zero over each expert and its copies; none without copies.

    So the mean of a copy group's logits is the source's logit whatever the noise, and log-mean-exp is in first order.
    """
    noise_ND = normal((len(sources), *shape), delta, generator)
    members = torch.tensor(sources)
    for source in set(sources):
        group = members == source
        count = int(group.sum())
        part = noise_ND[group] - noise_ND[group].mean(0)
        noise_ND[group] = part * (count / max(count - 1, 1)) ** 0.5  # centring takes 1/count of the variance
    return noise_ND
