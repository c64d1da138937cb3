"""The table of the experiment `life`."""

from collections.abc import Sequence
from statistics import fmean

from moesaic_lab.rows import Row
from moesaic_lab.tables import Table, interval_of, label_values, show, where


def tables(rows: Sequence[Row]) -> list[Table]:
    """Loss and size after every step of the way."""
    measured, sizes = where(rows, measure="measured_loss"), where(rows, measure="parameters")
    domains = label_values(measured, "domain")
    models = sorted(label_values(measured, "model"), key=lambda name: where(measured, model=name)[0]["order"])
    body = []
    for model in models:
        mine = where(measured, model=model)
        losses = (show(interval_of(where(mine, domain=domain))) for domain in domains)
        size = fmean(row["value"] for row in where(sizes, model=model))
        body.append((model, f"{size:,.0f}", *losses, show(interval_of(mine))))
    table = Table(
        title="A model's life",
        note="Parameters, and held-out loss in nats per token after every step of the way, and of the short way: the "
        "dense base trained on as many tokens.",
        header=("model", "parameters", *domains, "mean"),
        rows=tuple(body),
    )
    return [table] if body else []
