"""The model of a run: loaded or new, sharded or not, in fp32, with the recipe's routing rule on its routers."""

import shutil
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from moesaic.checkpoint.source import open_checkpoint
from moesaic.common.errors import MoesaicError
from moesaic.common.progress import no_library_bars
from moesaic.data.packing import keeps_documents_apart
from moesaic.loading import load, load_config
from moesaic.routing.install import Installation, find_installation, install
from moesaic.training.drawing import draw, make_config, makes_a_model
from moesaic.training.parallel import World, distributed_config, reshard
from moesaic.training.recipe import ScratchModel, TrainRecipe


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """A model in training mode and what has to be known beside it."""

    model: PreTrainedModel
    config: PreTrainedConfig
    """As the checkpoint has it, without what sharding adds."""
    installation: Installation | None
    """The rule on its routers; `None` for a model without routers that rules work on."""

    def buffers(self) -> dict[str, Tensor]:
        """Persistent buffers, such as a family's own selection biases."""
        parameters = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        return {name: tensor for name, tensor in self.model.state_dict().items() if name not in parameters}


def build_model(
    recipe: TrainRecipe, out: Path, world: World, start: "str | Path | ScratchModel | PreTrainedConfig"
) -> TrainedModel:
    """Load or make the model that a run starts from.

    Args:
        recipe: of the run.
        out: folder of the run, which new weights pass through where several ranks share them.
        world: the ranks.
        start: a checkpoint, a model from scratch, or a configuration whose weights come from elsewhere.

    Raises: `MoesaicError` for a checkpoint that can't be read, a configuration that makes no model, and a rule or a
    loss that needs routers where the model has none.
    """
    if isinstance(start, (str, Path)):
        config = load_config(open_checkpoint(start).path, str(start))
        model = _load(start, recipe, world)
    else:
        config = make_config(start) if isinstance(start, ScratchModel) else start
        model = _from_scratch(recipe, config, out, world)
    model.config.use_cache = False
    with makes_a_model(start.family) if isinstance(start, ScratchModel) else nullcontext():
        _refuse_leaking_documents(model)
    installation = _install(model, recipe)
    if recipe.activation_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    if recipe.compile:
        for layer in model.base_model.layers:  # pyright: ignore[reportGeneralTypeIssues]
            layer.compile()
    return TrainedModel(model=model.train(), config=config, installation=installation)


def _load(path: str | Path, recipe: TrainRecipe, world: World) -> PreTrainedModel:
    sharding = distributed_config(recipe.parallel, recipe.precision)
    with no_library_bars():
        return load(path, device=world.device, dtype="float32", distributed=sharding)


def _from_scratch(recipe: TrainRecipe, config: PreTrainedConfig, out: Path, world: World) -> PreTrainedModel:
    """Draw the weights in one process on the CPU, so that they depend on nothing but the seed."""
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


@torch.no_grad()
def _refuse_leaking_documents(model: PreTrainedModel) -> None:
    """Refuse a family in which packed documents would attend to each other."""
    apart = keeps_documents_apart(model.eval())
    reshard(model)
    if not apart:
        raise MoesaicError(
            f"model: {model.config.model_type} does not keep packed documents apart by their position ids in this "
            "version of transformers, so it cannot be trained here"
        )


def _install(model: PreTrainedModel, recipe: TrainRecipe) -> Installation | None:
    earlier = find_installation(model)
    rule = recipe.routing
    if rule.rule is None and earlier is not None and earlier.config.rule not in (None, "document_pool"):
        rule = earlier.config  # what the model was trained to do at inference holds on
    bias: Tensor | bool | None = earlier.selection_bias if earlier is not None else None
    losses = recipe.losses
    if losses.bias_balancing is not None and bias is None:
        bias = True
    needed = recipe.routing.rule is not None or bias is not None or losses.balance is not None or losses.router_z > 0
    try:
        return install(model, rule, selection_bias=bias)
    except MoesaicError:
        if needed:
            raise
        return None
