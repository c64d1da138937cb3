"""Recipes and steps that several experiments write."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moesaic.common.recipe import dump_recipe, load_recipe, recipe_values
from moesaic.common.yaml_text import dump_yaml
from moesaic.training.recipe import TrainRecipe
from moesaic_lab.data import DOMAINS
from moesaic_lab.plan import REPORT, TOKENIZER, Plan, Step, train_file, valid_file
from moesaic_lab.scale import ModelScale, Scale, TrainScale

Command = tuple[str, ...]
"""Arguments of `moesaic`."""
PREPARE = "prepare"
"""Name of the first step: data and tokenizer."""
STAGE_SEED = 1000
"""Added to the seed of the data once or several times in later stages, so that none begins with what another has seen:
documents come in an order that is a function of the seed and the number of their source."""


def domains_of(data: str | None) -> tuple[str, ...]:
    """Names of the domains: of the files in --data that have a held-out part, or the generated ones."""
    if data is None:
        return tuple(DOMAINS)
    names = {path.name.removesuffix(".train.jsonl") for path in Path(data).glob("*.train.jsonl")}
    return tuple(sorted(name for name in names if (Path(data) / f"{name}.valid.jsonl").is_file()))


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run of an experiment."""

    name: str
    model: str | Mapping[str, Any]
    """Folder, or `{family, config, moe}`."""
    train: TrainScale
    shape: ModelScale
    sources: Sequence[str]
    """Domains trained on."""
    measured: Sequence[str]
    """Domains whose held-out loss is measured."""
    seed: int
    """Of the data's order and of new weights."""
    labels: Mapping[str, Any]
    """What the results call it, the seed of the experiment included."""
    tokens_before: int
    """That the model has seen in earlier runs, its specialists' included."""
    more: Mapping[str, Any]
    """Other keys of the recipe; `optimizer` is merged."""

    @property
    def folder(self) -> str:
        """Of the result."""
        return f"runs/{self.name}"

    @property
    def file(self) -> str:
        """Of the recipe."""
        return f"recipes/{self.name}.yaml"

    @property
    def tokens(self) -> int:
        """That it trains on, in whole steps."""
        return self.train.whole_tokens

    @property
    def tokens_after(self) -> int:
        """That the model has seen at its end."""
        return self.tokens_before + self.tokens

    @property
    def command(self) -> Command:
        """What runs it."""
        return ("train", self.file, self.folder, "--resume", "--quiet")

    def recipe(self) -> str:
        """The recipe, resolved."""
        train, more = self.train, dict(self.more)
        steps, whole = train.steps, train.batch_tokens // self.shape.sequence_length
        optimizer = {
            "lr": train.lr,
            "min_lr": train.lr / 10,
            "warmup_steps": min(train.warmup_steps, max(0, steps - 1)),
            **more.pop("optimizer", {}),
        }
        values: dict[str, Any] = {
            "model": self.model,
            "tokenizer": TOKENIZER if not isinstance(self.model, str) else None,
            "data": {
                "sequence_length": self.shape.sequence_length,
                "sources": [{"path": train_file(domain), "domain": domain} for domain in self.sources],
                "validation": [{"path": valid_file(domain), "domain": domain} for domain in self.measured],
            },
            "optimizer": optimizer,
            "batch": {"tokens": train.batch_tokens, "micro_sequences": train.micro_sequences or whole},
            "budget": {"steps": steps},
            "validation": {"every_steps": max(1, steps // CURVE_POINTS)},
            "checkpoint": {"every_steps": max(1, steps // 5), "keep": 1},
            "precision": "fp32",
            "seed": self.seed,
        }
        return dump_recipe(load_recipe(TrainRecipe, values | more, name=self.name))


CURVE_POINTS = 10
"""Times that held-out losses are measured in a run, beside the first and the last step: the learning curves."""


@dataclass(frozen=True, kw_only=True)
class Repetition:
    """What all runs of one seed share."""

    shape: ModelScale
    domains: Sequence[str]
    seed: int

    def run(
        self,
        name: str,
        model: str | Mapping[str, Any],
        train: TrainScale,
        *,
        stage: int = 0,
        before: int = 0,
        only: str | None = None,
        labels: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> Run:
        """A run whose name ends with the seed.

        Args:
            name: without the seed; also what the results call the model, unless `labels` say it.
            model: folder, or `{family, config, moe}`.
            train: its length and rates.
            stage: 1 and more draw other data than 0.
            before: tokens that the model has seen.
            only: train on this domain alone.
            labels: further ones.
            more: other keys of the recipe.
        """
        return Run(
            name=f"{name}-{self.seed}",
            model=model,
            train=train,
            shape=self.shape,
            sources=self.domains if only is None else (only,),
            measured=self.domains,
            seed=self.seed + stage * STAGE_SEED,
            labels={"seed": self.seed, "model": name, **(labels or {})},
            tokens_before=before,
            more=more,
        )


def train_step(*parts: Run | Command, name: str | None = None, needs: Sequence[str] = (PREPARE,)) -> Step:
    """Do runs and other commands one after the other in one process; it is called after its first run."""
    runs = [part for part in parts if isinstance(part, Run)]
    return Step(
        name=name or runs[0].name,
        commands=tuple(part.command if isinstance(part, Run) else part for part in parts),
        needs=tuple(needs),
        files={run.file: run.recipe() for run in runs},
        runs={run.folder: {**run.labels, "tokens_before": run.tokens_before} for run in runs},
        tokens=sum(run.tokens for run in runs),
    )


def task_step(
    task: str,
    name: str,
    settings: Mapping[str, Any],
    *,
    needs: Sequence[str] = (),
    labels: Mapping[str, Any] | None = None,
) -> Step:
    """Do a task of `moesaic lab task`.

    Args:
        task: its name.
        name: of the step.
        settings: keywords of the task.
        needs: steps before.
        labels: of every row that it gives, the seed first of all.
    """
    file = f"recipes/{name}.yaml"
    return Step(
        name=name,
        commands=(("lab", "task", task, file, "--quiet"),),
        needs=tuple(needs),
        files={file: dump_yaml({**settings, "labels": dict(labels or {})})},
    )


def premise_step(run: Run, domains: Sequence[str], seed: int) -> Step:
    """Measure what the claims' premises are about, on a trained model."""
    settings = {"checkpoint": run.folder, "domains": list(domains), "sequence_length": run.shape.sequence_length}
    return task_step("premise", f"premise-{seed}", settings, needs=(run.name,), labels={"seed": seed})


def experiment_plan(
    name: str,
    scale: Scale,
    data: str | None,
    *,
    parts: Mapping[str, object],
    vocabulary: int,
    seeds: int,
    steps_of_seed: Callable[[Sequence[str], int], Iterable[Step]],
    notices: Sequence[str] = (),
) -> Plan:
    """Data first, the steps of each seed, the report last.

    Args:
        name: of the experiment.
        scale: its size.
        data: folder of --data, or None.
        parts: the parts of the scale that it uses, beside `data`, by name.
        vocabulary: tokens of the tokenizer.
        seeds: repetitions.
        steps_of_seed: (domains, seed) -> steps.
        notices: what the plan leaves out or changes, and why.
    """
    domains = domains_of(data)
    settings = {**recipe_values(scale.data), "data": data, "domains": list(domains), "vocabulary": vocabulary}
    steps = [task_step("prepare", PREPARE, settings)]
    for seed in range(seeds):
        steps += steps_of_seed(domains, seed)
    steps.append(Step(name=REPORT, commands=(("lab", "report", ".", "--quiet"),), needs=tuple(s.name for s in steps)))
    return Plan(
        experiment=name,
        data=data,
        domains=domains,
        seeds=seeds,
        scale={part: recipe_values(value) for part, value in {"data": scale.data, **parts}.items()},
        steps=tuple(steps),
        notices=(*((scale.undecided,) if scale.undecided else ()), *notices),
    )


def dense_config(shape: ModelScale, intermediate_size: int) -> dict[str, Any]:
    """The Llama of an experiment, as `config` of a model from scratch."""
    return {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "max_position_embeddings": shape.sequence_length,
        "tie_word_embeddings": True,
        "initializer_range": shape.initializer_range,
    }
