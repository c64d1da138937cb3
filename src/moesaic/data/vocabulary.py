"""Token ids that a text uses and the model has no embedding for: the check of every verb that tokenises.

No torch, and NumPy only where data is read: `moesaic eval --help` imports this.

What counts are the ids that are used. A tokenizer may have more tokens than the model, as one with an added padding
token, and may leave ids out, so its length says nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from moesaic.common.errors import MoesaicError

if TYPE_CHECKING:
    from moesaic.data.tokenise import PreparedData


def refuse_unknown_ids(largest: int, vocab_size: int, name: str) -> None:
    """Refuse (MoesaicError) a text, of this name, whose largest id is outside of the model's vocabulary."""
    if largest >= vocab_size:
        raise MoesaicError(
            f"{name}: its tokenizer gives token {largest}, but the model has only {vocab_size} (vocab_size); use the "
            "tokenizer that belongs to the model"
        )


def within_vocabulary(data: PreparedData, vocab_size: int) -> PreparedData:
    """The same data for a model of that vocabulary, padded with a token that it has.

    Raises: `MoesaicError` where a document has an id that the model has not; names the source.
    """
    from moesaic.data.cache import open_cache

    recipe = data.recipe
    sources = zip((*recipe.sources, *recipe.validation), (*data.sources, *data.validation), strict=True)
    for source, folder in sources:
        refuse_unknown_ids(open_cache(folder).largest, vocab_size, source.name)
    if data.padding_id < vocab_size:
        return data
    # Any token that the model has will do, such as the last one of the text: no loss and no document sees padding.
    return replace(data, padding_id=int(open_cache(data.sources[0]).tokens[-1]))


def watch_ids(model: Any, name: str) -> None:
    """Check the ids that a library of others gives to a model, whenever it does; `name` is the tokenizer's."""

    def check(embedding: Any, inputs: Sequence[Any]) -> None:
        if inputs and inputs[0].numel():
            refuse_unknown_ids(int(inputs[0].max()), embedding.num_embeddings, name)

    model.get_input_embeddings().register_forward_pre_hook(check)
