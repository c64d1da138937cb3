"""One model's life: dense, specialists, DivMoE, modular, larger, a part of it for one domain, and the part put back.

The DivMoE routes by plain top-k from the start (with a Latin square that computes the same at step 0), because document
pools train a model that does so at inference. Annealing leaves the pools on record, and an expansion into groups of
copies refuses a rule that would go on; so one step with the model's own routing, at next to no learning rate, ends it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean

from moesaic.common.errors import MoesaicError
from moesaic_lab.claims import Claim, Numbers
from moesaic_lab.experiments.divmoe import dense_stages, fits, upcycle_command
from moesaic_lab.experiments.divmoe import size as divmoe_size
from moesaic_lab.plan import Plan, Step, train_file
from moesaic_lab.results import Row, Table, interval_of, label_values, show, where
from moesaic_lab.runs import Repetition, Run, domains_of, experiment_plan, premise_step, task_step, train_step
from moesaic_lab.scale import DivmoeScale, LifeScale, Scale, kept_experts

NAME = "life"
_EXPERTS_PER_DOMAIN, _TOP_K = 2, 2
_METHOD = "divmoe_topk"
_NO_SQUARE = "an odd number of domains has no Latin square: the DivMoE starts with a random router"
_LOSSES = {"balance": {"coefficient": 0.02, "scope": "global"}, "router_z": 0.001}
_TO_ZERO = {"schedule": "linear", "min_lr": 0.0, "warmup_steps": 0}


def plan(scale: Scale, data: str | None, seeds: int) -> Plan:
    """All steps of the experiment.

    Raises: `MoesaicError` where `keep` leaves fewer experts than a token uses.
    """
    grown = 2 * _EXPERTS_PER_DOMAIN * len(domains_of(data))
    if (kept := kept_experts(scale.life.keep, grown)) < _TOP_K:
        raise MoesaicError(f"life.keep: {scale.life.keep:g} of {grown} experts is {kept}, but tokens use {_TOP_K}")
    return experiment_plan(
        NAME,
        scale,
        data,
        parts={"divmoe": scale.divmoe, NAME: scale.life},
        vocabulary=scale.divmoe.model.vocabulary,
        seeds=seeds,
        steps_of_seed=lambda domains, seed: _Life(scale.divmoe, scale.life, domains, seed).steps(),
        notices=() if fits(_METHOD, len(domains_of(data))) else (_NO_SQUARE,),
    )


def size(scale: Scale) -> tuple[int, int]:
    """Active parameters of a model, and the tokens that it sees with four domains."""
    active, tokens = divmoe_size(scale)
    return active, tokens + scale.life.anneal.whole_tokens + scale.life.grown.whole_tokens


class _Life:
    """The steps of one seed."""

    def __init__(self, divmoe: DivmoeScale, life: LifeScale, domains: Sequence[str], seed: int) -> None:
        self.divmoe, self.life, self.domains, self.seed = divmoe, life, domains, seed
        self.mine = Repetition(shape=divmoe.model, domains=domains, seed=seed)
        self.target = domains[0]
        self.experts = len(domains) * _EXPERTS_PER_DOMAIN
        self.last = ("--seed", str(seed), "--overwrite", "--quiet")

    def steps(self) -> Iterator[Step]:
        """The whole way, the short way, and what all of it is worth."""
        base, specialists = dense_stages(self.divmoe, self.mine)
        yield train_step(base)
        yield premise_step(base, self.domains, self.seed)
        yield train_step(*specialists.values(), name=f"specialists-{self.seed}", needs=(base.name,))
        upcycled = self._folder("upcycled", "joint")
        upcycle = upcycle_command(_METHOD, base, specialists, upcycled, self.seed)
        before = base.tokens + sum(run.tokens for run in specialists.values())
        joint = self.mine.run("joint", upcycled, self.divmoe.train, stage=1, before=before, losses=_LOSSES)
        modular, settled = self._modular(joint)
        middle = train_step(
            upcycle, joint, modular, settled, name=f"modular-{self.seed}", needs=(f"specialists-{self.seed}",)
        )
        yield middle
        for routing in ("exact", "plain"):
            yield self._grow(settled, routing, needs=middle.name)
        yield self._part(needs=f"grown_plain-{self.seed}")
        yield self._short_way(base)
        yield self._measure(base, joint, modular)

    def _folder(self, kind: str, name: str) -> str:
        return f"{kind}/{name}-{self.seed}"

    def _modular(self, joint: Run) -> tuple[Run, Run]:
        """Annealed with pools, and one step without them."""
        anneal, run = self.life.anneal, self.mine.run
        pools = {"rule": "document_pool", "pool_size": [_TOP_K, self.experts], "pool_draw": "document_and_layer"}
        how = {"stage": 2, "before": joint.tokens_after, "losses": _LOSSES, "optimizer": _TO_ZERO}
        modular = run("modular", joint.folder, anneal, routing=pools, **how)
        one_step = replace(anneal, tokens=anneal.batch_tokens, lr=anneal.lr / 1e6, warmup_steps=0)
        how = {"stage": 2, "before": modular.tokens_after, "optimizer": _TO_ZERO}
        return modular, run("settled", modular.folder, one_step, **how)

    def _grow(self, settled: Run, routing: str, *, needs: str) -> Step:
        out = self._folder("grown", routing)
        option = ("--routing", "one_per_copy_group") if routing == "exact" else ()
        grow = ("expand", settled.folder, out, "--experts", str(2 * self.experts), "--utility", "uniform", *option)
        how = {"stage": 3, "before": settled.tokens_after, "losses": _LOSSES, "optimizer": _TO_ZERO}
        return train_step(
            (*grow, *self.last), self.mine.run(f"grown_{routing}", out, self.life.grown, **how), needs=(needs,)
        )

    def _tuned(self, name: str, model: str) -> Run:
        how = {"stage": 4, "only": self.target, "labels": {"stage": "tuned"}, "optimizer": _TO_ZERO}
        return self.mine.run(name, model, self.life.tune, **how)

    def _part(self, *, needs: str) -> Step:
        """Choose and extract experts of one domain, fine-tune them, put them back with and without their rows."""
        full, part = self._folder("runs", "grown_plain"), self._folder("subsets", "part")
        selection, quiet = f"selections/part-{self.seed}.json", ("--overwrite", "--quiet")
        tuned = self._tuned("tuned", part)
        keep = ("--keep", f"{100 * self.life.keep:g}%", "--examples", "20")
        length = ("--max-tokens", str(self.divmoe.model.sequence_length))
        return train_step(
            ("select", full, selection, "--data", train_file(self.target), *keep, *length),
            ("extract", full, selection, part, *quiet),
            tuned,
            ("merge-back", full, tuned.folder, self._folder("merged", "experts"), *quiet),
            ("merge-back", full, tuned.folder, self._folder("merged", "router"), "--with", "router", *quiet),
            needs=(needs,),
        )

    def _short_way(self, base: Run) -> Step:
        """The dense base on all the tokens that the specialists and the MoE had, then the same fine-tuning."""
        divmoe, life = self.divmoe, self.life
        stages = [divmoe.specialist] * len(self.domains) + [divmoe.train, life.anneal, life.grown]
        train = replace(divmoe.train, tokens=sum(stage.whole_tokens for stage in stages))
        dense = self.mine.run("short", base.folder, train, stage=1, before=base.tokens)
        return train_step(dense, self._tuned("short_tuned", dense.folder), needs=(base.name,))

    def _measure(self, base: Run, joint: Run, modular: Run) -> Step:
        target = self.target
        models = {
            "dense base": base.folder,
            "divmoe, not trained": self._folder("upcycled", "joint"),
            "divmoe, joint stage": joint.folder,
            "divmoe, annealed with pools": modular.folder,
            "grown exactly, not trained": self._folder("grown", "exact"),
            "grown exactly, trained": self._folder("runs", "grown_exact"),
            "grown plainly, not trained": self._folder("grown", "plain"),
            "grown plainly, trained": self._folder("runs", "grown_plain"),
            f"part for {target}": self._folder("subsets", "part"),
            f"part for {target}, fine-tuned": self._folder("runs", "tuned"),
            "part put back": self._folder("merged", "experts"),
            "part and its router rows put back": self._folder("merged", "router"),
            "short way: dense, same tokens": self._folder("runs", "short"),
            f"short way, fine-tuned on {target}": self._folder("runs", "short_tuned"),
        }
        length = self.divmoe.model.sequence_length
        settings = {"checkpoints": models, "domains": list(self.domains), "sequence_length": length}
        needs = tuple(f"{step}-{self.seed}" for step in ("grown_exact", "tuned", "short"))
        return task_step("measure", f"measure-{self.seed}", settings, needs=needs, labels={"seed": self.seed})


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


_NEAR = 0.001
"""Nats per token that count as nothing: float32 rounds differently with other numbers of experts."""


def _at(n: Numbers, model: str) -> float:
    return n("measured_loss", model=model)


CLAIMS = (
    Claim(
        says="(ours) dense, upcycled, annealed and grown, a model ends below dense on as many tokens (whole way)",
        figure="loss of the short way minus that of the model grown exactly and trained",
        effect=lambda n: _at(n, "short way: dense, same tokens") - _at(n, "grown exactly, trained"),
    ),
    Claim(
        says="(ours) growing exactly costs nothing (docs/statements.md, E2)",
        figure=f"{_NEAR} minus the rise of the loss, grown exactly",
        effect=lambda n: _NEAR - (_at(n, "grown exactly, not trained") - _at(n, "divmoe, annealed with pools")),
        otherwise="not seen",
    ),
    Claim(
        says="(ours) growing exactly ends below growing plainly (docs/statements.md, E2)",
        figure="loss grown plainly minus loss grown exactly, both trained",
        effect=lambda n: _at(n, "grown plainly, trained") - _at(n, "grown exactly, trained"),
    ),
)
