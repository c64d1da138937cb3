"""The end of a run: OUT becomes a plain checkpoint, beside its metrics, recipe and run state."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import GenerationConfig
from transformers.core_model_loading import revert_weight_conversion

from moesaic.checkpoint.output import require_disk
from moesaic.checkpoint.pio import explained, sync_path
from moesaic.checkpoint.reader import DTYPE_CODES
from moesaic.checkpoint.record import copy_side_files, read_provenance, source_record, write_provenance
from moesaic.checkpoint.source import open_checkpoint
from moesaic.checkpoint.writer import CheckpointWriter, OutputTensor, plan_files
from moesaic.common.recipe import dump_recipe, recipe_values
from moesaic.families.counting import count_shapes
from moesaic.families.family import our_base
from moesaic.families.moe import PREDICTION_KEY
from moesaic.modeling.cross_entropy import DomainLoss
from moesaic.modeling.modeling_moesaic import ROUTING_RULES
from moesaic.modeling.names import modeling_file
from moesaic.training.folder import remove
from moesaic.training.recipe import TrainRecipe
from moesaic.training.start import DTYPES, Trainable

if TYPE_CHECKING:
    from moesaic.training.session import Session

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


def write_result(run: "Session", tensors: Mapping[str, Tensor]) -> None:
    """Write the checkpoint into OUT: aside first, then moved, config.json last; the old one's config.json goes first.

    Raises: `MoesaicError` for a full disk; what OUT had is then as it was.
    """
    recipe, trainable = run.recipe, run.trainable
    aside = run.out / "state" / "result.tmp"
    shutil.rmtree(aside, ignore_errors=True)
    with explained(aside):
        aside.mkdir()
    on_disk = revert_weight_conversion(trainable.model, dict(tensors))
    digest = write_weights(on_disk, aside)
    _write_config(trainable, aside)
    sources = _write_side_files(run, aside)
    with explained(aside):
        (aside / "README.md").write_text(_card(run, on_disk), encoding="utf-8")
    write_provenance(
        aside,
        verb="train",
        recipe=recipe_values(recipe),
        seed=recipe.seed,
        sources=sources,
        weights_hash=digest,
        extra={
            "steps": run.step,
            "tokens": run.tokens,
            "routing": routing_record(trainable),
            **_experts(recipe, run.expansions),
        },
    )
    _move(aside, run.out)


def routing_record(trainable: Trainable) -> dict[str, Any] | None:
    """What `load` reinstalls; nothing where the routers are as the checkpoint makes them."""
    installation = trainable.installation
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


def write_weights(tensors: Mapping[str, Tensor], folder: Path, values: Callable[[str], Tensor] | None = None) -> str:
    """Write tensors as a checkpoint's files; return the hash of all of them.

    `values` gives a tensor's numbers by its name when it is written, where `tensors` only have its type and shape.
    """
    layout = plan_files(
        OutputTensor(name=name, dtype=DTYPE_CODES[tensor.dtype], shape=tuple(tensor.shape))
        for name, tensor in tensors.items()
    )
    require_disk(folder, layout.nbytes)
    with CheckpointWriter(folder, layout) as writer:
        for name in tensors:
            writer.write(name, (values or tensors.__getitem__)(name).contiguous())
        return writer.finish().weights_hash


def _write_config(trainable: Trainable, folder: Path) -> None:
    config = trainable.config
    config.dtype = DTYPES[trainable.recipe.precision]
    config.architectures = [type(trainable.model).__name__.removeprefix("FSDP")]
    if getattr(config, PREDICTION_KEY, None):
        setattr(config, PREDICTION_KEY, 0)  # transformers does not load such layers, so the result has none
    ours = our_base(config.model_type) is not None
    if ours:
        for key, value in _inference_rule(trainable).items():
            setattr(config, key, value)
    with explained(folder):
        config.save_pretrained(folder)
        if ours:
            shutil.copyfile(modeling_file(), folder / modeling_file().name)


def _inference_rule(trainable: Trainable) -> dict[str, Any]:
    """What config.json of our architecture says, so that engines without moesaic.json route as the run trained."""
    rule = None if trainable.installation is None else trainable.installation.config
    if rule is None or rule.rule not in ROUTING_RULES:
        return {}
    if rule.rule == "topk":
        return {"routing_rule": rule.rule, "expert_groups": None}
    given = {"expert_groups": rule.expert_groups and list(rule.expert_groups), "group_score": rule.group_score}
    return {"routing_rule": rule.rule} | {key: value for key, value in given.items() if value is not None}


def _write_side_files(run: "Session", folder: Path) -> list[dict[str, Any]]:
    """Copy what comes along from the source, write the tokenizer where it is another; return the sources' records."""
    recipe, records = run.recipe, []
    generation = GenerationConfig.from_model_config(run.trainable.config)
    if isinstance(recipe.model, str):
        checkpoint = open_checkpoint(recipe.model)
        record = read_provenance(checkpoint.path) or {}
        records.append(source_record(checkpoint, record.get("weights_hash")))
        if recipe.tokenizer is None:
            copy_side_files(checkpoint, folder)
            return records
        if (checkpoint.path / "generation_config.json").exists():
            # Not the model's own, which a resumed or grown one may not have from there.
            generation = GenerationConfig.from_pretrained(checkpoint.path)
    with explained(folder):
        run.tokenizer.save_pretrained(folder)
        generation.save_pretrained(folder)
    return records


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


def _card(run: "Session", tensors: Mapping[str, Tensor]) -> str:
    """README.md with the hub's metadata: what was trained, on what, how, and the held-out losses."""
    recipe = run.recipe
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    parameters = count_shapes(shapes, run.trainable.config.get_text_config().to_dict())
    source = recipe.model if isinstance(recipe.model, str) else f"{recipe.model.family}, from random weights"
    experts = ""
    if parameters.moe_layers:
        experts = f"; {parameters.top_k} of {parameters.num_experts} experts in {parameters.moe_layers} layers"
    tags = ["- moe", "- mixture-of-experts"] if parameters.moe_layers else []
    lines = [
        *("---", "library_name: transformers", "pipeline_tag: text-generation", "tags:", *tags, "- moesaic", "---", ""),
        f"# Trained from {source}",
        "",
        f"- {parameters.total:,} parameters, {parameters.active:,} active per token{experts}",
        f"- {run.step:,} steps of {recipe.batch.tokens:,} tokens, sequences of {recipe.data.sequence_length:,}",
        f"- routing during training: {recipe.routing.rule or 'as at inference'}",
        "",
    ]
    if run.validation:
        lines += ["| held-out | loss (nats per token) | standard error | documents |", "|---|---|---|---|"]
        lines += [
            f"| {domain} | {measured.loss:.4f} | {_error(measured)} | {measured.documents:,} |"
            for domain, measured in run.validation.items()
        ]
        lines.append("")
    lines += ["Recipe:", "", "```yaml", dump_recipe(recipe).rstrip(), "```", ""]
    return "\n".join(lines)


def _error(measured: DomainLoss) -> str:
    return "" if measured.standard_error is None else f"{measured.standard_error:.4f}"
