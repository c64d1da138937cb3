"""Claims of Expert Upcycling."""

from collections.abc import Sequence

from moesaic.common.intervals import Interval
from moesaic_lab.claims.claim import REGIME, Claim, Effect, Premise, combine, less, within
from moesaic_lab.rows import Row
from moesaic_lab.tables import label_values, where

_BOUND = 0.01
"""Of the loss at the expansion, from the paper."""
_OPEN = 0.1
"""Share of the gap to fixed 2E that may stay open where it counts as closed."""


def _small(rows: Sequence[Row]) -> int:
    """E of the main comparison: the size that grows in every way."""
    grown = where(rows, measure="loss", model="grown")
    sizes = label_values(grown, "from")
    return max(sizes, key=lambda size: len(label_values(where(grown, **{"from": size}), "treatment")), default=0)


def _grown(rows: Sequence[Row], treatment: str, share: float, *, experts: int | None = None) -> list[Row]:
    size = _small(rows) if experts is None else experts
    return where(rows, measure="loss", model="grown", treatment=treatment, share=share, **{"from": size})


def _fixed(rows: Sequence[Row], experts: int) -> list[Row]:
    return where(rows, measure="loss", model="fixed", experts=experts)


def _jump(treatment: str, share: float = 0.5) -> Effect:
    """The paper's bound minus the rise of the loss at the expansion."""

    def effect(rows: Sequence[Row]) -> Interval | None:
        size = _small(rows)
        labels = {"model": "grown", "treatment": treatment, "share": share, "from": size}
        before = where(rows, measure="loss", model="before", share=share, experts=size)
        return within(_BOUND, where(rows, measure="first_loss", **labels), before)

    return effect


def _warm(rows: Sequence[Row]) -> Interval | None:
    size = _small(rows)
    cold = where(rows, measure="first_loss", model="fixed", experts=2 * size)
    labels = {"model": "grown", "treatment": "gradient_norm", "share": 0.5, "from": size}
    return less(where(rows, measure="first_loss", **labels), cold)


def _better(one: str, other: str, share: float) -> Effect:
    return lambda rows: less(_grown(rows, one, share), _grown(rows, other, share))


def _closes(share: float) -> Effect:
    """How far less than a tenth of the gap is left."""

    def effect(rows: Sequence[Row]) -> Interval | None:
        few, many = _fixed(rows, _small(rows)), _fixed(rows, 2 * _small(rows))
        return combine(lambda e, me, up: _OPEN * (e - me) - (up - me), few, many, _grown(rows, "gradient_norm", share))

    return effect


def _gap(rows: Sequence[Row]) -> Interval | None:
    return less(_fixed(rows, 2 * _small(rows)), _fixed(rows, _small(rows)))


_WITH_GAP = (
    *REGIME,
    Premise(name="twice the experts are better", figure="L_E - L_2E", effect=_gap),
)


def _sparse(rows: Sequence[Row], experts: int) -> list[Row]:
    return where(rows, measure="loss", model="sparse", **{"from": experts})


def _sparse_is_worse(rows: Sequence[Row]) -> Interval | None:
    size = _small(rows)
    return less(_fixed(rows, size), _sparse(rows, size))


def _widens(rows: Sequence[Row]) -> Interval | None:
    sizes = label_values(where(rows, model="sparse"), "from")
    if len(sizes) < 2:
        return None
    parts = [
        part(rows)
        for size in (max(sizes), min(sizes))
        for part in (
            lambda rows, size=size: _sparse(rows, size),
            lambda rows, size=size: _grown(rows, "gradient_norm", 0.5, experts=size),
        )
    ]
    return combine(lambda sparse, ours, sparse_few, ours_few: (sparse - ours) - (sparse_few - ours_few), *parts)


CLAIMS = (
    Claim(
        says="more experts at the same active size are better (there is a gap to close)",
        place="section 1",
        figure="L_E - L_mE",
        effect=_gap,
    ),
    Claim(
        says="the grown model starts far below a random one (1.38 against 10.5)",
        place="section 5.1",
        figure="first loss of fixed 2E minus first loss after growing at tau/T = 0.5",
        effect=_warm,
    ),
    Claim(
        says="the loss rises by less than 0.01 at the expansion",
        place="section 3",
        figure="0.01 minus the rise, plain routing, tau/T = 0.5",
        effect=_jump("gradient_norm"),
        otherwise="not seen",
    ),
    Claim(
        says="the same for our exact routing, which the paper calls unavailable",
        place="section 3",
        figure="0.01 minus the rise, one_per_copy_group, tau/T = 0.5",
        effect=_jump("exact"),
        otherwise="not seen",
    ),
    Claim(
        says="at 100% CPT the gap to fixed 2E is closed",
        place="section 5.1, abstract",
        figure=f"{_OPEN} (L_E - L_2E) minus (L_grown - L_2E), tau/T = 0.5",
        effect=_closes(0.5),
        otherwise="not seen",
        premises=_WITH_GAP,
    ),
    Claim(
        says="at 50% CPT too",
        place="section 5.1",
        figure=f"{_OPEN} (L_E - L_2E) minus (L_grown - L_2E), tau/T = 0.67",
        effect=_closes(0.67),
        otherwise="not seen",
        premises=_WITH_GAP,
    ),
    Claim(
        says="more CPT closes more of the gap (34.7% at 10% to 98.0% at 100%)",
        place="section 5.2.1",
        figure="loss at tau/T = 0.91 minus loss at 0.5",
        effect=lambda rows: less(_grown(rows, "gradient_norm", 0.5), _grown(rows, "gradient_norm", 0.91)),
        premises=_WITH_GAP,
    ),
    Claim(
        says="choosing by utility is better than uniform at 25% CPT (26.5% against 8.2%)",
        place="section 5.2.2",
        figure="loss of uniform minus loss of gradient norm, tau/T = 0.8",
        effect=_better("gradient_norm", "uniform", 0.8),
        premises=_WITH_GAP,
    ),
    Claim(
        says="the same at 100% CPT",
        place="section 5.2.2",
        figure="loss of uniform minus loss of gradient norm, tau/T = 0.5",
        effect=_better("gradient_norm", "uniform", 0.5),
        premises=_WITH_GAP,
    ),
    Claim(
        says="copies chosen by utility are better than random initialisation at 25% CPT",
        place="section 5.2.2",
        figure="loss of random minus loss of gradient norm, tau/T = 0.8",
        effect=_better("gradient_norm", "random", 0.8),
        premises=_WITH_GAP,
    ),
    Claim(
        says="(ours) uniform copies are better than random duplicates of the same experts",
        place="section 5.2.2",
        figure="loss of random minus loss of uniform, tau/T = 0.8",
        effect=_better("uniform", "random", 0.8),
        premises=_WITH_GAP,
    ),
    Claim(
        says="(ours) the exact expansion ends better than the plain one at 10% CPT",
        place="methods.md, section 3",
        figure="loss of plain minus loss of exact, tau/T = 0.91",
        effect=_better("exact", "gradient_norm", 0.91),
        premises=_WITH_GAP,
    ),
    Claim(
        says="sparse upcycling from a dense model does not reach fixed E",
        place="section 5.2.3",
        figure="loss of sparse upcycling minus loss of fixed E",
        effect=_sparse_is_worse,
    ),
    Claim(
        says="its disadvantage widens at lower activation ratios",
        place="section 5.2.3",
        figure="sparse minus expert upcycling at the lowest ratio, minus the same at the highest",
        effect=_widens,
    ),
)
