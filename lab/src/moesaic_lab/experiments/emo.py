"""EMO (sections 3 to 5, appendices A and B): standard and modular MoE on the same tokens, and parts of them."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from moesaic_lab.experiments.emo_results import nearest_to_5
from moesaic_lab.plan import Plan, Step, train_file
from moesaic_lab.runs import (
    PREPARE,
    STAGE_SEED,
    Run,
    dense_config,
    experiment_plan,
    premise_step,
    task_step,
    train_step,
)
from moesaic_lab.scale import EmoScale, Scale

NAME = "emo"
_MATCHED_SHARE = 0.25
"""Of the experts, in the small standard model from scratch (figure 1 of the paper)."""
_POOL_STEPS = 3
_LOCAL_SEQUENCES = 4
"""Of a micro-batch with local balancing (appendix A.1: "only a few documents")."""


def plan(scale: Scale, data: str | None, seeds: int) -> Plan:
    """All steps of the experiment."""
    return experiment_plan(
        NAME,
        scale,
        data,
        parts={NAME: scale.emo},
        vocabulary=scale.emo.model.vocabulary,
        seeds=seeds,
        steps_of_seed=lambda domains, seed: _steps_of_seed(scale.emo, domains, seed),
    )


def size(scale: Scale) -> tuple[int, int]:
    """Active parameters of a model, and the tokens that it sees."""
    return scale.emo.model.active_parameters(scale.emo.width), scale.emo.train.whole_tokens


def _steps_of_seed(emo: EmoScale, domains: Sequence[str], seed: int) -> Iterator[Step]:
    models = {name: _model(emo, name, domains, seed) for name in ("standard", "emo", "few_experts", "dense")}
    for run in models.values():
        yield train_step(run)
    yield premise_step(models["dense"], domains, seed)
    pools = {"run": models["emo"].folder, "steps": _POOL_STEPS}
    labels = {"model": "emo", "seed": seed}
    yield task_step("pools", f"pools-{seed}", pools, needs=(models["emo"].name,), labels=labels)
    for name in ("standard", "emo"):
        step = _subsets(emo, name, models[name], domains, seed, documents=emo.documents, methods=emo.methods)
        yield step
        yield _inspect(emo, name, models[name], domains, seed)
        yield _tune(emo, name, models[name], domains, seed, needs=step.name)
    for variant in emo.variants:
        run = _model(emo, variant, domains, seed)
        yield train_step(run, needs=("standard-" + str(seed),) if variant == "annealing" else (PREPARE,))
        yield _subsets(emo, variant, run, domains, seed, documents=(nearest_to_5(emo.documents),), methods=("router",))


def _model(emo: EmoScale, name: str, domains: Sequence[str], seed: int) -> Run:
    """The run of one model: the common recipe, and what is its own."""
    model, train, more = _VARIANTS[name](emo)
    return Run(
        name=f"{name}-{seed}",
        model=f"runs/standard-{seed}" if model is None else model,
        train=train or emo.train,
        shape=emo.model,
        sources=domains,
        measured=domains,
        seed=seed if model is not None else seed + STAGE_SEED,
        labels={"model": name, "stage": "trained", "seed": seed},
        more=more,
    )


_POOLS = {"rule": "document_pool", "pool_draw": "document_and_layer"}
_LOSSES: Mapping[str, Any] = {"balance": {"coefficient": 0.1, "scope": "global"}, "router_z": 0.001}
_Variant = tuple[Mapping[str, Any] | None, Any, dict[str, Any]]


def _moe(emo: EmoScale, *, experts: int | None = None, shared: int = 1) -> dict[str, Any]:
    moe = {
        "experts": experts or emo.experts,
        "top_k": emo.top_k + (1 - shared),
        "intermediate_size": emo.expert_size,
        "shared_experts": shared,
        "weighting": "all",
    }
    return {"family": "llama", "config": dense_config(emo.model, emo.expert_size), "moe": moe}


def _pools(emo: EmoScale, size: int | None = None) -> dict[str, Any]:
    return {**_POOLS, "pool_size": size or [emo.top_k + 1, emo.experts]}


def _matched_experts(emo: EmoScale) -> int:
    return math.ceil(_MATCHED_SHARE * emo.experts)


def _standard(emo: EmoScale) -> _Variant:
    return _moe(emo), None, {"losses": _LOSSES}


def _emo(emo: EmoScale) -> _Variant:
    return _moe(emo), None, {"losses": _LOSSES, "routing": _pools(emo)}


def _few_experts(emo: EmoScale) -> _Variant:
    return _moe(emo, experts=_matched_experts(emo)), None, {"losses": _LOSSES}


def _dense(emo: EmoScale) -> _Variant:
    return {"family": "llama", "config": dense_config(emo.model, emo.width)}, None, {}


def _fixed_pool(emo: EmoScale) -> _Variant:
    return _moe(emo), None, {"losses": _LOSSES, "routing": _pools(emo, _matched_experts(emo))}


def _no_shared_expert(emo: EmoScale) -> _Variant:
    return _moe(emo, shared=0), None, {"losses": _LOSSES, "routing": _pools(emo)}


def _local_balancing(emo: EmoScale) -> _Variant:
    """Balanced within micro-batches of a few sequences, where the others balance the whole batch."""
    losses = {**_LOSSES, "balance": {"coefficient": 0.1, "scope": "local"}}
    batch = {"tokens": emo.train.batch_tokens, "micro_sequences": _LOCAL_SEQUENCES}
    return _moe(emo), None, {"losses": losses, "routing": _pools(emo), "batch": batch}


def _annealing(emo: EmoScale) -> _Variant:
    return None, emo.anneal, {"losses": _LOSSES, "routing": _pools(emo), "optimizer": _TO_ZERO}


_VARIANTS = {
    "standard": _standard,
    "emo": _emo,
    "few_experts": _few_experts,
    "dense": _dense,
    "fixed_pool": _fixed_pool,
    "no_shared_expert": _no_shared_expert,
    "local_balancing": _local_balancing,
    "annealing": _annealing,
}


def _subsets(
    emo: EmoScale, name: str, run: Run, domains: Sequence[str], seed: int, *, documents: Sequence[int], methods: Any
) -> Step:
    settings = {
        "checkpoint": run.folder,
        "selections": f"selections/{run.name}",
        "domains": list(domains),
        "sequence_length": emo.model.sequence_length,
        "shares": list(emo.shares),
        "documents": list(documents),
        "methods": list(methods),
        "seed": seed,
        "check_extracted": seed == 0,
    }
    labels = {"model": name, "seed": seed}
    return task_step("subsets", f"subsets-{run.name}", settings, needs=(run.name,), labels=labels)


def _inspect(emo: EmoScale, name: str, run: Run, domains: Sequence[str], seed: int) -> Step:
    """Clusters of tokens by their routing (section 5.3)."""
    folder = f"inspections/{run.name}"
    labels = {"model": name, "seed": seed}
    step = task_step("inspected", f"inspect-{run.name}", {"inspection": folder}, needs=(run.name,), labels=labels)
    texts = (word for domain in domains for word in ("--data", train_file(domain)))
    inspect = (
        *("inspect", run.folder, folder, *texts, "--tokens", str(emo.inspect_tokens)),
        *("--clusters", str(emo.clusters), "--seed", str(seed), "--overwrite", "--quiet"),
    )
    return replace(step, commands=(inspect, *step.commands))


def _tune(emo: EmoScale, name: str, run: Run, domains: Sequence[str], seed: int, *, needs: str) -> Step:
    """Fine-tune the whole model and subsets of it (by `router`, on 5 documents or the nearest number) per domain."""
    documents = nearest_to_5(emo.documents)
    commands: list[tuple[str, ...]] = []
    runs = []
    for domain in domains:
        for share in emo.tune_shares:
            source = run.folder
            if share < 1:
                selection = f"selections/{run.name}/{domain}-{documents}-{100 * share:g}.json"
                source = f"subsets/{run.name}-{domain}-{100 * share:g}"
                commands.append(("extract", run.folder, selection, source, "--overwrite", "--quiet"))
            runs.append(
                Run(
                    name=f"tuned-{run.name}-{domain}-{100 * share:g}",
                    model=source,
                    train=emo.tune,
                    shape=emo.model,
                    sources=(domain,),
                    measured=(domain,),
                    seed=seed + STAGE_SEED,
                    labels={"model": name, "stage": "tuned", "share": share, "seed": seed},
                    more={"optimizer": _TO_ZERO},
                )
            )
            commands.append(runs[-1].command)
    step = train_step(*runs, name=f"tuned-{run.name}", needs=(needs,))
    return replace(step, commands=tuple(commands))


_TO_ZERO = {"schedule": "linear", "min_lr": 0.0, "warmup_steps": 0}
