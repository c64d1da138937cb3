"""The verb `generate`: continue a text with a model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moesaic.errors import MoesaicError


def generate(
    checkpoint: str | Path,
    prompt: str,
    *,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    device: str | None = None,
    dtype: str = "auto",
    seed: int = 0,
    stream: bool = False,
    selection: str | Path | None = None,
) -> str:
    """Continue a text with a model, dense or MoE, and return what was added.

    Args:
        checkpoint: folder, or hub id `org/name[@revision]`, with a tokenizer.
        prompt: the text to continue, as it is: no chat template is applied.
        max_new_tokens: most tokens to add; the model's end-of-text token ends it earlier.
        temperature: 0 takes the likeliest token every time; above, tokens are drawn from softmax(logits / temperature).
        device: such as `cpu` or `cuda:1`. Default: cuda if there is one, else cpu.
        dtype: float32, bfloat16, float16, or auto for the checkpoint's.
        seed: of the drawing.
        stream: print prompt and text on stdout while it is made.
        selection: file of `select`: only its experts are used.

    Raises:
        MoesaicError: the checkpoint has no model or tokenizer that can be used, or an argument is out of range.
    """
    if max_new_tokens < 1:
        raise MoesaicError(f"--max-new-tokens: must be at least 1, got {max_new_tokens}")
    if not 0.0 <= temperature < float("inf"):
        raise MoesaicError(f"--temperature: must be 0 or more, got {temperature}")

    import torch
    from transformers import GenerationConfig, TextStreamer

    from moesaic.loading import load, load_tokenizer

    tokenizer: Any = load_tokenizer(checkpoint)
    model: Any = load(checkpoint, device=device, dtype=dtype)
    if selection is not None:
        _restrict(model, checkpoint, selection)
    encoded = tokenizer(prompt, return_tensors="pt").to(model.device)
    _check_tokens(encoded["input_ids"][0].tolist(), model.config.get_text_config().vocab_size, str(checkpoint))
    # The checkpoint's own sampling settings are left out, so that the same command means the same for every model.
    stored = model.generation_config
    config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=temperature > 0,
        eos_token_id=stored.eos_token_id,
        bos_token_id=stored.bos_token_id,
        pad_token_id=_first_id(stored.pad_token_id, stored.eos_token_id, 0),
        **({"temperature": temperature, "top_k": 0} if temperature > 0 else {}),
    )
    model.generation_config = config
    streamer = TextStreamer(tokenizer, skip_special_tokens=True) if stream else None
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(seed)
        ids = model.generate(**encoded, generation_config=config, streamer=streamer)
    start = encoded["input_ids"].shape[1]
    # Decoding the added tokens alone would lose the space before their first word in some tokenizers.
    before = tokenizer.decode(ids[0, :start], skip_special_tokens=True)
    return tokenizer.decode(ids[0], skip_special_tokens=True).removeprefix(before)


def _restrict(model: Any, checkpoint: str | Path, file: str | Path) -> None:
    """Let the model use the experts of a selection that was made for this checkpoint."""
    from moesaic.checkpoint.source import open_checkpoint
    from moesaic.families.moe import detect_moe
    from moesaic.selection.restriction import restrict
    from moesaic.selection.selection import load_selection
    from moesaic.selection.source import describe, refuse_other_model

    selection = load_selection(file)
    opened = open_checkpoint(checkpoint)
    refuse_other_model(selection.source, describe(opened, detect_moe(opened)), str(file))
    restrict(model, selection)


def _first_id(*candidates: int | Sequence[int] | None) -> int:
    """Return the first token id that is given; a list of ids stands for its first one."""
    given = next(candidate for candidate in candidates if candidate is not None)
    return given if isinstance(given, int) else given[0]


def _check_tokens(token_ids: list[int], vocabulary: int, name: str) -> None:
    if not token_ids:
        raise MoesaicError("PROMPT: is empty, and this tokenizer has no start token; give at least one word")
    if max(token_ids) >= vocabulary:
        raise MoesaicError(
            f"{name}: its tokenizer gives token {max(token_ids)}, but the model has only {vocabulary}; they differ"
        )
