"""The verb `generate`: continue texts with a model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from moesaic.common.errors import MoesaicError
from moesaic.common.verbs import verb
from moesaic.data.vocabulary import refuse_unknown_ids

if TYPE_CHECKING:
    from transformers import GenerationConfig


@dataclass(frozen=True, kw_only=True)
class GenerateRecipe:
    """What to continue, and how."""

    checkpoint: str
    """Folder, or hub id org/name[@revision], with a tokenizer."""
    prompt: str | tuple[str, ...]
    """A text to continue, as it is (no chat template is applied); several may be given."""
    max_new_tokens: int = 64
    """Most tokens to add; the model's end-of-text token ends it earlier."""
    temperature: float = 0.0
    """0 takes the likeliest token every time; above, tokens are drawn from softmax(logits / temperature)."""
    selection: str | None = None
    """Use only the experts that this file of `moesaic select` keeps."""
    batch_size: int = 1
    """Prompts that the model continues at once. At temperature 0 it changes nothing but rounding; above, the draws
    depend on it."""
    device: str | None = None
    """Where the model runs, such as cpu, cuda or cuda:1. Default: cuda if there is one, else cpu."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type that the model runs in; auto is the checkpoint's."""
    seed: int = 0
    """Seed of the drawing."""


@verb(GenerateRecipe, positional=("checkpoint", "prompt"))
def generate(recipe: GenerateRecipe, *, stream: bool = False) -> str | list[str]:
    """Continue one text or several with a model, dense or MoE, and return what was added (to each).

    Args:
        stream: Print prompt and text on stdout while it is made; for a single prompt only.

    Raises:
        MoesaicError: the checkpoint has no model or tokenizer that can be used, or an argument is out of range.
        NotFiniteError: the model gives NaN or infinity.
    """
    prompts = [recipe.prompt] if isinstance(recipe.prompt, str) else list(recipe.prompt)
    _check_arguments(recipe, prompts)

    import torch
    from transformers import TextStreamer

    from moesaic.loading import load, load_tokenizer
    from moesaic.modeling.finite import watched

    checkpoint = recipe.checkpoint
    tokenizer: Any = load_tokenizer(checkpoint)
    encoded = [list(tokenizer(text)["input_ids"]) for text in prompts]
    _refuse_empty(encoded)  # before the model is loaded
    model: Any = load(checkpoint, device=recipe.device, dtype=recipe.dtype)
    if recipe.selection is not None:
        _restrict(model, checkpoint, recipe.selection)
    for ids in encoded:
        refuse_unknown_ids(max(ids), model.config.get_text_config().vocab_size, str(checkpoint))
    model.generation_config = _settings(model, recipe.max_new_tokens, recipe.temperature)
    streamer = TextStreamer(tokenizer, skip_special_tokens=True) if stream and len(prompts) == 1 else None
    texts: list[str] = []
    drawing = torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else [])
    with drawing, watched(model, refuse=checkpoint):
        torch.manual_seed(recipe.seed)
        for start in range(0, len(encoded), recipe.batch_size):
            batch = encoded[start : start + recipe.batch_size]
            added = _continue(model, batch, streamer)
            texts += [_added_text(tokenizer, *ids) for ids in zip(batch, added, strict=True)]
    return texts[0] if isinstance(recipe.prompt, str) else texts


def _check_arguments(recipe: GenerateRecipe, prompts: list[str]) -> None:
    if not prompts:
        raise MoesaicError("PROMPT: none is given; give at least one text to continue")
    for flag, value in (("--max-new-tokens", recipe.max_new_tokens), ("--batch-size", recipe.batch_size)):
        if value < 1:
            raise MoesaicError(f"{flag}: must be at least 1, got {value}")
    if not recipe.temperature >= 0:
        raise MoesaicError(f"--temperature: must be 0 or more, got {recipe.temperature}")


def _settings(model: Any, max_new_tokens: int, temperature: float) -> "GenerationConfig":
    """The checkpoint's own sampling settings are left out, so that the same command means the same for every model."""
    from transformers import GenerationConfig

    stored = model.generation_config
    return GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=temperature > 0,
        eos_token_id=stored.eos_token_id,
        bos_token_id=stored.bos_token_id,
        pad_token_id=_first_id(stored.pad_token_id, stored.eos_token_id, 0),
        **({"temperature": temperature, "top_k": 0} if temperature > 0 else {}),
    )


def _continue(model: Any, prompts: list[list[int]], streamer: Any) -> list[list[int]]:
    """Continue a batch of prompts, padded on the left; returns the added token ids of each, cut at the end token."""
    import torch

    config = model.generation_config
    width = max(map(len, prompts))
    padded = [[config.pad_token_id] * (width - len(ids)) + ids for ids in prompts]
    mask = [[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts]
    ids_BT: torch.Tensor = model.generate(
        input_ids=torch.tensor(padded, device=model.device),
        attention_mask=torch.tensor(mask, device=model.device),
        generation_config=config,
        streamer=streamer,
    )
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    return [_until(added, ends) for added in ids_BT[:, width:].tolist()]


def _until(ids: list[int], ends: Sequence[int | None]) -> list[int]:
    """Cut after the first end token: what follows is padding, which need not be a special token."""
    return ids[: next((place + 1 for place, token in enumerate(ids) if token in ends), len(ids))]


def _added_text(tokenizer: Any, prompt: list[int], added: list[int]) -> str:
    """Decoding the added tokens alone would lose the space before their first word in some tokenizers."""
    before = tokenizer.decode(prompt, skip_special_tokens=True)
    return tokenizer.decode(prompt + added, skip_special_tokens=True).removeprefix(before)


def _restrict(model: Any, checkpoint: str, file: str) -> None:
    """Let the model use the experts of a selection that was made for this checkpoint."""
    from moesaic.checkpoint.source import open_checkpoint
    from moesaic.families.identity import describe, refuse_other_model
    from moesaic.families.moe import detect_running
    from moesaic.routing.restrict import restrict
    from moesaic.routing.subset import load_selection

    selection = load_selection(file)
    opened = open_checkpoint(checkpoint)
    refuse_other_model(selection.source, describe(opened, detect_running(opened)), file)
    restrict(model, selection)


def _first_id(*candidates: int | Sequence[int] | None) -> int:
    """Return the first token id that is given; a list of ids stands for its first one."""
    given = next(candidate for candidate in candidates if candidate is not None)
    return given if isinstance(given, int) else given[0]


def _refuse_empty(encoded: list[list[int]]) -> None:
    if not all(encoded):
        raise MoesaicError("PROMPT: is empty, and this tokenizer has no start token; give at least one word")
