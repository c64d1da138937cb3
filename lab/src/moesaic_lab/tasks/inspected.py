"""Numbers of what `moesaic inspect` wrote: how far token clusters follow domains and documents."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from moesaic.analysis.format import read_inspection
from moesaic_lab.rows import Row


@dataclass(frozen=True, kw_only=True)
class Inspected:
    """Settings of the task."""

    inspection: str
    """Folder of `moesaic inspect`."""
    rows: str
    """File to write."""
    seed: int
    labels: dict[str, Any]


def run(settings: Inspected) -> Iterator[Row]:
    """Purity, mutual information with the domains, silhouette, and a document's share in its main cluster."""
    clustering = read_inspection(settings.inspection).clustering
    if clustering is None:
        return
    for measure in ("purity", "nmi", "silhouette", "concentration", "concentration_by_chance"):
        value = getattr(clustering, measure)
        if value is not None:
            yield {**settings.labels, "seed": settings.seed, "measure": f"cluster_{measure}", "value": value}
