"""The verb `inspect`: run a model on text once, and write down what its routers do."""

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from moesaic.analysis.documents import Entries, Sample, draw_sample, frequent_tokens, string_of
from moesaic.analysis.format import write_inspection
from moesaic.analysis.health import RULE, layer_verdict, model_verdict
from moesaic.analysis.inspection import DataFacts, DomainFacts, Inspection, ModelFacts, Statistics, level_name
from moesaic.analysis.recipe import InspectRecipe
from moesaic.analysis.summary import visible
from moesaic.checkpoint.headers import VOCABULARY_FILES
from moesaic.checkpoint.output import check_target, output_folder, require_disk
from moesaic.checkpoint.record import read_provenance, side_files, versions
from moesaic.checkpoint.source import Checkpoint, open_checkpoint
from moesaic.common.errors import MoesaicError
from moesaic.common.progress import amount
from moesaic.common.recipe import recipe_values
from moesaic.common.verbs import verb
from moesaic.data.files import PREFIX
from moesaic.families.identity import describe as identify
from moesaic.families.identity import group_count
from moesaic.families.moe import MoEModel, detect_running
from moesaic.families.moe_table import KNOWN, family_of

if TYPE_CHECKING:
    from moesaic.analysis.capture import Capture, RouterShape
    from moesaic.analysis.clusters import TokenClusters
    from moesaic.routing.capture import Scoring

MOST_DOMAINS = 256
"""Most statistics are kept per domain; so many values are no names of domains, but of records."""
_CAPTURE = "capture"
_AGAINST = "against"
_COMPARED_DOCUMENTS = 1000
_SHARED_KEYS = ("num_shared_experts", "n_shared_experts")
_MOST_RUNS = 1000
"""Training runs, each from the one before, that are followed back to the upcycling; a circle of them ends."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Prepared:
    """Everything that is known before a model runs."""

    recipe: InspectRecipe
    out: Path
    checkpoints: tuple[Checkpoint, ...]
    """One, or with `against` two."""
    models: tuple[ModelFacts, ...]
    data: DataFacts
    sample: Sample
    tokenizer: Any
    disk_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """What would be done, as plain values."""
        return {
            "models": [recipe_values(model) for model in self.models],
            "data": recipe_values(self.data),
            "capture_bytes": self.disk_bytes,
            "out": str(self.out),
        }

    def lines(self) -> list[str]:
        """What would be done, for people."""
        data = self.data
        domains = ", ".join(f"{visible(domain.name)} {domain.tokens:,}" for domain in data.domains)
        return [
            *(
                f"{model.name}: {len(model.layers)} MoE layers of {model.num_experts} experts, {model.top_k} per token"
                for model in self.models
            ),
            f"{data.tokens:,} tokens of {data.documents:,} documents: {domains}",
            f"would write {amount(self.disk_bytes)} of router logits and the results to {self.out}",
        ]


@verb(
    InspectRecipe,
    positional=("checkpoint",),
    out="folder",
    convert={"data": lambda data: (str(data),) if isinstance(data, str | Path) else tuple(map(str, data))},
)
def inspect(
    recipe: InspectRecipe,
    out: str | Path,
    *,
    overwrite: bool = False,
    quiet: bool = True,
) -> Inspection:
    """Run an MoE model on text and write what its routers do with it: health, domains, clusters, experts.

    Documents are chosen as in EMO: the first 100 tokens of those with 32 to 2,048. The folder is described in
    `moesaic.analysis.format`.

    Raises:
        MoesaicError: a model without routers or tokenizer, data without fitting documents, a folder that exists.
    """
    prepared = prepare(recipe, Path(out), overwrite=overwrite, quiet=quiet)
    sources = [checkpoint.path for checkpoint in prepared.checkpoints]  # which must not be written into
    with output_folder(prepared.out, overwrite, sources=sources) as folder:
        made = []
        for index, name in enumerate(("", _AGAINST)[: len(prepared.models)]):
            place = folder / name
            place.mkdir(exist_ok=True)
            made.append(_inspect_one(prepared, index, place, quiet=quiet))
        inspection = replace(made[0], against=made[1]) if len(made) > 1 else made[0]
        write_inspection(inspection, folder)
    return inspection


def prepare(recipe: InspectRecipe, out: Path, *, overwrite: bool = False, quiet: bool = True) -> Prepared:
    """What `inspect` does before a model runs: check models, target and data, and draw the documents."""
    names = [recipe.checkpoint, *([] if recipe.against is None else [recipe.against])]
    checkpoints = tuple(open_checkpoint(name) for name in names)
    models = tuple(_model_facts(checkpoint, _open_routers(checkpoint)) for checkpoint in checkpoints)
    check_target(out, overwrite, sources=[checkpoint.path for checkpoint in checkpoints])
    # After everything that can be refused without torch.
    from moesaic.analysis.clusters import require_scikit_learn
    from moesaic.loading import load_tokenizer

    if recipe.clusters:
        require_scikit_learn()
    tokenizer = load_tokenizer(checkpoints[0].path)
    entries = Entries(recipe.data, recipe.domain_field, shots=recipe.shots, data_dir=recipe.data_dir, quiet=quiet)
    vocabulary = min(int(checkpoint.config["vocab_size"]) for checkpoint in checkpoints)
    name = ", ".join(one if one.startswith(PREFIX) else str(Path(one)) for one in recipe.data)
    sample = draw_sample(entries, tokenizer, recipe, vocab_size=vocabulary, name=name)
    if len(sample.domains) > MOST_DOMAINS:
        raise MoesaicError(
            f"--domain-field {entries.domain_field or ''}: has {len(sample.domains)} different values, at most "
            f"{MOST_DOMAINS} can be domains; choose a coarser field"
        )
    for checkpoint in checkpoints[1:]:
        _refuse_other_tokens(checkpoint, tokenizer, sample)
    disk_bytes = sum(_shape(model).token_bytes for model in models) * sample.tokens
    require_disk(out, disk_bytes)
    return Prepared(
        recipe=recipe,
        out=out,
        checkpoints=checkpoints,
        models=models,
        data=_data_facts(recipe, entries, sample),
        sample=sample,
        tokenizer=tokenizer,
        disk_bytes=disk_bytes,
    )


class Groups(NamedTuple):
    """Group of each expert, per MoE layer, and what they are."""

    of_experts: tuple[tuple[int, ...], ...] | None
    words: str


def _open_routers(checkpoint: Checkpoint) -> MoEModel:
    """The experts of a checkpoint; a model without routers is refused in words of its own."""
    config = checkpoint.config
    if family_of(config) is None:
        raise MoesaicError(
            f"{checkpoint.name}: has no routers to look into: model_type {config.get('model_type')!r} is no MoE family "
            f"known here ({KNOWN})"
        )
    model = detect_running(checkpoint)
    if model.family.scoring == "unknown":
        raise MoesaicError(
            f"{checkpoint.name}: how routers of {config.get('model_type')} turn logits into probabilities is not known"
        )
    return model


def _model_facts(checkpoint: Checkpoint, model: MoEModel) -> ModelFacts:
    """Everything about the model that does not depend on data; reads a sample of each tensor for the hash."""
    source = identify(checkpoint, model)
    groups = _find_groups(checkpoint, model)
    return ModelFacts(
        name=source.name,
        revision=source.revision,
        model_type=source.model_type,
        sample_hash=source.sample_hash,
        num_layers=int(checkpoint.config["num_hidden_layers"]),
        layers=source.layers,
        num_experts=source.num_experts,
        top_k=source.top_k,
        num_shared_experts=_shared_experts(checkpoint, model),
        scoring=cast("Scoring", model.family.scoring),  # `_open_routers` refuses a rule that is not known
        groups=groups.of_experts,
        groups_are=groups.words,
    )


def _find_groups(checkpoint: Checkpoint, model: MoEModel) -> Groups:
    """The groups of the routing rule, or of what the experts were made from; none where neither is known."""
    layers, experts = len(model.layers), model.num_experts
    rule = ((read_provenance(checkpoint.path) or {}).get("routing") or {}).get("rule") or {}
    for groups in (rule.get("expert_groups"), checkpoint.config.get("expert_groups")):
        if groups:
            return Groups(_rows(groups, layers), "expert groups of the routing rule one_per_group")
    if (count := group_count(checkpoint.config, model)) > 1:
        row = tuple(expert * count // experts for expert in range(experts))
        return Groups((row,) * layers, "expert groups of the family's group-limited router")
    if (shards := _shards(checkpoint)) and experts % shards == 0 and experts > shards > 1:
        row = tuple(expert // shards for expert in range(experts))
        return Groups((row,) * layers, f"the {shards} shards of one FFN, as upcycling cut it")
    return Groups(None, "")


def _rows(groups: Sequence[Any], layers: int) -> tuple[tuple[int, ...], ...]:
    if isinstance(groups[0], Sequence):
        return tuple(tuple(map(int, row)) for row in groups)
    return (tuple(map(int, groups)),) * layers


def _shards(checkpoint: Checkpoint) -> int | None:
    """Shards that upcycling cut each FFN into, for a checkpoint that was upcycled, or trained from such a one."""
    folder = checkpoint.path
    for _ in range(_MOST_RUNS):
        record = read_provenance(folder) or {}
        if record.get("verb") == "upcycle":
            width, part = (checkpoint.config.get(key) for key in ("intermediate_size", "moe_intermediate_size"))
            return width // part if isinstance(width, int) and isinstance(part, int) and part else None
        sources = record.get("sources") or []
        if record.get("verb") != "train" or len(sources) != 1:
            return None
        folder = Path(str(sources[0].get("path")))
    return None


def _shared_experts(checkpoint: Checkpoint, model: MoEModel) -> int:
    for key in _SHARED_KEYS:
        if isinstance(checkpoint.config.get(key), int):
            return checkpoint.config[key]
    return int(any(layer.shared for layer in model.layers))


def _refuse_other_tokens(checkpoint: Checkpoint, tokenizer: Any, sample: Sample) -> None:
    """Two models are compared token by token, so their tokenizers must agree; one without a tokenizer takes these."""
    if not side_files(checkpoint, VOCABULARY_FILES):
        return
    from moesaic.loading import load_tokenizer

    texts = [text.text for text in sample.documents[:_COMPARED_DOCUMENTS]]
    other = load_tokenizer(checkpoint.path)
    if tokenizer(texts, verbose=False)["input_ids"] != other(texts, verbose=False)["input_ids"]:
        raise MoesaicError(
            f"--against {checkpoint.name}: its tokenizer makes other tokens of the same text; inspect it on its own"
        )


def _shape(facts: ModelFacts) -> "RouterShape":
    from moesaic.analysis.capture import RouterShape

    return RouterShape(layers=facts.layers, experts=facts.num_experts, active=facts.top_k)


def _data_facts(recipe: InspectRecipe, entries: Entries, sample: Sample) -> DataFacts:
    lengths_D = np.diff(sample.start_D1)
    return DataFacts(
        sources=recipe.data,
        domain_field=entries.domain_field,
        domains=tuple(
            DomainFacts(
                name=name,
                documents=int((sample.domain_D == index).sum()),
                tokens=int(lengths_D[sample.domain_D == index].sum()),
            )
            for index, name in enumerate(sample.domains)
        ),
        documents=len(sample.documents),
        tokens=sample.tokens,
        document_tokens=recipe.document_tokens,
        similarity_tokens=recipe.similarity_tokens,
        min_length=recipe.min_length,
        max_length=recipe.max_length,
        records=sample.records,
        too_short=sample.too_short,
        too_long=sample.too_long,
        seed=recipe.seed,
    )


def _inspect_one(prepared: Prepared, index: int, folder: Path, *, quiet: bool) -> Inspection:
    from moesaic.analysis.capture import capture, open_capture
    from moesaic.loading import load

    recipe, facts, sample = prepared.recipe, prepared.models[index], prepared.sample
    model = load(prepared.checkpoints[index].path, device=recipe.device, dtype=recipe.dtype)
    row = family_of(prepared.checkpoints[index].config)
    shape = replace(_shape(facts), returns=row.returns if row is not None else "logits")
    probability_NLE = capture(
        model, sample, shape, folder / _CAPTURE, scoring=facts.scoring, batch_size=recipe.batch_size, quiet=quiet
    )
    del model
    gc.collect()  # modules refer to each other, and the second model needs the memory
    with open_capture(folder / _CAPTURE) as opened:
        return _assemble(opened, probability_NLE, prepared, facts, scratch=folder / "rows.npy", quiet=quiet)


def _assemble(
    capture: "Capture",
    probability_NLE: np.ndarray,
    prepared: Prepared,
    model: ModelFacts,
    *,
    scratch: Path,
    quiet: bool,
) -> Inspection:
    """Measure, cluster and describe one model's capture; `scratch` is a file that is made and removed."""
    from moesaic.analysis import describe
    from moesaic.analysis.clusters import cluster_tokens
    from moesaic.analysis.measure import derive, first_token_cosine, measure

    sample, data, seed = prepared.sample, prepared.data, prepared.recipe.seed
    source = describe.Source(
        sample=sample, vocabulary=frequent_tokens(sample.ids_T), string=string_of(prepared.tokenizer)
    )
    measured = measure(
        capture, sample, model.scoring, source.vocabulary, document_tokens=data.document_tokens, quiet=quiet
    )
    numbers = derive(measured, probability_NLE, active=model.top_k, groups=model.groups)
    mean_F = numbers["mass_SLE"][0].reshape(-1)
    found = cluster_tokens(
        capture, model.scoring, mean_F, scratch, clusters=prepared.recipe.clusters, seed=seed, quiet=quiet
    )
    clusters, why_no_clusters = (None, found) if isinstance(found, str) else (found, "")
    clustering = None if clusters is None else describe.describe_clusters(source, clusters, seed=seed)
    statistics = Statistics(**numbers, **_cluster_numbers(clusters, sample, model))
    cluster_T = statistics.token_cluster_T
    verdicts = tuple(
        layer_verdict(layer, level_name(statistics.level_SL[0, row]), statistics.load_SLE[0, row], model.top_k)
        for row, layer in enumerate(model.layers)
    )
    return Inspection(
        model=model,
        data=data,
        verdict=model_verdict(verdicts, statistics.effective_SL[0]),
        verdicts=verdicts,
        rule=RULE,
        clustering=clustering,
        why_no_clusters=why_no_clusters,
        first_token=describe.describe_first_token(sample, cluster_T, first_token_cosine(measured)),
        versions=versions() | ({"scikit-learn": version("scikit-learn")} if prepared.recipe.clusters else {}),
        documents=describe.describe_documents(sample, cluster_T),
        experts=describe.describe_experts(
            source, measured, model.layers, statistics.counts_SLE[0], statistics.pairs_LEE
        ),
        statistics=statistics,
        reader=describe.make_reader(source, capture, cluster_T, clustering.clusters if clustering else ()),
    )


def _cluster_numbers(clusters: "TokenClusters | None", sample: Sample, model: ModelFacts) -> dict[str, np.ndarray]:
    from moesaic.analysis.measure import cosine

    if clusters is None:
        return {
            "cluster_mass_CLE": np.zeros((0, len(model.layers), model.num_experts)),
            "cluster_cosine_CC": np.zeros((0, 0)),
            "token_cluster_T": np.full(sample.tokens, -1, dtype=np.int16),
        }
    return {
        "cluster_mass_CLE": clusters.mass_CLE,
        "cluster_cosine_CC": cosine(clusters.clusters.centres_CP),
        "token_cluster_T": clusters.clusters.cluster_T,
    }
