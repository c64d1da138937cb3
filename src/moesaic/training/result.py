"""The end of a run: OUT becomes a plain checkpoint, beside its metrics, recipe and run state."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.core_model_loading import revert_weight_conversion

from moesaic.checkpoint.output import require_disk
from moesaic.checkpoint.pio import explained, sync_path
from moesaic.checkpoint.reader import DTYPE_CODES
from moesaic.checkpoint.record import copy_side_files, read_provenance, source_record, write_provenance
from moesaic.checkpoint.source import open_checkpoint
from moesaic.checkpoint.writer import CheckpointWriter, OutputTensor, plan_files
from moesaic.common.recipe import recipe_values
from moesaic.families.counting import count_shapes
from moesaic.modeling.modeling_moesaic import ROUTING_RULES
from moesaic.modeling.names import modeling_file
from moesaic.training.card import model_card
from moesaic.training.folder import remove
from moesaic.training.model import TrainedModel
from moesaic.training.recipe import Precision, TrainRecipe
from moesaic.training.validate import DomainLoss

DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
LAST_FILE = "config.json"  # without it a folder isn't a checkpoint


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """The outcome of `train`."""

    out: Path
    """The folder that holds the checkpoint."""
    steps: int
    """Optimizer steps of the whole run, resumed ones included."""
    tokens: int
    """Positions that these steps saw, padding included."""
    loss: float | None
    """Training loss of the last step; `None` where nothing was left to do."""
    validation: Mapping[str, DomainLoss] = field(default_factory=dict)
    """Held-out losses after the last step, by domain."""
    seconds: float
    """Of this call."""

    @property
    def summary(self) -> dict[str, Any]:
        """Everything as plain values, for `--json`."""
        return {
            "out": str(self.out),
            "steps": self.steps,
            "tokens": self.tokens,
            "loss": self.loss,
            "validation": {domain: vars(loss) for domain, loss in self.validation.items()},
            "seconds": round(self.seconds, 3),
        }

    @property
    def lines(self) -> list[str]:
        """The same for people."""
        last = "" if self.loss is None else f", loss {self.loss:.4f}"
        rows = [f"{self.out}: {self.steps:,} steps, {self.tokens:,} tokens{last}, in {self.seconds:.1f} s"]
        for domain, measured in self.validation.items():
            error = "" if measured.standard_error is None else f" +- {measured.standard_error:.4f}"
            rows.append(f"held-out {domain}: {measured.loss:.4f}{error} ({measured.documents:,} documents)")
        return rows


def write_result(
    recipe: TrainRecipe,
    out: Path,
    *,
    trained: TrainedModel,
    tensors: Mapping[str, Tensor],
    tokenizer: PreTrainedTokenizerBase,
    steps: int,
    validation: Mapping[str, DomainLoss],
    expansions: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Write the checkpoint into OUT: aside first, then moved, config.json last; the old one's config.json goes first.

    Raises: `MoesaicError` for a full disk; what OUT had is then as it was.
    """
    aside = out / "state" / "result.tmp"
    shutil.rmtree(aside, ignore_errors=True)
    with explained(aside):
        aside.mkdir()
    on_disk = revert_weight_conversion(trained.model, dict(tensors))
    digest = _write_weights(on_disk, aside)
    shapes = {name: tuple(tensor.shape) for name, tensor in on_disk.items()}
    parameters = count_shapes(shapes, trained.config.get_text_config().to_dict())
    _write_config(recipe, trained, aside)
    sources = _write_side_files(recipe, trained, tokenizer, aside)
    card = model_card(recipe, parameters=parameters, steps=steps, validation=validation)
    with explained(aside):
        (aside / "README.md").write_text(card, encoding="utf-8")
    write_provenance(
        aside,
        verb="train",
        recipe=recipe_values(recipe),
        seed=recipe.seed,
        sources=sources,
        weights_hash=digest,
        extra={
            "steps": steps,
            "tokens": steps * recipe.batch.tokens,
            "routing": routing_record(trained),
            **_experts(recipe, expansions),
        },
    )
    _move(aside, out)


def routing_record(trained: TrainedModel) -> dict[str, Any] | None:
    """What `load` reinstalls; nothing where the routers are as the checkpoint makes them."""
    installation = trained.installation
    if installation is None or (installation.config.rule is None and installation.selection_bias is None):
        return None
    return installation.to_record()


def _experts(recipe: TrainRecipe, expansions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The expansions of the run, or of which models' experts its own are a part; the ids in the first model of all."""
    known = known_experts(recipe, expansions)
    experts = {} if known is None else {"experts": known}
    if expansions:
        return experts | {"expansions": [dict(one) for one in expansions]}
    lineage = _source_record(recipe).get("lineage")
    return experts if lineage is None else experts | {"lineage": lineage}


def known_experts(recipe: TrainRecipe, expansions: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The `experts` entry of moesaic.json after these expansions: the last one's, else what the source has."""
    if expansions:
        return {"original": expansions[-1]["original"]}
    original = _source_record(recipe).get("experts", {}).get("original")
    return None if original is None else {"original": original}


def _source_record(recipe: TrainRecipe) -> dict[str, Any]:
    """moesaic.json of the checkpoint that the run started from; empty where there is none."""
    record = read_provenance(open_checkpoint(recipe.model).path) if isinstance(recipe.model, str) else None
    return record or {}


def _write_weights(tensors: Mapping[str, Tensor], folder: Path) -> str:
    layout = plan_files(
        OutputTensor(name=name, dtype=DTYPE_CODES[tensor.dtype], shape=tuple(tensor.shape))
        for name, tensor in tensors.items()
    )
    require_disk(folder, layout.nbytes)
    with CheckpointWriter(folder, layout) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor.contiguous())
        return writer.finish().weights_hash


def _write_config(recipe: TrainRecipe, trained: TrainedModel, folder: Path) -> None:
    trained.config.dtype = DTYPES[recipe.precision]
    trained.config.architectures = [type(trained.model).__name__.removeprefix("FSDP")]
    ours = trained.config.model_type.startswith("moesaic_")
    if ours:
        for key, value in _inference_rule(trained).items():
            setattr(trained.config, key, value)
    with explained(folder):
        trained.config.save_pretrained(folder)
        if ours:
            shutil.copyfile(modeling_file(), folder / modeling_file().name)


def _inference_rule(trained: TrainedModel) -> dict[str, Any]:
    """What config.json of our architecture says, so that engines without moesaic.json route as the run trained."""
    rule = None if trained.installation is None else trained.installation.config
    if rule is None or rule.rule not in ROUTING_RULES:
        return {}
    if rule.rule == "topk":
        return {"routing_rule": rule.rule, "expert_groups": None}
    given = {"expert_groups": rule.expert_groups and list(rule.expert_groups), "group_score": rule.group_score}
    return {"routing_rule": rule.rule} | {key: value for key, value in given.items() if value is not None}


def _write_side_files(
    recipe: TrainRecipe, trained: TrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> list[dict[str, Any]]:
    """Copy what comes along from the source, write the tokenizer where it is another; return the sources' records."""
    records = []
    if isinstance(recipe.model, str):
        checkpoint = open_checkpoint(recipe.model)
        record = read_provenance(checkpoint.path) or {}
        records.append(source_record(checkpoint, record.get("weights_hash")))
        if recipe.tokenizer is None:
            copy_side_files(checkpoint, folder)
            return records
    with explained(folder):
        tokenizer.save_pretrained(folder)
        _generation_config(recipe, trained).save_pretrained(folder)
    return records


def _generation_config(recipe: TrainRecipe, trained: TrainedModel) -> GenerationConfig:
    """The source's where it has one; not the model's, which a resumed or grown one may not have from there."""
    if isinstance(recipe.model, str):
        folder = open_checkpoint(recipe.model).path
        if (folder / "generation_config.json").exists():
            return GenerationConfig.from_pretrained(folder)
    return GenerationConfig.from_model_config(trained.config)


def _move(aside: Path, out: Path) -> None:
    with explained(out):
        (out / LAST_FILE).unlink(missing_ok=True)
        for old in out.glob("model*.safetensors*"):
            old.unlink()
        names = sorted((path.name for path in aside.iterdir()), key=lambda name: (name == LAST_FILE, name))
        for name in names:
            target = out / name
            if target.is_dir():
                remove(target)
            if (aside / name).is_file():
                sync_path(aside / name)
            (aside / name).rename(target)
            if name == names[-2]:
                sync_path(out)  # everything is in place before config.json says that it is
        sync_path(out)
        aside.rmdir()
