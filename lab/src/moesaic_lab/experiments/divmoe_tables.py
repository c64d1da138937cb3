"""The tables of the experiment `divmoe`."""

from collections.abc import Sequence

from moesaic_lab.rows import Row
from moesaic_lab.tables import Table, difference, interval_of, label_values, pivot, show, where

_MAIN = ("dense", "scratch", "sparse", "btx", "virtual_group", "drop", "drop_fine", "divmoe", "divmoe_topk")
_ABLATIONS = (
    ("granularity", "divmoe_m1", "m = k = 1"),
    ("granularity", "divmoe", "m = k = 2"),
    ("granularity", "divmoe_m4", "m = k = 4"),
    ("weights outside the experts", "divmoe", "mean"),
    ("weights outside the experts", "divmoe_base_weights", "base"),
    ("weights outside the experts", "divmoe_random_weights", "random specialist"),
    ("scale and router", "divmoe", "exact, Latin square"),
    ("scale and router", "divmoe_random_router", "exact, random"),
    ("scale and router", "divmoe_paper_scale", "paper, Latin square"),
    ("scale and router", "divmoe_as_published", "paper, random"),
)


def tables(rows: Sequence[Row]) -> list[Table]:
    """Every table that there are numbers for."""
    final = where(rows, measure="loss", stage="joint")
    first = where(rows, measure="first_loss", stage="joint")
    made = [
        pivot(
            where(rows, measure="loss", stage="dense"),
            title="Before: the dense base and its specialists",
            note="Held-out loss in nats per token.",
            down=("model",),
            across="domain",
            mean="mean",
        ),
        pivot(
            _ordered(final),
            title="After the joint stage",
            note="Held-out loss in nats per token; all models with the same active size, tokens, optimizer and steps.",
            down=("model",),
            across="domain",
            mean="mean",
        ),
        _against(final, first),
        _ablations(final, first),
        pivot(
            _ordered(where(rows, measure="accuracy")),
            title="Accuracy on held-out questions",
            note="Share of multiple-choice questions whose right answer has the lowest loss per byte.",
            down=("model",),
            across="domain",
            mean="mean",
        ),
        _health(rows),
    ]
    return [table for table in made if table.rows]


def _ordered(rows: Sequence[Row]) -> list[Row]:
    """Rows of the main methods first."""
    order = {name: number for number, name in enumerate(_MAIN)}
    return sorted(rows, key=lambda row: order.get(row["model"], len(order)))


def _against(final: Sequence[Row], first: Sequence[Row]) -> Table:
    dense, ours = where(final, model="dense"), where(final, model="divmoe")
    body = []
    for model in label_values(_ordered(final), "model"):
        mine = where(final, model=model)
        cells = (
            interval_of(where(first, model=model)),
            interval_of(mine),
            difference(mine, dense),
            difference(mine, ours) if ours else None,
        )
        body.append((model, *map(show, cells)))
    return Table(
        title="Step 0 and the end",
        note="Held-out loss before the first step of the joint stage and after the last, mean over the domains; "
        "differences are paired by seed, negative is better.",
        header=("model", "step 0", "end", "end - dense", "end - divmoe"),
        rows=tuple(body),
    )


def _ablations(final: Sequence[Row], first: Sequence[Row]) -> Table:
    body = []
    for about, model, shown in _ABLATIONS:
        if mine := where(final, model=model):
            own = (interval_of(where(first, model=model)), interval_of(mine))
            less = None if model == "divmoe" else difference(mine, where(final, model="divmoe"))
            body.append((about, shown, *map(show, own), show(less)))
    return Table(
        title="Ablations of DivMoE",
        note="Held-out loss, mean over the domains; the last column is paired by seed, negative: better than default.",
        header=("of", "setting", "step 0", "end", "end - default"),
        rows=tuple(body),
    )


def _health(rows: Sequence[Row]) -> Table:
    joint = where(rows, stage="joint")
    routed = where(joint, measure="load_entropy")
    body = []
    for model in label_values(_ordered(routed), "model"):
        mine = where(joint, model=model)
        cells = (
            show(interval_of(where(mine, measure=measure)), digits)
            for measure, digits in (("load_entropy", 3), ("largest_share", 3), ("dead_experts", 1), ("spikes", 1))
        )
        body.append((model, *cells))
    return Table(
        title="Routing health",
        note="Entropy of the experts' load over log E (1 is even), largest share of a layer's selections that one "
        "expert took and experts without any, in the last step; steps with a gradient norm over 5 times the median, "
        "after the first tenth of the steps.",
        header=("model", "load entropy", "largest share", "unused experts", "spikes"),
        rows=tuple(body),
    )
