"""The papers' claims that an experiment can speak to, and what its numbers say about each."""

from collections.abc import Mapping, Sequence

from moesaic_lab.claims import divmoe, emo, expand
from moesaic_lab.claims.claim import Claim, verdict
from moesaic_lab.rows import Row
from moesaic_lab.tables import Table, show

CLAIMS: Mapping[str, Sequence[Claim]] = {
    "divmoe": divmoe.CLAIMS,
    "emo": emo.CLAIMS,
    "expand": expand.CLAIMS,
    "life": (),
}
"""Experiment -> claims."""


def claims_table(experiment: str, rows: Sequence[Row]) -> Table:
    """A line per claim: what the paper says, what was measured, and the verdict."""
    body = []
    for claim in CLAIMS[experiment]:
        effect = claim.effect(rows)
        measured = f"{claim.figure}: {show(effect, 4)}" if effect is not None else "not measured in this run"
        body.append((f"{claim.says} ({claim.place})", measured, verdict(claim, effect)))
    return Table(
        title="Claims",
        note="Figures with 95% intervals over seeds, differences paired by seed, losses in nats per token. `seen`: the "
        "interval lies on the claim's side of 0; `opposite` (or `not seen`, where it has no opposite): on the other; "
        "`undecided`: it holds 0, or there is one seed. The figure of a claim over several models or domains is the "
        "least of theirs; both ends of its interval are the least of theirs too.",
        header=("the paper says", "measured", "verdict"),
        rows=tuple(body),
    )
