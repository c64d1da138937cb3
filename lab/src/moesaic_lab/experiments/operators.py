"""Expert Upcycling, appendix D: no operator that makes duplicates beats plain copies by more than 1e-3.

The small model of `expand`, grown at 80% of its steps (25% CPT) once for every operator, with everything else as
for `copy`: uniform copies, the same documents after it. One more grown model is `copy` with other noise on its
routers, which should end like `copy`: how far it does not is what these runs cannot tell apart.
"""

from collections.abc import Iterator, Mapping, Sequence

from moesaic_lab.claims import Claim, NotMeasuredError, Numbers, Premise, needing
from moesaic_lab.experiments.expand import Growing
from moesaic_lab.plan import Plan, Step
from moesaic_lab.results import Row, Table, difference, grid, interval_of, label_values, show, where
from moesaic_lab.runs import Command, experiment_plan, premise_step, train_step
from moesaic_lab.scale import Scale

NAME = "operators"
_SHARE = 0.8
_ONLY_ENDS = {"every_steps": None}
"""Held-out losses at the first and the last step: with some twenty models, curves would cost more than the training."""
_COPY, _AGAIN, _OURS = "copy", "copy-again", "expert-random"
_OTHER_NOISE = 1_000_000
"""Added to the seed of `copy-again`."""
_BOUND = 1e-3
"""Nats, from the paper."""


def plan(scale: Scale, data: str | None, seeds: int) -> Plan:
    """All steps of the experiment."""
    return experiment_plan(
        NAME,
        scale,
        data,
        parts={"expand": scale.expand},
        vocabulary=scale.expand.model.vocabulary,
        seeds=seeds,
        steps_of_seed=lambda domains, seed: _steps(scale, domains, seed),
    )


def _steps(scale: Scale, domains: Sequence[str], seed: int) -> Iterator[Step]:
    mine, experts = Growing(scale.expand, domains, seed), scale.expand.experts
    before = mine.before(experts, _SHARE)
    yield train_step(before)
    yield premise_step(before, domains, seed)
    yield mine.grown(before, experts, _SHARE, _options(scale, seed), validation=_ONLY_ENDS)


def _options(scale: Scale, seed: int) -> Mapping[str, Command]:
    """Of `expand`, by the name of the treatment, which says whose operator it is."""
    uniform = ("--utility", "uniform")
    return {
        _COPY: uniform,
        _AGAIN: (*uniform, "--seed", str(seed + _OTHER_NOISE)),
        **{f"expert-{name}": (*uniform, "--expert-op", name) for name in scale.expand.expert_ops},
        **{f"router-{name}": (*uniform, "--router-op", name) for name in scale.expand.router_ops},
    }


def tables(rows: Sequence[Row]) -> list[Table]:
    """One table, a line per operator."""
    grown = where(rows, model="grown")
    final, started = where(grown, measure="loss"), where(grown, measure="first_loss")
    copied, before = where(final, treatment=_COPY), where(rows, model="before", measure="loss")
    cells = {
        "rise at first": lambda name: show(difference(where(started, treatment=name), before), 4),
        "loss at the end": lambda name: show(interval_of(where(final, treatment=name)), 4),
        "better than copy by": lambda name: (
            "" if name == _COPY else show(difference(copied, where(final, treatment=name)), 4)
        ),
    }
    made = grid(
        title="Operators for duplicates",
        note="Held-out loss in nats per token, mean over the domains: just after growing minus just before; at the "
        "end; and how far below plain copies (positive: better than they), paired by seed. `copy-again` is `copy` with "
        "other noise on its routers. `expert-random` is ours.",
        corner="operator",
        down={str(name): name for name in label_values(final, "treatment")},
        across=cells,
        cell=lambda name, shown: shown(name),
    )
    return [made] if made.rows else []


def _better(n: Numbers, name: str) -> float:
    """How far the loss with an operator ends below that of plain copies."""
    copied, other = (n("loss", model="grown", treatment=one) for one in (_COPY, name))
    return copied - other


def _none_beats(kind: str) -> Claim:
    def effect(n: Numbers) -> list[float]:
        names = (str(name) for name in label_values(where(n.rows, model="grown"), "treatment"))
        found = [_BOUND - _better(n, name) for name in names if name.startswith(f"{kind}-") and name != _OURS]
        if not found:
            raise NotMeasuredError
        return found

    return Claim(
        says=f"no operator for {kind}s beats plain copies by more than {_BOUND:g} (appendix D)",
        figure=f"{_BOUND:g} minus what the best operator gains over copies",
        effect=effect,
    )


_RESOLVES = Premise(
    name="copies end alike",
    figure=f"{_BOUND:g} minus how far two models of plain copies, with other noise on their routers, end apart",
    effect=lambda n: _BOUND - abs(_better(n, _AGAIN)),
)
CLAIMS = needing(_RESOLVES, _none_beats("expert"), _none_beats("router"))
