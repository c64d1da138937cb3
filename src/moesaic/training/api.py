"""The verb `train` as a function of the public API. Imports torch only when it is called."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesaic.common.recipe import load_recipe
from moesaic.common.yaml_text import parse_yaml
from moesaic.recipes import read_recipe, shipped_recipes
from moesaic.training.recipe import TrainRecipe

if TYPE_CHECKING:
    from moesaic.training.result import TrainResult


def load_train_recipe(source: str | Path | Mapping[str, Any], settings: Sequence[str] = ()) -> TrainRecipe:
    """Read a recipe from a YAML file, a name that `moesaic recipes list` shows, or plain values.

    Args:
        source: where it is.
        settings: `a.b.c=value` texts that win over it.

    Raises:
        MoesaicError: the file, a key or a value is wrong.
    """
    if not isinstance(source, Mapping) and not Path(source).exists():
        name = str(source)
        if name in {recipe.name for recipe in shipped_recipes()}:
            return load_recipe(TrainRecipe, parse_yaml(read_recipe(name), name), settings)
    return load_recipe(TrainRecipe, source, settings)


def train(
    recipe: str | Path | Mapping[str, Any],
    out: str | Path,
    *,
    settings: Sequence[str] = (),
    resume: bool = False,
    overwrite: bool = False,
    quiet: bool = True,
) -> "TrainResult":
    """Train what a recipe says and leave a plain checkpoint in `out`; see `moesaic.training.run.train`.

    Args:
        recipe: a YAML file, a name that `moesaic recipes list` shows, or plain values.
        out: folder of the result, of metrics.jsonl, recipe.yaml and the run state.
        settings: `a.b.c=value` texts that win over the recipe.
        resume: go on where the last state is; start fresh where there is none.
        overwrite: remove an earlier run or checkpoint in `out` first.
        quiet: print no progress and no notices.

    Raises:
        MoesaicError: a mistake in the recipe, the data or the model, a full disk, a loss that isn't finite.
    """
    from moesaic.training import run

    loaded = load_train_recipe(recipe, settings)
    return run.train(loaded, out, resume=resume, overwrite=overwrite, quiet=quiet)
