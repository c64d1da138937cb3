"""What a step works on, built: the model, its fp32 masters and the optimizer with its state in place."""

from pathlib import Path

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from moesaic.common.progress import notice
from moesaic.training.model import build_model
from moesaic.training.optimizer import build_optimizer
from moesaic.training.parallel import World
from moesaic.training.recipe import ScratchModel, TrainRecipe
from moesaic.training.result import DTYPES
from moesaic.training.step import Trainable
from moesaic.training.tokenizer import refuse_larger_vocabulary
from moesaic.training.weights import MasterWeights, describe_trainable, freeze


def build_trainable(
    recipe: TrainRecipe,
    out: Path,
    world: World,
    *,
    start: str | Path | ScratchModel | PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    quiet: bool,
) -> Trainable:
    """Build it from a checkpoint, from scratch, or (weights to come) from a configuration.

    Raises: `MoesaicError` for a model that the recipe cannot train.
    """
    model = build_model(recipe, out, world, start)
    refuse_larger_vocabulary(tokenizer, model.config.get_text_config().vocab_size)
    freeze(model.model, recipe.optimizer.frozen)
    notice(describe_trainable(model.model), quiet=quiet)
    copies = DTYPES[recipe.precision] if recipe.precision != "fp32" and world.size == 1 else None
    masters = MasterWeights(model.model, copies=copies)
    return Trainable(
        recipe=recipe,
        world=world,
        model=model,
        masters=masters,
        optimizer=build_optimizer(masters.trainable, recipe.optimizer),
    )
