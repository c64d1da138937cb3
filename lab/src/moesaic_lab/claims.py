"""Claims as numbers that are above 0 where they hold, the premises that they need, and the verdicts. No torch."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Literal

from moesaic.common.intervals import Interval, mean_interval
from moesaic_lab.results import Row, Table, label_values, show, where

Verdict = Literal["seen", "not seen", "opposite", "undecided", "not testable here", "not measured"]


class NotMeasuredError(Exception):
    """A number that a claim needs is not there."""


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """The numbers of one seed."""

    rows: Sequence[Row]

    def __call__(self, measure: str, **labels: Any) -> float:
        """The mean over everything that the labels leave open. Raises `NotMeasuredError` where there is nothing."""
        found = where(self.rows, measure=measure, **labels)
        if not found:
            raise NotMeasuredError
        return fmean(row["value"] for row in found)


Effect = Callable[[Numbers], float | Sequence[float]]
"""A figure of one seed; several, where a claim is about all of several models or domains."""


def interval(effect: Effect, rows: Sequence[Row]) -> Interval | None:
    """A figure's mean over the seeds that have all of its numbers, and its interval; None without such a seed."""
    figures = []
    for seed in sorted(label_values(rows, "seed")):
        try:
            found = effect(Numbers(rows=where(rows, seed=seed)))
        except NotMeasuredError:
            continue
        figures.append(found if isinstance(found, Sequence) else (found,))
    return smallest([mean_interval(list(part)) for part in zip(*figures, strict=True)])


def smallest(parts: Sequence[Interval]) -> Interval | None:
    """The least of several figures, for a claim that all of them are above 0; None without any.

    Its ends are the least low and the least high end: above 0 where every part is, below where one is. Parts without an
    interval leave it without one, unless another part is below 0: the parts with intervals then decide.
    """
    if not parts:
        return None
    ends = [(part.value, part.low, part.high) for part in parts if part.low is not None and part.high is not None]
    if len(ends) < len(parts) and not any(high < 0 for _, _, high in ends):
        return Interval(value=min(part.value for part in parts), low=None, high=None)
    value, low, high = map(min, zip(*ends, strict=True))
    return Interval(value=value, low=low, high=high)


@dataclass(frozen=True, kw_only=True)
class Premise:
    """What must be so before a claim can be judged."""

    name: str
    figure: str
    """What `effect` is, in words."""
    effect: Effect
    """A figure that is above 0 where the premise holds."""

    def holds(self, rows: Sequence[Row]) -> bool:
        """Whether its interval is above 0; with one seed, whether its value is."""
        found = interval(self.effect, rows)
        return found is not None and (found.value if found.low is None else found.low) > 0

    def said(self, rows: Sequence[Row]) -> str:
        """The premise in a cell: its name, its figure, and whether it holds."""
        return f"{self.name} {show(interval(self.effect, rows)) or '?'} ({'holds' if self.holds(rows) else 'fails'})"


_OVER_BIGRAM, _WORTH_OF_FFNS = 0.3, 2.5
"""Nats per token. A model that had learnt little more than pairs of words, and whose FFNs were worth 1.5, said the
opposite of what models say that are trained on 80 tokens per parameter; SmolLM2-135M's FFNs are worth 24.6."""
REGIME = (
    Premise(
        name="more than bigrams",
        figure=f"loss of a bigram model with backoff minus the model's, less {_OVER_BIGRAM}",
        effect=lambda n: n("bigram_loss") - n("premise_loss") - _OVER_BIGRAM,
    ),
    Premise(
        name="FFNs worth something",
        figure=f"what the model loses without its FFNs, less {_WORTH_OF_FFNS}",
        effect=lambda n: n("without_ffns_loss") - n("premise_loss") - _WORTH_OF_FFNS,
    ),
)
"""Premises of every claim: at a few tokens per parameter there is nothing in the FFNs to preserve or to specialise."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One claim of a paper."""

    says: str
    """With the section, table or figure."""
    figure: str
    """What `effect` is, in words."""
    effect: Effect
    """A figure that is above 0 where the claim holds."""
    otherwise: Literal["opposite", "not seen"] = "opposite"
    """The verdict where the figure is below 0."""
    premises: tuple[Premise, ...] = REGIME

    def verdict(self, rows: Sequence[Row]) -> Verdict:
        """What the figure's interval says about the claim, where its premises hold."""
        testable = all(premise.holds(rows) for premise in self.premises)
        return verdict(interval(self.effect, rows), testable=testable, otherwise=self.otherwise)


def verdict(
    found: Interval | None, *, testable: bool = True, otherwise: Literal["opposite", "not seen"] = "opposite"
) -> Verdict:
    """What an interval says about a claim that it is above 0."""
    if found is None:
        return "not measured"
    if not testable:
        return "not testable here"
    if found.low is None or not found.excludes_zero:
        return "undecided"
    return "seen" if found.low > 0 else otherwise


def needing(premise: Premise, *claims: Claim) -> tuple[Claim, ...]:
    """The claims with one more premise."""
    return tuple(replace(claim, premises=(*claim.premises, premise)) for claim in claims)


def premises_table(claims: Iterable[Claim], rows: Sequence[Row]) -> Table:
    """What has to be so before the claims can be judged, and whether it is."""
    premises = dict.fromkeys(premise for claim in claims for premise in claim.premises)
    body = []
    for one in premises:
        measured = show(interval(one.effect, rows), 4) or "not measured"
        body.append((one.name, f"{one.figure}: {measured}", "yes" if one.holds(rows) else "no"))
    return Table(
        title="Premises",
        note="A claim about large models can show here only where these figures are above 0, with their 95% intervals "
        "over seeds. Where the premise of a claim does not hold, the claim is `not testable here`.",
        header=("premise", "measured", "holds"),
        rows=tuple(body),
    )


def claims_table(claims: Iterable[Claim], rows: Sequence[Row]) -> Table:
    """A line per claim: what the paper says, whether it can be judged, what was measured, and the verdict."""
    body = []
    for claim in claims:
        premise = ", ".join(one.said(rows) for one in claim.premises)
        measured = show(interval(claim.effect, rows), 4)
        body.append((claim.says, claim.figure, premise, measured, claim.verdict(rows)))
    return Table(
        title="Claims",
        note="Figures with 95% intervals over seeds, differences paired by seed, losses in nats per token. `seen`: the "
        "interval lies on the claim's side of 0; `opposite` (or `not seen`, where it has no opposite): on the other; "
        "`undecided`: it holds 0, or there is one seed; `not testable here`: a premise does not hold. The figure of a "
        "claim over several models or domains is the least of theirs; both ends of its interval are the least of "
        "theirs too.",
        header=("the paper says", "figure (above 0: it holds)", "premise", "measured", "verdict"),
        rows=tuple(body),
    )
