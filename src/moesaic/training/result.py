"""The end of a run: OUT becomes a plain checkpoint, beside its metrics, recipe and run state."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import GenerationConfig
from transformers.core_model_loading import revert_weight_conversion

from moesaic.checkpoint.config_file import CONFIG_FILE, with_source_keys, write_config
from moesaic.checkpoint.metrics import METRICS_FILE, Step, read_metrics
from moesaic.checkpoint.output import require_disk
from moesaic.checkpoint.pio import sync_path
from moesaic.checkpoint.reader import DTYPE_CODES
from moesaic.checkpoint.record import (
    copy_side_files,
    how_to_load,
    read_provenance,
    source_record,
    write_card,
    write_provenance,
)
from moesaic.checkpoint.same_tokens import keep_ids
from moesaic.checkpoint.source import open_checkpoint
from moesaic.checkpoint.writer import CheckpointWriter, OutputTensor, plan_files
from moesaic.common.files import explained
from moesaic.common.progress import warn
from moesaic.common.recipe import dump_recipe, recipe_values
from moesaic.common.shown import Shown
from moesaic.families.counting import count_shapes
from moesaic.families.family import base_of, our_base
from moesaic.families.moe import PREDICTION_KEYS
from moesaic.loading import load_generation_config
from moesaic.modeling.cross_entropy import DomainLoss
from moesaic.modeling.modeling_moesaic import ROUTING_RULES
from moesaic.modeling.names import modeling_file
from moesaic.routing.config import RuleConfig
from moesaic.routing.own_bias import OWN_BIAS, bias_tensors
from moesaic.training.folder import remove
from moesaic.training.recipe import TrainRecipe
from moesaic.training.start import DTYPES, Trainable, token_ids

if TYPE_CHECKING:
    from moesaic.training.session import Session

LAST_FILE = CONFIG_FILE  # without it a folder isn't a checkpoint


@dataclass(frozen=True, kw_only=True, repr=False)
class TrainResult(Shown):
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

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, for `--json`."""
        return {
            "out": str(self.out),
            "steps": self.steps,
            "tokens": self.tokens,
            "loss": self.loss,
            "validation": {domain: vars(loss) for domain, loss in self.validation.items()},
            "seconds": round(self.seconds, 3),
        }

    def lines(self) -> list[str]:
        """The same for people."""
        last = "" if self.loss is None else f", loss {self.loss:.4f}"
        rows = [f"{self.out}: {self.steps:,} steps, {self.tokens:,} tokens{last}, in {self.seconds:.1f} s"]
        for domain, measured in self.validation.items():
            error = "" if measured.standard_error is None else f" +- {measured.standard_error:.4f}"
            rows.append(f"held-out {domain}: {measured.loss:.4f}{error} ({measured.documents:,} documents)")
        return rows

    def rows(self) -> list[dict[str, Any]]:
        """The learning curve, a row per optimizer step of the run."""
        lines = read_metrics(self.out / METRICS_FILE)
        return [
            {key: value for key, value in vars(line).items() if key not in ("domain_loss", "timing")}
            for line in lines
            if isinstance(line, Step)
        ]


def write_result(run: "Session", tensors: Mapping[str, Tensor]) -> None:
    """Write the checkpoint into OUT: aside first, then moved, config.json last; the old one's config.json goes first.

    Raises: `MoesaicError` for a full disk; what OUT had is then as it was.
    """
    recipe, trainable = run.recipe, run.trainable
    aside = run.out / "state" / "result.tmp"
    shutil.rmtree(aside, ignore_errors=True)
    with explained(aside):
        aside.mkdir()
    on_disk = revert_weight_conversion(trainable.model, dict(tensors) | own_biases(trainable))
    digest = write_weights(on_disk, aside)
    text = trainable.config.get_text_config()
    ids = token_ids(recipe, text.to_dict(), run.tokenizer)
    for key, value in ids.items():
        setattr(text, key, value)
    config = _write_config(run, aside)
    sources = _write_side_files(run, aside, ids)
    if differs := keep_ids(run.tokenizer, aside):
        warn(differs)
    write_card(aside, _card(run, on_disk) + how_to_load(aside, config))
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
            "routing": _record_beside(own_biases(trainable), trainable),
            **_experts(recipe, run.expansions),
        },
    )
    _move(aside, run.out)


def routing_record(trainable: Trainable) -> dict[str, Any] | None:
    """What `load` reinstalls on a state of the run; nothing where the routers are as that makes them."""
    installation = trainable.installation
    if installation is None or (installation.config.rule is None and installation.selection_bias is None):
        return None
    return installation.to_record()


def _record_beside(biases: Mapping[str, Tensor], trainable: Trainable) -> dict[str, Any] | None:
    """The same of the finished checkpoint, whose own tensors may have the bias."""
    record = routing_record(trainable)
    if record is None or not biases:
        return record
    return None if record["rule"]["rule"] is None else record | {"selection_bias": None}


def own_biases(trainable: Trainable) -> dict[str, Tensor]:
    """The selection biases as tensors of the model, by name, where a run has them: in our architecture, and in families
    that have such tensors themselves.

    So every engine that runs the model's own code has them, and nothing that copies weights can lose them.
    """
    installation = trainable.installation
    if installation is None or installation.selection_bias is None:
        return {}
    rows = dict(zip(map(id, installation.routers), installation.selection_bias.cpu(), strict=True))
    if our_base(trainable.config.model_type) is not None:
        modules = trainable.model.named_modules()
        return {f"{name}.{OWN_BIAS}": rows[id(module)] for name, module in modules if id(module) in rows}
    own = bias_tensors(trainable.model).items()
    return {name: rows[id(router)].reshape(tensor.shape).to(tensor.dtype) for name, (router, tensor) in own}


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


def _write_config(run: "Session", folder: Path) -> dict[str, Any]:
    """Write config.json, with all that the source's said, and the code of our architecture; returns what was written.

    Training's own switches are not in it: `trainable.config` is not the config of the model that trains.
    """
    trainable, recipe = run.trainable, run.recipe
    config = trainable.config
    config.dtype = DTYPES[recipe.precision]
    config.architectures = [type(trainable.model).__name__.removeprefix("FSDP")]
    ours = base_of(config.model_type) is not None
    if ours:
        bias = {"selection_bias": bool(own_biases(trainable))} if our_base(config.model_type) else {}
        rule = inference_rule(trainable.installation and trainable.installation.config)
        for key, value in (rule | bias).items():
            setattr(config, key, value)
    source = open_checkpoint(recipe.model).config if isinstance(recipe.model, str) and not run.expansions else {}
    written = with_source_keys(config.to_diff_dict(), source)
    # transformers does not load layers for multi-token prediction, so the result has none.
    written |= dict.fromkeys((key for key in PREDICTION_KEYS if written.get(key)), 0)
    write_config(folder, written)
    if ours:
        with explained(folder):
            shutil.copyfile(modeling_file(), folder / modeling_file().name)
    return written


def inference_rule(rule: RuleConfig | None) -> dict[str, Any]:
    """What config.json of our architecture says, so that engines without moesaic.json route as the run trained."""
    if rule is None or rule.rule not in ROUTING_RULES:
        return {}
    if rule.rule == "topk":
        return {"routing_rule": rule.rule, "expert_groups": None}
    given = {"expert_groups": rule.expert_groups and list(rule.expert_groups), "group_score": rule.group_score}
    return {"routing_rule": rule.rule} | {key: value for key, value in given.items() if value is not None}


def _write_side_files(run: "Session", folder: Path, ids: Mapping[str, int | None]) -> list[dict[str, Any]]:
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
        # Not the model's own, which a resumed or grown one may not have from there.
        generation = load_generation_config(checkpoint.path) or generation
    for key, value in ids.items():
        setattr(generation, key, value)
    with explained(folder):
        run.tokenizer.save_pretrained(folder)
        _save_generation(generation, folder)
    return records


def _save_generation(generation: GenerationConfig, folder: Path) -> None:
    """Write generation_config.json; transformers reads settings that contradict each other, but does not write them."""
    try:
        generation.save_pretrained(folder)
    except ValueError as error:
        reason = " ".join(str(error).split())[:200]
        warn(f"generation_config.json is left out: the source's cannot be written by transformers ({reason})")


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
