"""DivMoE (sections 3 and 4, appendices C to H): one dense base, four specialists, and every way to make an MoE of them.

All models of the joint stage have the same active size, tokens, optimizer and steps, and all MoEs the same total size.
What does not come from the specialists starts from the base trained on as many more tokens as all of them together.
Coarse methods therefore use one whole FFN of N, with a softmax over all experts (over one it would be 1 and the router
would learn nothing); fine ones use M shards of N*M, with a softmax over the selected. Only `btx` is larger: it is the
published one, two whole FFNs a token, and `btx_top1` the one of the same active size.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from moesaic_lab.plan import Plan, Step
from moesaic_lab.runs import (
    STAGE_SEED,
    Run,
    dense_config,
    domains_of,
    experiment_plan,
    premise_step,
    task_step,
    train_step,
)
from moesaic_lab.scale import DivmoeMethod, DivmoeScale, Scale, TrainScale

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
    return divmoe.model.active_parameters(divmoe.intermediate_size), tokens_before_joint(
        divmoe, 4
    ) + divmoe.train.whole_tokens


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
    base, specialists = dense_stages(divmoe, domains, seed)
    yield train_step(base)
    yield premise_step(base, domains, seed)
    yield train_step(*specialists.values(), name=f"specialists-{seed}", needs=(base.name,))
    longer = _longer_base(divmoe, base, domains, seed)
    yield train_step(longer, needs=(base.name,))
    runs = [_second_stage(divmoe, "dense", longer.folder, domains, seed)]
    yield train_step(runs[0], needs=(longer.name,))
    for method in divmoe.methods:
        upcycled = f"upcycled/{method}-{seed}"
        runs.append(_second_stage(divmoe, method, upcycled, domains, seed))
        source = longer if method in _SINGLE_SOURCE else base
        command = upcycle_command(method, source, specialists, upcycled, seed)
        step = train_step(runs[-1], needs=(f"specialists-{seed}", longer.name))
        yield replace(step, commands=(command, *step.commands))
    if with_tasks:
        models = {str(run.labels["model"]): run.folder for run in (base, *runs)}
        needs = (f"specialists-{seed}", *(run.name for run in runs))
        settings = {"checkpoints": models, "domains": list(domains)}
        yield task_step("accuracy", f"accuracy-{seed}", settings, needs=needs, labels={"seed": seed})


def dense_stages(divmoe: DivmoeScale, domains: Sequence[str], seed: int) -> tuple[Run, dict[str, Run]]:
    """The dense base, and one specialist per domain that goes on from it."""
    config = dense_config(divmoe.model, divmoe.intermediate_size)
    base = _run(divmoe, f"base-{seed}", {"family": "llama", "config": config}, divmoe.base, domains, domains, seed)
    base = replace(base, labels={"model": "base", "stage": "dense"})
    specialists = {}
    for domain in domains:
        name, stage = f"specialist-{domain}-{seed}", seed + _SPECIALIST * STAGE_SEED
        run = _run(divmoe, name, base.folder, divmoe.specialist, [domain], domains, stage, tokens_before=base.tokens)
        specialists[domain] = replace(run, labels={"model": f"specialist {domain}", "stage": "dense", "seed": seed})
    return base, specialists


def _longer_base(divmoe: DivmoeScale, base: Run, domains: Sequence[str], seed: int) -> Run:
    """The base on as many more tokens as the specialists have together."""
    stage = divmoe.specialist
    train = replace(stage, tokens=len(domains) * stage.whole_tokens)
    stage_seed = seed + _LONGER * STAGE_SEED
    run = _run(divmoe, f"longer-{seed}", base.folder, train, domains, domains, stage_seed, tokens_before=base.tokens)
    return replace(run, labels={"model": "base, trained longer", "stage": "dense", "seed": seed})


def _run(
    divmoe: DivmoeScale,
    name: str,
    model: str | Mapping[str, object],
    train: TrainScale,
    sources: Sequence[str],
    measured: Sequence[str],
    seed: int,
    tokens_before: int = 0,
) -> Run:
    return Run(
        name=name,
        model=model,
        train=train,
        shape=divmoe.model,
        sources=sources,
        measured=measured,
        seed=seed,
        labels={},
        tokens_before=tokens_before,
        more={},
    )


def _second_stage(divmoe: DivmoeScale, method: str, model: str, domains: Sequence[str], seed: int) -> Run:
    before = tokens_before_joint(divmoe, len(domains))
    run = _run(divmoe, f"{method}-{seed}", model, divmoe.train, domains, domains, seed + STAGE_SEED, before)
    losses = {} if method == "dense" else _BALANCE
    return replace(run, labels={"model": method, "stage": "joint", "seed": seed}, more={"losses": losses})


def tokens_before_joint(divmoe: DivmoeScale, domains: int) -> int:
    """Of the base and all specialists, or of the base trained longer."""
    return divmoe.base.whole_tokens + domains * divmoe.specialist.whole_tokens


_SPECIALIST, _LONGER = 11, 12
"""Stages, beside those of `life`."""


def upcycle_command(
    method: DivmoeMethod, base: Run, specialists: Mapping[str, Run], out: str, seed: int
) -> tuple[str, ...]:
    """The upcycling of one method."""
    common = ("upcycle", base.folder, out)
    last = ("--seed", str(seed), "--overwrite", "--quiet")
    if method in _SINGLE_SOURCE:
        options = _SINGLE_SOURCE[method]
        experts = len(specialists) * (_FINE_SHARDS if "--shards" in options else 1)
        return (*common, *options, "--experts", str(experts), *last)
    named = (word for name, run in specialists.items() for word in ("--specialist", f"{name}={run.folder}"))
    return (*common, *_FROM_SPECIALISTS[method], *named, *last)
