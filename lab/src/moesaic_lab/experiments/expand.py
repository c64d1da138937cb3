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

from moesaic_lab.plan import Plan, Step
from moesaic_lab.runs import STAGE_SEED, Run, dense_config, experiment_plan, premise_step, train_file, train_step
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
        steps_of_seed=lambda domains, seed: _Seed(scale.expand, domains, seed).steps(),
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


class _Seed:
    """The steps of one seed."""

    def __init__(self, scale: ExpandScale, domains: Sequence[str], seed: int) -> None:
        self.scale, self.domains, self.seed = scale, domains, seed
        self.total, self.warmup = scale.train.steps, _warmup(scale.train)
        self.shares = tuple(dict.fromkeys(_after_warmup(share, scale.train) for share in scale.shares))
        self.ratio_share = _after_warmup(_RATIO_SHARE, scale.train)

    def steps(self) -> Iterator[Step]:
        """Fixed sizes; then, for every share, the small model so far and everything that grows from it."""
        scale = self.scale
        sizes = sorted({size for e in (scale.experts, *scale.other_experts) for size in (e, _GROWTH * e)})
        for size in sizes:
            yield train_step(self._fixed(size))
        yield premise_step(self._fixed(scale.experts), self.domains, self.seed)
        for share in self.shares:
            before = self._before(scale.experts, share)
            yield train_step(before)
            yield self._grown(before, scale.experts, share, scale.treatments)
        if scale.other_experts:
            yield from self._ratios()

    def _ratios(self) -> Iterator[Step]:
        """Other activation ratios, and sparse upcycling from a dense model, all at half of the steps."""
        scale = self.scale
        for experts in scale.other_experts:
            before = self._before(experts, self.ratio_share)
            yield train_step(before)
            yield self._grown(before, experts, self.ratio_share, scale.treatments[:1])
        dense = {"family": "llama", "config": dense_config(scale.model, scale.expert_size)}
        before = replace(
            self._first(f"before-dense-{self.seed}", dense, self.ratio_share),
            labels={"model": "dense", "share": self.ratio_share},
        )
        yield train_step(replace(before, more={"optimizer": before.more["optimizer"]}))
        runs, commands = [], []
        for experts in (scale.experts, *scale.other_experts):
            name = f"sparse-{experts}-{self.seed}"
            upcycled = f"grown/{name}"
            commands.append(self._sparse(before.folder, upcycled, experts * _GROWTH))
            runs.append(self._after(name, upcycled, experts, self.ratio_share, {"model": "sparse"}))
            commands.append(runs[-1].command)
        yield replace(train_step(*runs, name=f"sparse-{self.seed}", needs=(before.name,)), commands=tuple(commands))

    def _sparse(self, base: str, out: str, experts: int) -> tuple[str, ...]:
        """Copies of the dense FFN, which is as wide as one expert: the same architecture as the grown models."""
        scale = self.scale
        return (
            *("upcycle", base, out, "--method", "sparse", "--experts", str(experts), "--top-k", str(scale.top_k)),
            *("--layers", scale.moe_layers, "--seed", str(self.seed), "--overwrite", "--quiet"),
        )

    def _moe(self, experts: int) -> dict[str, Any]:
        scale = self.scale
        moe = {
            "experts": experts,
            "top_k": scale.top_k,
            "intermediate_size": scale.expert_size,
            "layers": scale.moe_layers,
        }
        return {"family": "llama", "config": dense_config(scale.model, scale.expert_size), "moe": moe}

    def _steps_before(self, share: float) -> int:
        return min(self.total - 1, max(1, round(share * self.total)))

    def _rate(self, step: int) -> float:
        """Learning rate of a step (0-based) of the whole run, after the warmup."""
        return self.scale.train.lr * (self.total - step) / (self.total - self.warmup)

    def _run(self, name: str, model: Any, steps: int, optimizer: Mapping[str, Any], labels: Mapping[str, Any]) -> Run:
        return Run(
            name=name,
            model=model,
            train=self._train(steps),
            shape=self.scale.model,
            sources=self.domains,
            measured=self.domains,
            seed=self.seed,
            labels=labels,
            more={
                "losses": _LOSSES,
                "optimizer": {"schedule": "linear", **optimizer},
            },
        )

    def _train(self, steps: int) -> TrainScale:
        return replace(self.scale.train, tokens=steps * self.scale.train.batch_tokens)

    def _fixed(self, experts: int) -> Run:
        labels = {"model": "fixed", "experts": experts}
        return self._run(f"fixed-{experts}-{self.seed}", self._moe(experts), self.total, {"min_lr": 0.0}, labels)

    def _before(self, experts: int, share: float) -> Run:
        run = self._first(f"before-{experts}-{share:g}-{self.seed}", self._moe(experts), share)
        return replace(run, labels={"model": "before", "experts": experts, "share": share})

    def _first(self, name: str, model: Any, share: float) -> Run:
        """The first part of a run of all steps, at the rates that it has there."""
        steps = self._steps_before(share)
        return self._run(name, model, steps, {"min_lr": self._rate(steps), "warmup_steps": self.warmup}, {})

    def _after(self, name: str, model: str, experts: int, share: float, labels: Mapping[str, Any]) -> Run:
        steps = self._steps_before(share)
        optimizer = {"lr": self._rate(steps), "min_lr": 0.0, "warmup_steps": 0}
        sizes = {"from": experts, "experts": _GROWTH * experts, "top_k": self.scale.top_k}
        run = self._run(name, model, self.total - steps, optimizer, {**labels, **sizes, "share": share})
        labels = {**run.labels, "seed": self.seed}
        return replace(run, seed=self.seed + STAGE_SEED, labels=labels, tokens_before=self._train(steps).tokens)

    def _grown(self, before: Run, experts: int, share: float, treatments: Sequence[Treatment]) -> Step:
        """Grow one model in every way and train each on."""
        runs, commands = [], []
        for treatment in treatments:
            name = f"grown-{experts}-{share:g}-{treatment}-{self.seed}"
            commands.append(
                (
                    *("expand", before.folder, f"grown/{name}", "--experts", str(_GROWTH * experts)),
                    *self._options(treatment),
                    *("--seed", str(self.seed), "--overwrite", "--quiet"),
                )
            )
            labels = {"model": "grown", "treatment": treatment}
            runs.append(self._after(name, f"grown/{name}", experts, share, labels))
            commands.append(runs[-1].command)
        step = train_step(*runs, name=f"grown-{experts}-{share:g}-{self.seed}", needs=(before.name,))
        return replace(step, commands=tuple(commands))

    def _options(self, treatment: Treatment) -> tuple[str, ...]:
        """Of `expand`. The exact expansion chooses its copies by the same utility as the paper's."""
        scale = self.scale
        texts = tuple(word for domain in self.domains for word in ("--calibration", train_file(domain)))
        by_gradient = (
            *("--utility", "gradient_norm", *texts, "--utility-batches", str(scale.utility_batches)),
            *("--batch-size", str(_UTILITY_SEQUENCES), "--sequence-length", str(scale.model.sequence_length)),
        )
        options: Mapping[Treatment, tuple[str, ...]] = {
            "gradient_norm": by_gradient,
            "uniform": ("--utility", "uniform"),
            "random": ("--utility", "uniform", "--expert-op", "random"),
            "exact": (*by_gradient, "--routing", "one_per_copy_group"),
        }
        return options[treatment]
