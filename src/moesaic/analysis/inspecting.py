"""The verb `inspect`: run a model on text once, and write down what its routers do."""

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesaic.analysis.documents import Choice, Sample, draw_sample
from moesaic.analysis.facts import model_facts, open_routers
from moesaic.analysis.format import write_inspection
from moesaic.analysis.inspection import DataFacts, DomainFacts, Inspection, ModelFacts
from moesaic.analysis.records import Entries, data_name
from moesaic.analysis.request import InspectRequest, parse_count
from moesaic.analysis.terminal import visible
from moesaic.checkpoint.headers import VOCABULARY_FILES
from moesaic.checkpoint.output import check_target, output_folder, require_disk
from moesaic.checkpoint.record import side_files, versions
from moesaic.checkpoint.source import Checkpoint, open_checkpoint
from moesaic.common.errors import MoesaicError
from moesaic.common.progress import amount
from moesaic.common.recipe import recipe_values

if TYPE_CHECKING:
    from moesaic.analysis.capture import RouterShape

MOST_DOMAINS = 256
_CAPTURE = "capture"
_AGAINST = "against"
_COMPARED_DOCUMENTS = 1000


def inspect(
    checkpoint: str | Path,
    out: str | Path,
    *,
    data: str | Path | Sequence[str | Path],
    domain_field: str | None = None,
    tokens: str | int = 1_000_000,
    against: str | Path | None = None,
    document_tokens: int = 100,
    min_length: int = 32,
    max_length: int = 2048,
    clusters: int = 32,
    batch_size: int = 16,
    device: str | None = None,
    dtype: str | None = None,
    seed: int = 0,
    overwrite: bool = False,
    quiet: bool = True,
) -> Inspection:
    """Run an MoE model on text and write what its routers do with it: health, domains, clusters, experts.

    Args:
        checkpoint: the model: folder, or hub id `org/name[@revision]`, with its tokenizer.
        out: folder to write, see `moesaic.analysis.format`.
        data: files, folders or `hf://` data sets of text.
        domain_field: field of the records that names their domain; default: `domain` where they have it, else the
            file's name up to its first dot.
        tokens: at most so many, such as "1M".
        against: a second model with the same tokenizer, for the same documents.
        document_tokens: the first tokens of each document that are used (EMO: 100).
        min_length: documents with fewer tokens are left out (EMO: 32).
        max_length: documents with more are left out (EMO: 2048).
        clusters: of tokens (EMO: 32).
        batch_size: documents at once; changes nothing beyond rounding.
        device: default: cuda if there is one, else cpu.
        dtype: that the model runs in; default: the checkpoint's.
        seed: of the sample and of the clusters.
        overwrite: replace `out` if it exists.
        quiet: print no progress and no notices.

    Raises:
        MoesaicError: a model without routers or tokenizer, data without fitting documents, a folder that exists.
    """
    request = InspectRequest(
        checkpoint=checkpoint,
        data=(str(data),) if isinstance(data, str | Path) else tuple(map(str, data)),
        domain_field=domain_field,
        against=against,
        choice=Choice(
            tokens=parse_count(tokens, "--tokens"),
            document_tokens=document_tokens,
            min_length=min_length,
            max_length=max_length,
            seed=seed,
        ),
        clusters=clusters,
        batch_size=batch_size,
        device=device,
        dtype=dtype,
    )
    return run_inspection(prepare(request, Path(out), overwrite=overwrite, quiet=quiet), quiet=quiet)


@dataclass(frozen=True, kw_only=True, eq=False)
class Prepared:
    """Everything that is known before a model runs."""

    request: InspectRequest
    out: Path
    overwrite: bool
    checkpoints: tuple[Checkpoint, ...]
    """One, or with `against` two."""
    models: tuple[ModelFacts, ...]
    data: DataFacts
    sample: Sample
    tokenizer: Any
    disk_bytes: int

    @property
    def sources(self) -> list[Path]:
        """Folders that must not be written into."""
        return [checkpoint.path for checkpoint in self.checkpoints]

    @property
    def document(self) -> dict[str, Any]:
        """What would be done, as plain values."""
        return {
            "models": [recipe_values(model) for model in self.models],
            "data": recipe_values(self.data),
            "capture_bytes": self.disk_bytes,
            "out": str(self.out),
        }

    @property
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


def prepare(request: InspectRequest, out: Path, *, overwrite: bool = False, quiet: bool = True) -> Prepared:
    """Check models, target and data, and draw the documents."""
    names = [request.checkpoint, *([] if request.against is None else [request.against])]
    checkpoints = tuple(open_checkpoint(name) for name in names)
    models = tuple(model_facts(checkpoint, open_routers(checkpoint)) for checkpoint in checkpoints)
    check_target(out, overwrite, sources=[checkpoint.path for checkpoint in checkpoints])
    # After everything that can be refused without torch.
    from moesaic.analysis.clusters import require_scikit_learn
    from moesaic.loading import load_tokenizer

    require_scikit_learn()
    tokenizer = load_tokenizer(checkpoints[0].path)
    entries = Entries(request.data, request.domain_field, quiet=quiet)
    vocabulary = min(int(checkpoint.config["vocab_size"]) for checkpoint in checkpoints)
    name = data_name(request.data)
    sample = draw_sample(entries, tokenizer, request.choice, vocab_size=vocabulary, name=name)
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
        request=request,
        out=out,
        overwrite=overwrite,
        checkpoints=checkpoints,
        models=models,
        data=_data_facts(request, entries, sample),
        sample=sample,
        tokenizer=tokenizer,
        disk_bytes=disk_bytes,
    )


def run_inspection(prepared: Prepared, *, quiet: bool = True) -> Inspection:
    """Run the models, derive everything and write the folder."""
    with output_folder(prepared.out, prepared.overwrite, sources=prepared.sources) as folder:
        made = []
        for index, name in enumerate(("", _AGAINST)[: len(prepared.models)]):
            place = folder / name
            place.mkdir(exist_ok=True)
            made.append(_inspect_one(prepared, index, place, quiet=quiet))
        inspection = replace(made[0], against=made[1]) if len(made) > 1 else made[0]
        write_inspection(inspection, folder)
    return inspection


def _inspect_one(prepared: Prepared, index: int, folder: Path, *, quiet: bool) -> Inspection:
    from moesaic.analysis.assemble import assemble
    from moesaic.analysis.capture import capture, open_capture
    from moesaic.loading import load

    request, facts = prepared.request, prepared.models[index]
    model = load(prepared.checkpoints[index].path, device=request.device, dtype=request.dtype)
    capture(
        model,
        prepared.sample,
        _shape(facts),
        folder / _CAPTURE,
        batch_size=request.batch_size,
        quiet=quiet,
    )
    del model
    gc.collect()  # modules refer to each other, and the second model needs the memory
    with open_capture(folder / _CAPTURE) as opened:
        return assemble(
            opened,
            prepared.sample,
            facts,
            prepared.data,
            prepared.tokenizer,
            scratch=folder / "rows.npy",
            clusters=request.clusters,
            versions=versions() | {"scikit-learn": version("scikit-learn")},
            quiet=quiet,
        )


def _shape(facts: ModelFacts) -> "RouterShape":
    from moesaic.analysis.capture import RouterShape

    return RouterShape(layers=facts.layers, experts=facts.num_experts, active=facts.top_k)


def _data_facts(request: InspectRequest, entries: Entries, sample: Sample) -> DataFacts:
    choice = request.choice
    lengths_D = [len(text.ids) for text in sample.documents]
    return DataFacts(
        sources=request.data,
        domain_field=entries.domain_field,
        domains=tuple(
            DomainFacts(
                name=name,
                documents=int((sample.domain_D == index).sum()),
                tokens=sum(
                    length for length, domain in zip(lengths_D, sample.domain_D, strict=True) if domain == index
                ),
            )
            for index, name in enumerate(sample.domains)
        ),
        documents=len(sample.documents),
        tokens=sample.tokens,
        document_tokens=choice.document_tokens,
        min_length=choice.min_length,
        max_length=choice.max_length,
        records=sample.records,
        too_short=sample.too_short,
        too_long=sample.too_long,
        seed=choice.seed,
    )


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
