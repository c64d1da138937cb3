"""From a recipe and a tokenizer to token caches on disk."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from moesaic.common.errors import MoesaicError
from moesaic.data.cache import TokenCache, cache_root, open_cache
from moesaic.data.encode import Encoder
from moesaic.data.recipe import DataRecipe
from moesaic.data.tokenise import tokenise

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class PreparedData:
    """A recipe with the token caches of its sources: all that ranks need, and cheap to send to them."""

    recipe: DataRecipe
    sources: tuple[Path, ...]
    """Cache folder of each source."""
    validation: tuple[Path, ...]
    """Cache folder of each validation source."""
    padding_id: int


def prepare(
    recipe: DataRecipe,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    cache_dir: Path | str | None = None,
    quiet: bool = False,
) -> PreparedData:
    """Tokenise every source that is not in the cache yet.

    All sources are read once to hash them (a few GB/s), so that a changed file is never taken for the cached one.
    With several processes on a machine, call this in one of them and send the result to the others. `cache_dir`
    defaults to `$MOESAIC_CACHE`, then `~/.cache/moesaic`. Raises `MoesaicError` for anything wrong in the data.
    """
    encoder = Encoder(tokenizer)
    root = cache_root(cache_dir)
    return PreparedData(
        recipe=recipe,
        sources=tuple(tokenise(source, encoder, root, quiet=quiet).folder for source in recipe.sources),
        validation=tuple(tokenise(source, encoder, root, quiet=quiet).folder for source in recipe.validation),
        padding_id=encoder.padding_id,
    )


def refuse_untrainable(data: PreparedData) -> None:
    """Refuse a source of training data in which nothing would be predicted."""
    for source, folder in zip(data.recipe.sources, data.sources, strict=True):
        cache = open_cache(folder)
        refuse_unpredicted(source.path, cache, cache.offsets[:-1], np.diff(cache.offsets))


def refuse_unpredicted(path: str, cache: TokenCache, begin_N: NDArray[np.int64], length_N: NDArray[np.int64]) -> None:
    """Refuse a source whose documents are in these pieces, where nothing is predicted: a loss would be 0 over 0."""
    if not cache.predicted(begin_N, length_N).any():
        raise MoesaicError(
            f"{path}: no document has a token to predict (one to train on, after its first); give longer documents"
        )
