"""Claims of DivMoE."""

from collections.abc import Sequence

from moesaic.common.intervals import Interval
from moesaic_lab.claims.claim import Claim, combine, less, smallest, within
from moesaic_lab.rows import Row
from moesaic_lab.tables import label_values, where

_BASELINES = ("sparse", "btx", "virtual_group", "drop")
_NEAR = 0.05
"""Nats per token that still count as preserved."""


def _end(rows: Sequence[Row], model: str) -> list[Row]:
    return where(rows, measure="loss", stage="joint", model=model)


def _start(rows: Sequence[Row], model: str) -> list[Row]:
    return where(rows, measure="first_loss", stage="joint", model=model)


def _over(model: str):
    """How much lower DivMoE's loss is than that of one model."""
    return lambda rows: less(_end(rows, "divmoe"), _end(rows, model))


def _over_all(models: Sequence[str]):
    return lambda rows: smallest([less(_end(rows, "divmoe"), _end(rows, model)) for model in models])


def _collapse(model: str):
    """Where a fine method ends between its coarse variant (0) and training from scratch (1), less a half."""

    def effect(rows: Sequence[Row]) -> Interval | None:
        parts = (_end(rows, name) for name in (model, "drop", "scratch"))
        return combine(lambda fine, coarse, scratch: (fine - coarse) / (scratch - coarse) - 0.5, *parts)

    return effect


def _in_every_domain(rows: Sequence[Row]) -> Interval | None:
    ours, free = _end(rows, "divmoe"), _end(rows, "divmoe_topk")
    domains = label_values(ours, "domain")
    return smallest([less(where(ours, domain=one), where(free, domain=one)) for one in domains])


def _preserved(model: str):
    def effect(rows: Sequence[Row]) -> Interval | None:
        return within(_NEAR, _start(rows, model), where(rows, measure="loss", stage="dense", model="base"))

    return effect


def _health(measure: str, higher: str, lower: str):
    def effect(rows: Sequence[Row]) -> Interval | None:
        parts = (where(rows, measure=measure, stage="joint", model=model) for model in (lower, higher))
        return less(*parts)

    return effect


CLAIMS = (
    Claim(
        says="DivMoE is better than every other upcycling method",
        place="tables 2, 3, 11, 12",
        figure="loss of the best of sparse, BTX, NVIDIA and Drop, minus DivMoE's",
        effect=_over_all(_BASELINES),
    ),
    Claim(
        says="DivMoE is better than the dense model trained on the same data",
        place="section 4.2, table 11",
        figure="loss of dense minus DivMoE's",
        effect=_over("dense"),
    ),
    Claim(
        says="fine-grained Drop-Upcycling collapses to training from scratch, coarse does not",
        place="sections 1 and 4.2",
        figure="place of Drop-fine (exact scale) between coarse (0) and from scratch (1), minus 0.5",
        effect=_collapse("drop_fine"),
        otherwise="not seen",
    ),
    Claim(
        says="the same, with the scale of equation 5",
        place="sections 1 and 4.2",
        figure="place of Drop-fine (paper's scale) between coarse (0) and from scratch (1), minus 0.5",
        effect=_collapse("drop_fine_paper_scale"),
        otherwise="not seen",
    ),
    Claim(
        says="without the diversity constraint it is worse",
        place="table 5",
        figure="loss without the constraint minus with it",
        effect=_over("divmoe_topk"),
    ),
    Claim(
        says="the constraint helps in every domain",
        place="table 6",
        figure="the same in the domain where it is smallest",
        effect=_in_every_domain,
    ),
    Claim(
        says="without fine-grained experts (BTX) it is worse",
        place="table 5",
        figure="loss of BTX minus DivMoE's",
        effect=_over("btx"),
    ),
    Claim(
        says="without domain experts (NVIDIA upcycling) it is worse",
        place="table 5",
        figure="loss of virtual groups minus DivMoE's",
        effect=_over("virtual_group"),
    ),
    Claim(
        says="shards of different specialists preserve the base's output at first",
        place="section 3.1, equation 4",
        figure=f"{_NEAR} minus the rise of the loss over the base's at step 0, Latin square and exact scale",
        effect=_preserved("divmoe"),
        otherwise="not seen",
    ),
    Claim(
        says="the same as published: random router, equation 5",
        place="section 3.1, equations 4 and 5",
        figure=f"{_NEAR} minus the rise of the loss over the base's at step 0",
        effect=_preserved("divmoe_as_published"),
        otherwise="not seen",
    ),
    Claim(
        says="m = k = 2 is better than 1 and 4",
        place="section 5.3, table 18",
        figure="the better loss of m = 1 and m = 4, minus that of m = 2",
        effect=_over_all(("divmoe_m1", "divmoe_m4")),
    ),
    Claim(
        says="the mean over base and specialists is the best start for the other weights",
        place="appendix E, table 14",
        figure="the better loss of base and random specialist, minus that of the mean",
        effect=_over_all(("divmoe_base_weights", "divmoe_random_weights")),
    ),
    Claim(
        says="sparse upcycling's routing collapses, DivMoE's is balanced",
        place="section 5.2, figure 3",
        figure="load entropy of DivMoE minus that of sparse upcycling, last step",
        effect=_health("load_entropy", "divmoe", "sparse"),
    ),
    Claim(
        says="without the constraint routing is less balanced",
        place="section 5.2, figure 3",
        figure="load entropy of DivMoE minus that without the constraint, last step",
        effect=_health("load_entropy", "divmoe", "divmoe_topk"),
    ),
)
