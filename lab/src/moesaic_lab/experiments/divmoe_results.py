"""The tables and claims of the experiment `divmoe`."""

from collections.abc import Sequence

from moesaic_lab.claims import Claim, Effect, Numbers
from moesaic_lab.results import Row, Table, by_model, difference, interval_of, label_values, pivot, show, where

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
_HEALTH = {
    "load entropy": ("load_entropy", 3),
    "largest share": ("largest_share", 3),
    "unused experts": ("dead_experts", 1),
    "spikes": ("spikes", 1),
}


def tables(rows: Sequence[Row]) -> list[Table]:
    """Every table that there are numbers for."""
    final = _ordered(where(rows, measure="loss", stage="joint"))
    first = where(rows, measure="first_loss", stage="joint")
    made = [
        pivot(
            where(rows, measure="loss", stage="dense"),
            title="Before: the dense base and its specialists",
            note="Held-out loss in nats per token.",
        ),
        pivot(
            final,
            title="After the joint stage",
            note="Held-out loss in nats per token; all models with the same tokens, optimizer and steps, and all but "
            "`btx`, whose tokens use two whole FFNs, with the same active size.",
        ),
        _against(final, first),
        _ablations(final, first),
        pivot(
            _ordered(where(rows, measure="accuracy")),
            title="Accuracy on held-out questions",
            note="Share of multiple-choice questions whose right answer has the lowest loss per byte.",
        ),
        by_model(
            _ordered(where(rows, stage="joint")),
            title="Routing health",
            note="Entropy of the experts' load over log E (1 is even), largest share of a layer's selections that one "
            "expert took and experts without any, in the last step; steps with a gradient norm over 5 times the "
            "median, after the first tenth of the steps.",
            columns=_HEALTH,
            first="load_entropy",
        ),
    ]
    return [table for table in made if table.rows]


def _ordered(rows: Sequence[Row]) -> list[Row]:
    """Rows of the main methods first."""
    order = {name: number for number, name in enumerate(_MAIN)}
    return sorted(rows, key=lambda row: order.get(row["model"], len(order)))


def _against(final: Sequence[Row], first: Sequence[Row]) -> Table:
    dense, ours = where(final, model="dense"), where(final, model="divmoe")
    body = []
    for model in label_values(final, "model"):
        mine = where(final, model=model)
        losses = (interval_of(where(first, model=model)), interval_of(mine))
        body.append((model, *map(show, (*losses, difference(mine, dense), difference(mine, ours) if ours else None))))
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
            body.append((about, shown, *map(show, (*own, less))))
    return Table(
        title="Ablations of DivMoE",
        note="Held-out loss, mean over the domains; the last column is paired by seed, negative: better than default.",
        header=("of", "setting", "step 0", "end", "end - default"),
        rows=tuple(body),
    )


_BASELINES = ("sparse", "btx", "virtual_group", "drop")
_NEAR = 0.05
"""Nats per token that still count as preserved."""


def _end(numbers: Numbers, model: str, **labels: str) -> float:
    return numbers("loss", stage="joint", model=model, **labels)


def _over(*models: str) -> Effect:
    """How much lower DivMoE's loss is than that of each model."""
    return lambda n: [_end(n, model) - _end(n, "divmoe") for model in models]


def _collapse(model: str) -> Effect:
    """Where a fine method ends between its coarse variant (0) and training from scratch (1), less a half."""
    return lambda n: (_end(n, model) - _end(n, "drop")) / (_end(n, "scratch") - _end(n, "drop")) - 0.5


def _in_every_domain(n: Numbers) -> list[float]:
    domains = label_values(where(n.rows, stage="joint", model="divmoe"), "domain")
    return [_end(n, "divmoe_topk", domain=one) - _end(n, "divmoe", domain=one) for one in domains]


def _preserved(model: str) -> Effect:
    def effect(n: Numbers) -> float:
        rise = n("first_loss", stage="joint", model=model) - n("loss", stage="dense", model="base")
        return _NEAR - rise

    return effect


def _more_even_than(model: str) -> Effect:
    def entropy(n: Numbers, model: str) -> float:
        return n("load_entropy", stage="joint", model=model)

    return lambda n: entropy(n, "divmoe") - entropy(n, model)


CLAIMS = (
    Claim(
        says="DivMoE is better than every other upcycling method (tables 2, 3, 11, 12)",
        figure="loss of the best of sparse, BTX, NVIDIA and Drop, minus DivMoE's",
        effect=_over(*_BASELINES),
    ),
    Claim(
        says="DivMoE is better than the dense model trained on the same data (section 4.2, table 11)",
        figure="loss of dense minus DivMoE's",
        effect=_over("dense"),
    ),
    Claim(
        says="fine-grained Drop-Upcycling collapses to training from scratch, coarse does not (sections 1 and 4.2)",
        figure="place of Drop-fine (exact scale) between coarse (0) and from scratch (1), minus 0.5",
        effect=_collapse("drop_fine"),
        otherwise="not seen",
    ),
    Claim(
        says="the same, with the scale of equation 5 (sections 1 and 4.2)",
        figure="place of Drop-fine (paper's scale) between coarse (0) and from scratch (1), minus 0.5",
        effect=_collapse("drop_fine_paper_scale"),
        otherwise="not seen",
    ),
    Claim(
        says="without the diversity constraint it is worse (table 5)",
        figure="loss without the constraint minus with it",
        effect=_over("divmoe_topk"),
    ),
    Claim(
        says="the constraint helps in every domain (table 6)",
        figure="the same in the domain where it is smallest",
        effect=_in_every_domain,
    ),
    Claim(
        says="without fine-grained experts (BTX) it is worse (table 5)",
        figure="loss of BTX minus DivMoE's",
        effect=_over("btx"),
    ),
    Claim(
        says="(ours) so it is against a BTX of the same active size, one whole FFN a token (table 5)",
        figure="loss of BTX with K = 1 minus DivMoE's",
        effect=_over("btx_top1"),
    ),
    Claim(
        says="without domain experts (NVIDIA upcycling) it is worse (table 5)",
        figure="loss of virtual groups minus DivMoE's",
        effect=_over("virtual_group"),
    ),
    Claim(
        says="(ours) an MoE from one dense model ends below that model on as many tokens (section 4.2)",
        figure="loss of dense minus that of virtual groups",
        effect=lambda n: _end(n, "dense") - _end(n, "virtual_group"),
    ),
    Claim(
        says="shards of different specialists preserve the base's output at first (section 3.1, equation 4)",
        figure=f"{_NEAR} minus the rise of the loss over the base's at step 0, Latin square and exact scale",
        effect=_preserved("divmoe"),
        otherwise="not seen",
    ),
    Claim(
        says="the same as published: random router, equation 5 (section 3.1, equations 4 and 5)",
        figure=f"{_NEAR} minus the rise of the loss over the base's at step 0",
        effect=_preserved("divmoe_as_published"),
        otherwise="not seen",
    ),
    Claim(
        says="m = k = 2 is better than 1 and 4 (section 5.3, table 18)",
        figure="the better loss of m = 1 and m = 4, minus that of m = 2",
        effect=_over("divmoe_m1", "divmoe_m4"),
    ),
    Claim(
        says="the mean over base and specialists is the best start for the other weights (appendix E, table 14)",
        figure="the better loss of base and random specialist, minus that of the mean",
        effect=_over("divmoe_base_weights", "divmoe_random_weights"),
    ),
    Claim(
        says="sparse upcycling's routing collapses, DivMoE's is balanced (section 5.2, figure 3)",
        figure="load entropy of DivMoE minus that of sparse upcycling, last step",
        effect=_more_even_than("sparse"),
    ),
    Claim(
        says="without the constraint routing is less balanced (section 5.2, figure 3)",
        figure="load entropy of DivMoE minus that without the constraint, last step",
        effect=_more_even_than("divmoe_topk"),
    ),
)
