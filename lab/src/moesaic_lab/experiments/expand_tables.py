"""The tables of the experiment `expand`."""

from collections.abc import Sequence

from moesaic.common.intervals import GapClosure, Interval, gap_closure
from moesaic.expansion.costs import cpt_of_share, saving
from moesaic_lab.rows import Row
from moesaic_lab.tables import Table, difference, interval_of, label_values, seed_values, show, where


def tables(rows: Sequence[Row]) -> list[Table]:
    """Every table that there are numbers for."""
    final, first = where(rows, measure="loss"), where(rows, measure="first_loss")
    main = where(final, model="grown")
    sizes = label_values(main, "from")
    if not sizes:
        return []
    # The size that grows in every way and at every share; the others are there for the activation ratio.
    small = max(sizes, key=lambda size: len(label_values(where(main, **{"from": size}), "treatment")))
    grown, started = (where(some, model="grown", **{"from": small}) for some in (final, first))
    made = [
        _fixed(final),
        _jump(grown, started, where(final, model="before")),
        _losses(grown),
        _closure(grown, final, small),
        _pairs(grown),
        _ratios(final),
        _cost(rows, small, label_values(grown, "share")),
    ]
    return [table for table in made if table.rows]


def _fixed(final: Sequence[Row]) -> Table:
    body = []
    fixed = where(final, model="fixed")
    for experts in sorted(label_values(fixed, "experts")):
        body.append((str(experts), show(interval_of(where(fixed, experts=experts)), 4)))
    return Table(
        title="Fixed numbers of experts",
        note="Held-out loss in nats per token at the end, mean over the domains.",
        header=("experts", "loss"),
        rows=tuple(body),
    )


def _by_share(grown: Sequence[Row]) -> list[tuple[float, str]]:
    return [(share, f"{share:g} ({cpt_of_share(share):.0%})") for share in sorted(label_values(grown, "share"))]


def _jump(grown: Sequence[Row], started: Sequence[Row], before: Sequence[Row]) -> Table:
    treatments = label_values(grown, "treatment")
    body = []
    for share, shown in _by_share(grown):
        # Other sizes have a `before` of their own at some shares.
        mine = [row for row in where(before, share=share) if row["experts"] == grown[0]["from"]]
        cells = (
            show(difference(where(started, share=share, treatment=one), mine), 4) if mine else "" for one in treatments
        )
        body.append((shown, show(interval_of(mine), 4), *cells))
    return Table(
        title="Right after growing",
        note="Held-out loss just before, and how much higher it is just after, with no step between. Rows: tau/T, CPT.",
        header=("tau/T", "before", *treatments),
        rows=tuple(body),
    )


def _losses(grown: Sequence[Row]) -> Table:
    treatments = label_values(grown, "treatment")
    body = [
        (shown, *(show(interval_of(where(grown, share=share, treatment=one)), 4) for one in treatments))
        for share, shown in _by_share(grown)
    ]
    return Table(
        title="Grown models at the end",
        note="Held-out loss, mean over the domains, at the same total tokens as the fixed models.",
        header=("tau/T", *treatments),
        rows=tuple(body),
    )


def closure(grown: Sequence[Row], small: Sequence[Row], large: Sequence[Row]) -> GapClosure | None:
    """Gap closure over the seeds that all three have."""
    values = [seed_values(rows) for rows in (small, grown, large)]
    seeds = sorted(set.intersection(*(set(one) for one in values)))
    if not seeds:
        return None
    e, up, me = ([one[seed] for seed in seeds] for one in values)
    return gap_closure(e, up, me)


def _closure(grown: Sequence[Row], final: Sequence[Row], small: int) -> Table:
    fixed = where(final, model="fixed")
    e, me = where(fixed, experts=small), where(fixed, experts=grown[0]["experts"])
    treatments = label_values(grown, "treatment")
    gap = difference(e, me)
    body = []
    for share, shown in _by_share(grown):
        parts = (closure(where(grown, share=share, treatment=one), e, me) for one in treatments)
        body.append((shown, *(_show_closure(one) for one in parts)))
    return Table(
        title="Gap closure",
        note=f"(L_E - L_up) / (L_E - L_mE) with Fieller's 95% interval; the gap L_E - L_mE is {show(gap, 4)}. Printed "
        "only where the interval of the gap excludes 0.",
        header=("tau/T", *treatments),
        rows=tuple(body),
    )


def _show_closure(one: GapClosure | None) -> str:
    if one is None or one.closure is None:
        return "gap not seen"
    low, high = one.closure.low, one.closure.high
    assert low is not None
    assert high is not None
    return f"{one.closure.value:.0%} ({low:.0%} to {high:.0%})"


_PAIRS = (
    ("uniform", "gradient_norm"),
    ("random", "gradient_norm"),
    ("random", "uniform"),
    ("gradient_norm", "exact"),
)


def _pairs(grown: Sequence[Row]) -> Table:
    pairs = [pair for pair in _PAIRS if all(where(grown, treatment=one) for one in pair)]
    body = []
    for share, shown in _by_share(grown):
        cells = (
            _verdict(difference(*(where(grown, share=share, treatment=one) for one in pair)), pair) for pair in pairs
        )
        body.append((shown, *cells))
    return Table(
        title="One way of growing against another",
        note="Loss of the first minus loss of the second at the end, paired by seed; positive: the second is better.",
        header=("tau/T", *(f"{left} - {right}" for left, right in pairs)),
        rows=tuple(body),
    )


def _verdict(value: Interval | None, pair: tuple[str, str]) -> str:
    if value is None or not value.excludes_zero:
        return show(value, 4)
    return f"{show(value, 4)} ({pair[1] if value.value > 0 else pair[0]} is better)"


def _ratios(final: Sequence[Row]) -> Table:
    sparse = where(final, model="sparse")
    body = []
    for experts in sorted(label_values(sparse, "from")):
        own = where(sparse, **{"from": experts})
        share, many = own[0]["share"], own[0]["experts"]
        grown = where(final, model="grown", treatment="gradient_norm", share=share, **{"from": experts})
        fixed = (where(final, model="fixed", experts=number) for number in (experts, many))
        cells = (show(interval_of(rows), 4) for rows in (*fixed, grown, own))
        body.append((f"{own[0]['top_k']}/{many}", *cells))
    return Table(
        title="Activation ratio, and sparse upcycling from a dense model",
        note="Held-out loss at the end, all at the same total tokens; upcycled at half of them.",
        header=("active / all", "fixed E", "fixed 2E", "expert upcycling", "sparse upcycling"),
        rows=tuple(body),
    )


def _cost(rows: Sequence[Row], small: int, shares: Sequence[float]) -> Table:
    """Measured cost of a step, and what growing at each share saves by it."""
    seconds = where(rows, model="fixed", measure="seconds")
    few, many = (where(seconds, experts=number) for number in (small, 2 * small))
    if not (few and many):
        return Table(title="Cost", note="", header=(), rows=())
    ratio = sum(seed_values(few).values()) / sum(seed_values(many).values())
    body = tuple((f"{share:g}", f"{saving(share, ratio=ratio):.1%}") for share in sorted(shares))
    return Table(
        title="Cost",
        note=f"Share of the time of the fixed 2E run that growing saves, tau/T * (1 - s_E/s_mE), with s_E/s_mE = "
        f"{ratio:.3f} as measured on this machine (the paper's is 0.512).",
        header=("tau/T", "saved"),
        rows=body,
    )
