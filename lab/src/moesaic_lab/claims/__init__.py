"""The papers' claims that an experiment can speak to, and what its numbers say about each."""

from collections.abc import Mapping, Sequence

from moesaic_lab.claims import divmoe, emo, expand, life
from moesaic_lab.claims.claim import Claim, verdict
from moesaic_lab.rows import Row
from moesaic_lab.tables import Table, show

CLAIMS: Mapping[str, Sequence[Claim]] = {
    "divmoe": divmoe.CLAIMS,
    "emo": emo.CLAIMS,
    "expand": expand.CLAIMS,
    "life": life.CLAIMS,
}
"""Experiment -> claims."""


def premises_table(experiment: str, rows: Sequence[Row]) -> Table:
    """What has to be so before the claims can be judged, and whether it is."""
    premises = dict.fromkeys(premise for claim in CLAIMS[experiment] for premise in claim.premises)
    body = [
        (one.name, f"{one.figure}: {show(one.effect(rows), 4) or 'not measured'}", "yes" if one.holds(rows) else "no")
        for one in premises
    ]
    return Table(
        title="Premises",
        note="A claim about large models can show here only where these figures are above 0, with their 95% intervals "
        "over seeds. Where the premise of a claim does not hold, the claim is `not testable here`.",
        header=("premise", "measured", "holds"),
        rows=tuple(body),
    )


def claims_table(experiment: str, rows: Sequence[Row]) -> Table:
    """A line per claim: what the paper says, whether it can be judged, what was measured, and the verdict."""
    body = []
    for claim in CLAIMS[experiment]:
        effect = claim.effect(rows)
        measured = f"{claim.figure}: {show(effect, 4)}" if effect is not None else "not measured in this run"
        failed = [premise.name for premise in claim.premises if not premise.holds(rows)]
        premise = f"fails: {', '.join(failed)}" if failed else "holds"
        body.append((f"{claim.says} ({claim.place})", premise, measured, verdict(claim, rows)))
    return Table(
        title="Claims",
        note="Figures with 95% intervals over seeds, differences paired by seed, losses in nats per token. `seen`: the "
        "interval lies on the claim's side of 0; `opposite` (or `not seen`, where it has no opposite): on the other; "
        "`undecided`: it holds 0, or there is one seed; `not testable here`: a premise does not hold. The figure of a "
        "claim over several models or domains is the least of theirs; both ends of its interval are the least of "
        "theirs too.",
        header=("the paper says", "premise", "measured", "verdict"),
        rows=tuple(body),
    )
