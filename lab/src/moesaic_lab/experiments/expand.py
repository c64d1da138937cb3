"""Expert Upcycling (sections 3 to 5): E experts, mE experts, and E that become mE on the way, at matched tokens.

The learning rate falls linearly to zero in every run, so a run can be cut in two without bending its schedule: the part
before the expansion ends at the rate that the part after starts from. A warmup cannot be cut so: an expansion comes at
its end at the earliest. The optimizer starts anew after it (the paper's choice), and the part after draws its data with
another seed, so that it does not begin with the same documents again.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from moesaic_lab.plan import Plan, Step, train_file
from moesaic_lab.runs import Command, Repetition, Run, dense_config, experiment_plan, premise_step, train_step
from moesaic_lab.scale import ExpandScale, Scale, TrainScale, Treatment

NAME = "expand"
_GROWTH = 2
_RATIO_SHARE = 0.5
"""tau/T of the comparison over activation ratios."""
_UTILITY_SEQUENCES = 8
_LOSSES = {"bias_balancing": 0.001}
"""Loss-free balancing, which the paper credits with driving copies apart, at the rate of arXiv 2408.15664."""


def plan(scale: Scale, data: str | None, seeds: int) -> Plan:
    """All steps of the experiment."""
    return experiment_plan(
        NAME,
        scale,
        data,
        parts={NAME: scale.expand},
        vocabulary=scale.expand.model.vocabulary,
        seeds=seeds,
        steps_of_seed=lambda domains, seed: Growing(scale.expand, domains, seed).steps(),
        notices=_notices(scale.expand),
    )


def size(scale: Scale) -> tuple[int, int]:
    """Active parameters of a model, and the tokens that it sees."""
    expand = scale.expand
    return expand.model.active_parameters(expand.expert_size * expand.top_k), expand.train.whole_tokens


def _warmup(train: TrainScale) -> int:
    return min(train.warmup_steps, train.steps - 1)


def _after_warmup(share: float, train: TrainScale) -> float:
    """The share, or the smallest one in whole percents that holds the warmup."""
    total, warmup = train.steps, _warmup(train)
    return share if round(share * total) >= warmup else math.ceil(100 * warmup / total) / 100


def _notices(scale: ExpandScale) -> tuple[str, ...]:
    train = scale.train
    moved = {share: _after_warmup(share, train) for share in scale.shares}
    early = [share for share, later in moved.items() if later != share]
    if not early:
        return ()
    return (
        f"shares: {', '.join(f'{share:g}' for share in early)} of {train.steps} steps would end within the warmup "
        f"of {_warmup(train)}: the expansion comes at its end, {moved[early[0]]:g}; fewer warmup_steps allow it",
    )


class Growing:
    """The steps of one seed."""

    def __init__(self, scale: ExpandScale, domains: Sequence[str], seed: int) -> None:
        self.scale, self.mine = scale, Repetition(shape=scale.model, domains=domains, seed=seed)
        self.total, self.warmup = scale.train.steps, _warmup(scale.train)
        self.last = ("--seed", str(seed), "--overwrite", "--quiet")

    def steps(self) -> Iterator[Step]:
        """Fixed sizes; then, for every share, the small model so far and everything that grows from it."""
        scale = self.scale
        for size in sorted({size for e in (scale.experts, *scale.other_experts) for size in (e, _GROWTH * e)}):
            yield train_step(self._fixed(size))
        yield premise_step(self._fixed(scale.experts), self.mine.domains, self.mine.seed)
        for share in dict.fromkeys(_after_warmup(share, scale.train) for share in scale.shares):
            yield from self._growing(scale.experts, share, scale.treatments)
        if scale.other_experts:
            share = _after_warmup(_RATIO_SHARE, scale.train)
            for experts in scale.other_experts:
                yield from self._growing(experts, share, scale.treatments[:1])
            yield from self._sparse(share)

    def _moe(self, experts: int) -> dict[str, Any]:
        scale = self.scale
        moe = {"experts": experts, "top_k": scale.top_k, "intermediate_size": scale.expert_size}
        config = dense_config(scale.model, scale.expert_size)
        return {"family": "llama", "config": config, "moe": {**moe, "layers": scale.moe_layers}}

    def _fixed(self, experts: int) -> Run:
        labels = {"model": "fixed", "experts": experts}
        optimizer = {"schedule": "linear", "min_lr": 0.0}
        train = self.scale.train
        return self.mine.run(
            f"fixed-{experts}", self._moe(experts), train, labels=labels, losses=_LOSSES, optimizer=optimizer
        )

    def _rate(self, step: int) -> float:
        """Learning rate of a step (0-based) of the whole run, after the warmup."""
        return self.scale.train.lr * (self.total - step) / (self.total - self.warmup)

    def _parts(self, share: float) -> tuple[TrainScale, TrainScale, float]:
        """The steps before and after an expansion, and the learning rate at it."""
        steps, train = min(self.total - 1, max(1, round(share * self.total))), self.scale.train
        before, after = (replace(train, tokens=n * train.batch_tokens) for n in (steps, self.total - steps))
        return before, after, self._rate(steps)

    def _before(self, name: str, model: Any, share: float, labels: Mapping[str, Any], **more: Any) -> Run:
        """The first part of a run of all steps, at the rates that it has there."""
        train, _, rate = self._parts(share)
        optimizer = {"schedule": "linear", "min_lr": rate, "warmup_steps": self.warmup}
        return self.mine.run(name, model, train, labels={**labels, "share": share}, optimizer=optimizer, **more)

    def _after(self, name: str, experts: int, share: float, labels: Mapping[str, Any], **more: Any) -> Run:
        """The second part, of the model in grown/NAME."""
        before, train, rate = self._parts(share)
        optimizer = {"schedule": "linear", "lr": rate, "min_lr": 0.0, "warmup_steps": 0}
        sizes = {"from": experts, "experts": _GROWTH * experts, "top_k": self.scale.top_k, "share": share}
        how = {"stage": 1, "before": before.whole_tokens, "losses": _LOSSES, "optimizer": optimizer, **more}
        return self.mine.run(name, f"grown/{name}-{self.mine.seed}", train, labels={**labels, **sizes}, **how)

    def _growing(self, experts: int, share: float, treatments: Sequence[Treatment]) -> Iterator[Step]:
        """The small model so far; then grow it in every way and train each on."""
        before = self.before(experts, share)
        yield train_step(before)
        options = {treatment: self._options(treatment) for treatment in treatments}
        yield self.grown(before, experts, share, options)

    def before(self, experts: int, share: float) -> Run:
        """The small model so far."""
        labels = {"model": "before", "experts": experts}
        return self._before(f"before-{experts}-{share:g}", self._moe(experts), share, labels, losses=_LOSSES)

    def grown(
        self, before: Run, experts: int, share: float, options: Mapping[str, Command], **more: Mapping[str, Any]
    ) -> Step:
        """Grow the small model in every way, a name and options of `expand`, and train each on with `more` keys."""
        parts: list[Run | Command] = []
        for treatment, chosen in options.items():
            labels = {"model": "grown", "treatment": treatment}
            run = self._after(f"grown-{experts}-{share:g}-{treatment}", experts, share, labels, **more)
            grow = ("expand", before.folder, str(run.model), "--experts", str(_GROWTH * experts))
            last = self.last[2:] if "--seed" in chosen else self.last
            parts += [(*grow, *chosen, *last), run]
        return train_step(*parts, name=f"grown-{experts}-{share:g}-{self.mine.seed}", needs=(before.name,))

    def _sparse(self, share: float) -> Iterator[Step]:
        """Sparse upcycling: copies of a dense FFN as wide as one expert, the same architecture as the grown models."""
        scale = self.scale
        dense = {"family": "llama", "config": dense_config(scale.model, scale.expert_size)}
        before = self._before("before-dense", dense, share, {"model": "dense"})
        yield train_step(before)
        parts: list[Run | Command] = []
        for experts in (scale.experts, *scale.other_experts):
            run = self._after(f"sparse-{experts}", experts, share, {"model": "sparse"})
            options = ("--method", "sparse", "--experts", str(experts * _GROWTH), "--top-k", str(scale.top_k))
            command = ("upcycle", before.folder, str(run.model), *options, "--layers", scale.moe_layers)
            parts += [(*command, *self.last), run]
        yield train_step(*parts, name=f"sparse-{self.mine.seed}", needs=(before.name,))

    def _options(self, treatment: Treatment) -> Command:
        """Of `expand`. The exact expansion chooses its copies by the same utility as the paper's."""
        scale = self.scale
        texts = tuple(word for domain in self.mine.domains for word in ("--calibration", train_file(domain)))
        by_gradient = (
            *("--utility", "gradient_norm", *texts, "--utility-batches", str(scale.utility_batches)),
            *("--batch-size", str(_UTILITY_SEQUENCES), "--sequence-length", str(scale.model.sequence_length)),
        )
        options: Mapping[Treatment, Command] = {
            "gradient_norm": by_gradient,
            "uniform": ("--utility", "uniform"),
            "random": ("--utility", "uniform", "--expert-op", "random"),
            "exact": (*by_gradient, "--routing", "one_per_copy_group"),
        }
        return options[treatment]
