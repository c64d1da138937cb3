"""DivMoE (sections 3 and 4, appendices C to H): one dense base, four specialists, and every way to make an MoE of them.

All models of the joint stage have the same active size, tokens, optimizer and steps, and all MoEs the same total size.
What does not come from the specialists starts from the base trained on as many more tokens as all of them together.
Coarse methods therefore use one whole FFN of N, with a softmax over all experts (over one it would be 1 and the router
would learn nothing); fine ones use M shards of N*M, with a softmax over the selected. Only `btx` is larger: it is the
published one, two whole FFNs a token, and `btx_top1` the one of the same active size.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from moesaic_lab.plan import Plan, Step
from moesaic_lab.runs import (
    Command,
    Repetition,
    Run,
    dense_config,
    domains_of,
    experiment_plan,
    premise_step,
    task_step,
    train_step,
)
from moesaic_lab.scale import DivmoeMethod, DivmoeScale, Scale

NAME = "divmoe"
_BALANCE = {"balance": {"coefficient": 0.02, "scope": "global"}}
"""The paper's 0.01 at K = 2."""

_COARSE = ("--top-k", "1", "--weighting", "all")
_FINE = ("--shards", "2", "--top-k", "2")

_SINGLE_SOURCE: Mapping[DivmoeMethod, tuple[str, ...]] = {
    "scratch": ("--method", "scratch", *_FINE, "--shared-weights", "reinit"),
    "sparse": ("--method", "sparse", *_COARSE),
    "virtual_group": ("--method", "virtual_group", *_FINE),
    "drop": ("--method", "drop", *_COARSE),
    "drop_paper_scale": ("--method", "drop", *_COARSE, "--scale", "paper"),
    "drop_fine": ("--method", "drop", *_FINE),
    "drop_fine_paper_scale": ("--method", "drop", *_FINE, "--scale", "paper"),
}
"""From the base alone; the number of experts is given."""

_FROM_SPECIALISTS: Mapping[DivmoeMethod, tuple[str, ...]] = {
    "btx": ("--method", "btx", "--top-k", "2"),
    "btx_top1": ("--method", "btx", *_COARSE),
    "divmoe": ("--method", "divmoe", *_FINE),
    "divmoe_topk": ("--method", "divmoe", *_FINE, "--routing", "topk"),
    "divmoe_as_published": ("--method", "divmoe", *_FINE, "--router-init", "random", "--scale", "paper"),
    "divmoe_random_router": ("--method", "divmoe", *_FINE, "--router-init", "random"),
    "divmoe_paper_scale": ("--method", "divmoe", *_FINE, "--scale", "paper"),
    "divmoe_m1": ("--method", "divmoe", "--shards", "1", *_COARSE),
    "divmoe_m4": ("--method", "divmoe", "--shards", "4", "--top-k", "4"),
    "divmoe_base_weights": ("--method", "divmoe", *_FINE, "--shared-weights", "base"),
    "divmoe_random_weights": ("--method", "divmoe", *_FINE, "--shared-weights", "random-specialist"),
}
_FINE_SHARDS = 2


def plan(scale: Scale, data: str | None, seeds: int) -> Plan:
    """All steps of the experiment."""
    number = len(domains_of(data))
    left_out: list[DivmoeMethod] = [method for method in scale.divmoe.methods if not fits(method, number)]
    methods = tuple(method for method in scale.divmoe.methods if method not in left_out)
    divmoe = replace(scale.divmoe, methods=methods)
    return experiment_plan(
        NAME,
        scale,
        data,
        parts={NAME: scale.divmoe},
        vocabulary=divmoe.model.vocabulary,
        seeds=seeds,
        steps_of_seed=lambda domains, seed: _steps_of_seed(divmoe, domains, seed, with_tasks=data is None),
        notices=_notices(left_out, number),
    )


def size(scale: Scale) -> tuple[int, int]:
    """Active parameters of a model, and the tokens that it sees with four domains."""
    divmoe = scale.divmoe
    tokens = divmoe.base.whole_tokens + 4 * divmoe.specialist.whole_tokens + divmoe.train.whole_tokens
    return divmoe.model.active_parameters(divmoe.intermediate_size), tokens


def fits(method: DivmoeMethod, domains: int) -> bool:
    """Whether there are enough domains for a method, and a Latin square of them where it is to have one."""
    options = _FROM_SPECIALISTS.get(method, ())
    shards = int(options[options.index("--shards") + 1]) if "--shards" in options else 1
    return domains >= shards if "random" in options else domains % shards == 0


def _notices(left_out: Sequence[DivmoeMethod], domains: int) -> tuple[str, ...]:
    if not left_out:
        return ()
    return (
        f"{domains} domains: {', '.join(left_out)} left out, because a Latin square needs a multiple of their shards "
        "as number of domains",
    )


def _steps_of_seed(divmoe: DivmoeScale, domains: Sequence[str], seed: int, *, with_tasks: bool) -> Iterator[Step]:
    mine = Repetition(shape=divmoe.model, domains=domains, seed=seed)
    base, specialists = dense_stages(divmoe, mine)
    yield train_step(base)
    yield premise_step(base, domains, seed)
    yield train_step(*specialists.values(), name=f"specialists-{seed}", needs=(base.name,))
    train = replace(divmoe.specialist, tokens=sum(run.tokens for run in specialists.values()))
    labels = {"model": "base, trained longer", "stage": "dense"}
    longer = mine.run("longer", base.folder, train, stage=_LONGER, before=base.tokens, labels=labels)
    yield train_step(longer, needs=(base.name,))

    def joint(method: str, model: str, **more: Any) -> Run:
        labels = {"stage": "joint"}
        return mine.run(method, model, divmoe.train, stage=1, before=longer.tokens_after, labels=labels, **more)

    runs = [joint("dense", longer.folder)]
    yield train_step(runs[0], needs=(longer.name,))
    for method in divmoe.methods:
        upcycled = f"upcycled/{method}-{seed}"
        runs.append(joint(method, upcycled, losses=_BALANCE))
        source = longer if method in _SINGLE_SOURCE else base
        command = upcycle_command(method, source, specialists, upcycled, seed)
        yield train_step(command, runs[-1], needs=(f"specialists-{seed}", longer.name))
    if with_tasks:
        models = {str(run.labels["model"]): run.folder for run in (base, *runs)}
        needs = (f"specialists-{seed}", *(run.name for run in runs))
        settings = {"checkpoints": models, "domains": list(domains)}
        yield task_step("accuracy", f"accuracy-{seed}", settings, needs=needs, labels={"seed": seed})


_SPECIALIST, _LONGER = 11, 12
"""Stages, beside those of `life`."""


def dense_stages(divmoe: DivmoeScale, mine: Repetition) -> tuple[Run, dict[str, Run]]:
    """The dense base, and one specialist per domain that goes on from it."""
    model = {"family": "llama", "config": dense_config(divmoe.model, divmoe.intermediate_size)}
    base = mine.run("base", model, divmoe.base, labels={"stage": "dense"})
    specialists = {}
    for domain in mine.domains:
        labels = {"model": f"specialist {domain}", "stage": "dense"}
        how = {"stage": _SPECIALIST, "before": base.tokens, "only": domain, "labels": labels}
        specialists[domain] = mine.run(f"specialist-{domain}", base.folder, divmoe.specialist, **how)
    return base, specialists


def upcycle_command(method: DivmoeMethod, base: Run, specialists: Mapping[str, Run], out: str, seed: int) -> Command:
    """The upcycling of one method."""
    common = ("upcycle", base.folder, out)
    last = ("--seed", str(seed), "--overwrite", "--quiet")
    if method in _SINGLE_SOURCE:
        options = _SINGLE_SOURCE[method]
        experts = len(specialists) * (_FINE_SHARDS if "--shards" in options else 1)
        return (*common, *options, "--experts", str(experts), *last)
    named = (word for name, run in specialists.items() for word in ("--specialist", f"{name}={run.folder}"))
    return (*common, *_FROM_SPECIALISTS[method], *named, *last)
