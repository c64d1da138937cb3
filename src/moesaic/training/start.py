"""What a run starts from: the model, loaded or drawn, its rule, its tokenizer, fp32 masters and the optimizer."""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from moesaic.checkpoint.source import open_checkpoint
from moesaic.common.errors import MoesaicError, suggest
from moesaic.common.progress import no_library_bars, notice, warn
from moesaic.data.packing import PackedBatch, keeps_documents_apart, one_per_row
from moesaic.data.tokenise import Encoder
from moesaic.families.config_values import refuse_giant
from moesaic.families.family import our_base
from moesaic.loading import explained_errors, load, load_config, load_tokenizer, refuse_unknown_architecture
from moesaic.routing.capture import find_blocks
from moesaic.routing.gradient import RouterChoices, gradient_warning
from moesaic.routing.install import Installation, find_installation, install
from moesaic.routing.own_bias import take_own_biases
from moesaic.routing.restrict import INSTALLED
from moesaic.routing.rules import OnePerGroup
from moesaic.training.fit import needs_routers, refuse_misfit
from moesaic.training.optimizer import MasterWeights, build_optimizer, describe_trainable, freeze
from moesaic.training.parallel import World, distributed_config, reshard, whole
from moesaic.training.recipe import Precision, ScratchModel, TrainRecipe, scratch_config
from moesaic.training.trackers import chosen_trackers

DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}

Start = str | Path | ScratchModel | PreTrainedConfig
"""A checkpoint, a model from scratch, or a configuration whose weights come from elsewhere."""

_UNDECLARED = {"head_dim", "partial_rotary_factor", "sliding_window_pattern", "mlp_bias"}
"""What several families, or our experts (`mlp_bias`), read though the configuration's class does not declare it."""

TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""What a config and a generation_config say of the tokenizer."""

_REASON = 200
"""Characters of another library's error that are shown."""


@dataclass(frozen=True, kw_only=True)
class Trainable:
    """What a step reads and moves."""

    recipe: TrainRecipe
    world: World
    model: PreTrainedModel
    """In training mode, sharded or not."""
    config: PreTrainedConfig
    """As the checkpoint has it, without what sharding adds."""
    installation: Installation | None
    """The rule on its routers; `None` for a model without routers that rules work on."""
    masters: MasterWeights
    optimizer: torch.optim.AdamW
    packs: bool = True
    """Whether the model keeps the documents of a row apart; else each gets a row of its own."""

    def placed(self, batch: PackedBatch) -> PackedBatch:
        """A batch as the model takes it, on its device."""
        return (batch if self.packs else one_per_row(batch)).to(self.world.device)

    def buffers(self) -> dict[str, Tensor]:
        """Persistent buffers, such as a family's own selection biases."""
        parameters = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        return {name: tensor for name, tensor in self.model.state_dict().items() if name not in parameters}


def build_trainable(recipe: TrainRecipe, out: Path, world: World, *, start: Start, quiet: bool) -> Trainable:
    """Load or make what a run of `recipe` trains; new weights that several ranks share pass through `out`.

    Raises: `MoesaicError` for a checkpoint that can't be read, a configuration that makes no model, a rule or a loss
    that needs routers where the model has none.
    """
    if isinstance(start, (str, Path)):
        config = load_config(open_checkpoint(start).path, str(start))
        model = _load(start, recipe, world)
    else:
        config = make_config(start) if isinstance(start, ScratchModel) else start
        model = _from_scratch(recipe, config, out, world)
    if our_base(config.model_type) is not None:
        config.selection_bias = False  # while it trains, the bias is the installation's
    with makes_a_model(start.family) if isinstance(start, ScratchModel) else nullcontext():
        packs = keeps_documents_apart(model.eval())
        reshard(model)
    installation = _install(model, recipe)
    for line in untaught_routers(model, installation):
        notice(line, quiet=quiet)
    if not packs:
        notice(
            f"{config.model_type} looks back into the document before, so each document has a row of its own, padded "
            "to the longest of its micro-batch",
            quiet=quiet,
        )
    if recipe.activation_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    if recipe.compile:
        for layer in model.base_model.layers:  # pyright: ignore[reportGeneralTypeIssues]
            layer.compile()
    freeze(model.train(), recipe.optimizer.frozen)
    notice(describe_trainable(model), quiet=quiet)
    copies = DTYPES[recipe.precision] if recipe.precision != "fp32" and world.size == 1 else None
    masters = MasterWeights(model, copies=copies)
    return Trainable(
        recipe=recipe,
        world=world,
        model=model,
        config=config,
        installation=installation,
        masters=masters,
        optimizer=build_optimizer(masters.trainable, recipe.optimizer),
        packs=packs,
    )


def _load(path: str | Path, recipe: TrainRecipe, world: World) -> PreTrainedModel:
    sharding = distributed_config(recipe.parallel, recipe.precision)
    with no_library_bars():
        return load(path, device=world.device, dtype="float32", distributed=sharding)


def _from_scratch(recipe: TrainRecipe, config: PreTrainedConfig, out: Path, world: World) -> PreTrainedModel:
    if world.size == 1:
        return draw(config, recipe.seed).to(world.device)  # pyright: ignore[reportArgumentType]
    initial = out / "state" / "initial"
    if world.is_main:
        draw(config, recipe.seed).save_pretrained(initial)
    world.barrier()
    model = _load(initial, recipe, world)
    world.barrier()
    if world.is_main:
        shutil.rmtree(initial)
    return model


def _install(model: PreTrainedModel, recipe: TrainRecipe) -> Installation | None:
    earlier = find_installation(model)
    rule = recipe.routing
    if rule.rule is None and earlier is not None and earlier.config.rule not in (None, "document_pool"):
        rule = earlier.config  # what the model was trained to do at inference holds on
    bias: Tensor | bool | None = earlier.selection_bias if earlier is not None else None
    if (own := take_own_biases(model)) is not None:
        model.config.selection_bias = False  # pyright: ignore[reportAttributeAccessIssue]
        bias = own if bias is None else bias
    losses = recipe.losses
    if losses.bias_balancing is not None and bias is None:
        bias = True
    try:
        return install(model, rule, selection_bias=bias)
    except MoesaicError:
        if bias is not None or needs_routers(recipe):
            raise
        return None


@torch.no_grad()
def untaught_routers(model: PreTrainedModel, installation: Installation | None) -> list[str]:
    """One line for each way in which the loss of the text can teach routers nothing, by their rules and first weights.

    All ranks call this: it gathers routers, and the experts of those whose rows are all equal.
    """
    found: dict[str, None] = {}
    for block in find_blocks(model) if installation is not None else ():
        state = block.router.__dict__[INSTALLED]
        settings = state.settings
        choices = RouterChoices(weighting=settings.weighting, experts=settings.num_experts, top_k=settings.top_k)
        if settings.own is None and not isinstance(state.rule, OnePerGroup) and settings.weighting != "all":
            tied = _sharing_a_row(whole(block.router.weight))  # pyright: ignore[reportArgumentType]
            copies = tied == settings.num_experts and _all_equal(whole(block.experts.gate_up_proj))
            choices = replace(choices, tied=tied, copies=copies)
        if line := gradient_warning(choices):
            found[line] = None
    return list(found)


def _sharing_a_row(weight_ED: Tensor) -> int:
    """Experts that share each row of a router, where these are equally many everywhere; else 1."""
    _, counts = torch.unique(weight_ED, dim=0, return_counts=True)
    return int(counts[0]) if bool((counts == counts[0]).all()) else 1


def _all_equal(values_EXX: Tensor) -> bool:
    return bool((values_EXX == values_EXX[:1]).all())


# --- before there are weights -----------------------------------------------------------------------------------------


def check_start(recipe: TrainRecipe) -> PreTrainedConfig:
    """Refuse what does not fit the model that a recipe starts from, without weights and data; return its config."""
    if isinstance(recipe.model, str):
        checkpoint = open_checkpoint(recipe.model)
        refuse_unknown_architecture(checkpoint.config, recipe.model)
        config = load_config(checkpoint.path, recipe.model)
    else:
        config = make_config(recipe.model)
    refuse_misfit(recipe, config.get_text_config().to_dict())
    return config


def check_dry(recipe: TrainRecipe) -> None:
    """`check_start`, and what making a model and loading a tokenizer that is here would refuse."""
    if isinstance(recipe.model, ScratchModel):
        refuse_unknown_keys(recipe.model)
    chosen_trackers(recipe.trackers)
    config = check_start(recipe)
    if isinstance(recipe.model, ScratchModel):
        with torch.device("meta"), makes_a_model(recipe.model.family):
            AutoModelForCausalLM.from_config(config)
    here = recipe.model if recipe.tokenizer is None else recipe.tokenizer
    if Path(str(here)).is_dir():
        tokenizer = load_run_tokenizer(recipe)
        warn_of_other_ids(recipe, tokenizer)
        Encoder(tokenizer)


# --- models from random weights ---------------------------------------------------------------------------------------


@contextmanager
def makes_a_model(family: str) -> Iterator[None]:
    """Turn what is raised for a wrong value in a recipe's configuration into a `MoesaicError` of one line."""
    with explained_errors(f"model.config: makes no {family} model"):
        yield


def make_config(scratch: ScratchModel) -> PreTrainedConfig:
    """The configuration that a recipe describes.

    Raises: `MoesaicError` for a family that is unknown, or a value that its class does not take.
    """
    # A family's own padding id is a token of another tokenizer: its row would be zero and never learn.
    values: dict[str, Any] = {"pad_token_id": None} | scratch_config(scratch)
    model_type = values.pop("model_type")
    if model_type not in CONFIG_MAPPING:
        hint = suggest(scratch.family, CONFIG_MAPPING)
        raise MoesaicError(f"model.family: {scratch.family} is no model type of transformers; {hint}")
    refuse_giant(values, "model.config")
    with makes_a_model(scratch.family):
        return AutoConfig.for_model(model_type, **values)


def refuse_unknown_keys(scratch: ScratchModel) -> None:
    """Refuse keys that the family's configuration does not know: it would take them, and nothing would read them."""
    config = make_config(scratch)
    declared = {field.name for field in fields(config)} | config.attribute_map.keys()
    known = declared | vars(type(config)()).keys() | set(dir(type(config))) | _UNDECLARED
    for key in scratch.config:
        taken = key in vars(config)  # not so what older configurations had, such as rope_theta, which is translated
        if taken and key not in known:
            raise MoesaicError(f"model.config.{key}: {scratch.family} has no such key; {suggest(key, declared)}")


def draw(config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """Draw the weights in fp32 on the CPU, so that they depend on nothing but the seed."""
    torch.manual_seed(seed)
    with makes_a_model(config.model_type):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


# --- tokenizer --------------------------------------------------------------------------------------------------------


def load_run_tokenizer(recipe: TrainRecipe) -> PreTrainedTokenizerBase:
    """Load it; `recipe.tokenizer` may be a folder or hub id without weights.

    Raises: `MoesaicError` where there is none.
    """
    if recipe.tokenizer is None:
        assert isinstance(recipe.model, str), "the recipe was checked"
        return load_tokenizer(recipe.model)
    source: dict[str, Any] = {"pretrained_model_name_or_path": recipe.tokenizer}
    if not Path(recipe.tokenizer).is_dir():
        name, _, revision = recipe.tokenizer.partition("@")
        source = {"pretrained_model_name_or_path": name, "revision": revision or "main"}
    try:
        return AutoTokenizer.from_pretrained(**source, trust_remote_code=False)
    except Exception as error:  # the tokenizers package raises bare ones
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise MoesaicError(f"tokenizer: {recipe.tokenizer}: cannot be loaded ({reason})") from error


def token_ids(recipe: TrainRecipe, config: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Which tokens begin, end and pad a text: keys of a config whose value is to be the tokenizer's.

    None of a model with its own tokenizer. Of a model from scratch those that the recipe leaves out or says otherwise;
    of a model with another tokenizer than its own all, where a text does not end as the documents of the run do.

    Args:
        recipe: what is trained.
        config: the model's (text) config.
        tokenizer: the run's.
    """
    if recipe.tokenizer is None:
        return {}
    own = {key: getattr(tokenizer, key) for key in TOKEN_KEYS}
    if isinstance(recipe.model, ScratchModel):
        given = recipe.model.config
        return {key: value for key, value in own.items() if key not in given or not _says(given[key], value)}
    return {} if _says(config.get("eos_token_id"), own["eos_token_id"]) else own


def _says(given: Any, token: int | None) -> bool:
    """Whether what a config gives, an id or several, has the tokenizer's; it may have what the tokenizer has not."""
    return token is None or token == given or (isinstance(given, list | tuple) and token in given)


def warn_of_other_ids(recipe: TrainRecipe, tokenizer: PreTrainedTokenizerBase) -> None:
    """Say which ids of a recipe's `model.config` are not those of its tokenizer, and so not those of the result."""
    if isinstance(recipe.model, ScratchModel):
        given = recipe.model.config
        for key, value in token_ids(recipe, given, tokenizer).items():
            if key in given:
                warn(f"model.config.{key}: is {given[key]}, but the tokenizer's is {value}, which the result says")
