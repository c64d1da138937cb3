"""EMO (sections 3 to 5, appendices A and B): standard and modular MoE on the same tokens, and parts of them."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from moesaic.selection.recipe import Method
from moesaic_lab.experiments.emo_results import nearest_to_5
from moesaic_lab.plan import Plan, Step, selection_file, train_file
from moesaic_lab.runs import (
    PREPARE,
    Command,
    Repetition,
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
    mine = Repetition(shape=emo.model, domains=domains, seed=seed)
    models = {name: _model(emo, name, mine) for name in ("standard", "emo", "few_experts", "dense")}
    for run in models.values():
        yield train_step(run)
    yield premise_step(models["dense"], domains, seed)
    pools = {"run": models["emo"].folder, "steps": _POOL_STEPS}
    yield task_step("pools", f"pools-{seed}", pools, needs=(models["emo"].name,), labels=_labels(models["emo"]))
    for name in ("standard", "emo"):
        step = _subsets(emo, models[name], mine, documents=emo.documents, methods=emo.methods)
        yield step
        yield _inspect(emo, models[name], mine)
        yield _tune(emo, models[name], mine, needs=step.name)
    for variant in emo.variants:
        run = _model(emo, variant, mine)
        yield train_step(run, needs=(models["standard"].name,) if variant == "annealing" else (PREPARE,))
        yield _subsets(emo, run, mine, documents=(nearest_to_5(emo.documents),), methods=("router",))


def _model(emo: EmoScale, name: str, mine: Repetition) -> Run:
    """The run of one model: the common recipe, and what is its own."""
    model, more = _VARIANTS[name](emo)
    labels = {"stage": "trained"}
    if model is not None:
        return mine.run(name, model, emo.train, labels=labels, **more)
    assert emo.anneal is not None, "checked by the scale"
    before = emo.train.whole_tokens
    return mine.run(name, f"runs/standard-{mine.seed}", emo.anneal, stage=1, before=before, labels=labels, **more)


def _labels(run: Run) -> dict[str, Any]:
    """Of what is measured on a model."""
    return {name: run.labels[name] for name in ("model", "seed")}


_POOLS = {"rule": "document_pool", "pool_draw": "document_and_layer"}
_LOSSES: Mapping[str, Any] = {"balance": {"coefficient": 0.1, "scope": "global"}, "router_z": 0.001}
_Variant = tuple[Mapping[str, Any] | None, dict[str, Any]]
"""A model, or None for the standard one, and keys of its recipe."""


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


def _local_balancing(emo: EmoScale) -> _Variant:
    """Balanced within micro-batches of a few sequences, where the others balance the whole batch."""
    losses = {**_LOSSES, "balance": {"coefficient": 0.1, "scope": "local"}}
    batch = {"tokens": emo.train.batch_tokens, "micro_sequences": _LOCAL_SEQUENCES}
    return _moe(emo), {"losses": losses, "routing": _pools(emo), "batch": batch}


_TO_ZERO = {"schedule": "linear", "min_lr": 0.0, "warmup_steps": 0}
_VARIANTS: Mapping[str, Callable[[EmoScale], _Variant]] = {
    "standard": lambda emo: (_moe(emo), {"losses": _LOSSES}),
    "emo": lambda emo: (_moe(emo), {"losses": _LOSSES, "routing": _pools(emo)}),
    "few_experts": lambda emo: (_moe(emo, experts=_matched_experts(emo)), {"losses": _LOSSES}),
    "dense": lambda emo: ({"family": "llama", "config": dense_config(emo.model, emo.width)}, {}),
    "fixed_pool": lambda emo: (_moe(emo), {"losses": _LOSSES, "routing": _pools(emo, _matched_experts(emo))}),
    "no_shared_expert": lambda emo: (_moe(emo, shared=0), {"losses": _LOSSES, "routing": _pools(emo)}),
    "local_balancing": _local_balancing,
    "annealing": lambda emo: (None, {"losses": _LOSSES, "routing": _pools(emo), "optimizer": _TO_ZERO}),
}


def _subsets(emo: EmoScale, run: Run, mine: Repetition, *, documents: Sequence[int], methods: Sequence[Method]) -> Step:
    settings = {
        "checkpoint": run.folder,
        "selections": f"selections/{run.name}",
        "domains": list(mine.domains),
        "sequence_length": emo.model.sequence_length,
        "shares": list(emo.shares),
        "documents": list(documents),
        "methods": list(methods),
        "seed": mine.seed,
        "check_extracted": mine.seed == 0,
    }
    return task_step("subsets", f"subsets-{run.name}", settings, needs=(run.name,), labels=_labels(run))


def _inspect(emo: EmoScale, run: Run, mine: Repetition) -> Step:
    """Clusters of tokens by their routing (section 5.3)."""
    folder = f"inspections/{run.name}"
    step = task_step("inspected", f"inspect-{run.name}", {"inspection": folder}, needs=(run.name,), labels=_labels(run))
    texts = (word for domain in mine.domains for word in ("--data", train_file(domain)))
    inspect = (
        *("inspect", run.folder, folder, *texts, "--tokens", str(emo.inspect_tokens)),
        *("--clusters", str(emo.clusters), "--seed", str(mine.seed), "--overwrite", "--quiet"),
    )
    return replace(step, commands=(inspect, *step.commands))


def _tune(emo: EmoScale, run: Run, mine: Repetition, *, needs: str) -> Step:
    """Fine-tune the whole model and subsets of it (by `router`, on 5 documents or the nearest number) per domain."""
    documents = nearest_to_5(emo.documents)
    parts: list[Run | Command] = []
    for domain in mine.domains:
        for share in emo.tune_shares:
            source, part = run.folder, f"{domain}-{100 * share:g}"
            if share < 1:
                selection = selection_file(f"selections/{run.name}", domain, documents, share)
                source = f"subsets/{run.name}-{part}"
                parts.append(("extract", run.folder, selection, source, "--overwrite", "--quiet"))
            labels = {"model": run.labels["model"], "stage": "tuned", "share": share}
            how = {"stage": 1, "only": domain, "labels": labels, "optimizer": _TO_ZERO}
            tuned = mine.run(f"tuned-{run.labels['model']}-{part}", source, emo.tune, **how)
            parts.append(replace(tuned, measured=(domain,)))
    return train_step(*parts, name=f"tuned-{run.name}", needs=(needs,))
