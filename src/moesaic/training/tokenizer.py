"""The tokenizer of a run: the recipe's, else the model's."""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from moesaic.common.errors import MoesaicError
from moesaic.loading import load_tokenizer
from moesaic.training.recipe import TrainRecipe


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
    except (OSError, ValueError, ImportError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise MoesaicError(f"tokenizer: {recipe.tokenizer}: cannot be loaded ({reason})") from error


def refuse_larger_vocabulary(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Refuse a tokenizer with ids that the model has no embedding for."""
    if len(tokenizer) > vocab_size:
        raise MoesaicError(
            f"tokenizer: has {len(tokenizer):,} tokens, but the model's vocab_size is {vocab_size:,}; "
            "use the tokenizer that belongs to the model"
        )
