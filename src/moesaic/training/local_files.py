"""Whether the data of a recipe is there, before a run reads it. No torch."""

from moesaic.common.errors import MoesaicError
from moesaic.data.files import PREFIX, find_files
from moesaic.training.recipe import TrainRecipe


def require_local_files(recipe: TrainRecipe) -> None:
    """Refuse (MoesaicError) sources and held-out sets that are neither on the hub nor files with documents here."""
    for kind in ("sources", "validation"):
        for number, source in enumerate(getattr(recipe.data, kind)):
            if source.path.startswith(PREFIX):
                continue
            try:
                find_files(source, quiet=True)
            except MoesaicError as error:
                raise MoesaicError(f"data.{kind}.{number}.path: {error}") from error
