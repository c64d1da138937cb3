"""The verb `generate`: continue texts with a model."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from moesaic.common.errors import MoesaicError

if TYPE_CHECKING:
    from transformers import GenerationConfig

Prompt = TypeVar("Prompt", str, list[str])


def generate(
    checkpoint: str | Path,
    prompt: Prompt,
    *,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    batch_size: int = 1,
    device: str | None = None,
    dtype: str = "auto",
    seed: int = 0,
    stream: bool = False,
    selection: str | Path | None = None,
) -> Prompt:
    """Continue one text or several with a model, dense or MoE, and return what was added (to each).

    Args:
        checkpoint: folder, or hub id `org/name[@revision]`, with a tokenizer.
        prompt: the text to continue, as it is (no chat template is applied), or several of them.
        max_new_tokens: most tokens to add; the model's end-of-text token ends it earlier.
        temperature: 0 takes the likeliest token every time; above, tokens are drawn from softmax(logits / temperature).
        batch_size: prompts that the model continues at once. At temperature 0 it changes nothing but rounding; above,
            the draws depend on it.
        device: such as `cpu` or `cuda:1`. Default: cuda if there is one, else cpu.
        dtype: float32, bfloat16, float16, or auto for the checkpoint's.
        seed: of the drawing.
        stream: print prompt and text on stdout while it is made; for a single prompt only.
        selection: file of `select`: only its experts are used.

    Raises:
        MoesaicError: the checkpoint has no model or tokenizer that can be used, or an argument is out of range.
    """
    prompts = [prompt] if isinstance(prompt, str) else list(prompt)
    _check_arguments(prompts, max_new_tokens=max_new_tokens, temperature=temperature, batch_size=batch_size)

    import torch
    from transformers import TextStreamer

    from moesaic.loading import load, load_tokenizer

    tokenizer: Any = load_tokenizer(checkpoint)
    encoded = [list(tokenizer(text)["input_ids"]) for text in prompts]
    _refuse_empty(encoded)  # before the model is loaded
    model: Any = load(checkpoint, device=device, dtype=dtype)
    if selection is not None:
        _restrict(model, checkpoint, selection)
    for ids in encoded:
        _check_tokens(ids, model.config.get_text_config().vocab_size, str(checkpoint))
    model.generation_config = _settings(model, max_new_tokens, temperature)
    streamer = TextStreamer(tokenizer, skip_special_tokens=True) if stream and len(prompts) == 1 else None
    texts: list[str] = []
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(seed)
        for start in range(0, len(encoded), batch_size):
            batch = encoded[start : start + batch_size]
            added = _continue(model, batch, streamer)
            texts += [_added_text(tokenizer, *ids) for ids in zip(batch, added, strict=True)]
    if isinstance(prompt, str):
        return texts[0]
    return texts


def _check_arguments(prompts: list[str], *, max_new_tokens: int, temperature: float, batch_size: int) -> None:
    if not prompts:
        raise MoesaicError("PROMPT: none is given; give at least one text to continue")
    for flag, value in (("--max-new-tokens", max_new_tokens), ("--batch-size", batch_size)):
        if value < 1:
            raise MoesaicError(f"{flag}: must be at least 1, got {value}")
    if not 0.0 <= temperature < float("inf"):
        raise MoesaicError(f"--temperature: must be 0 or more, got {temperature}")


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


def _restrict(model: Any, checkpoint: str | Path, file: str | Path) -> None:
    """Let the model use the experts of a selection that was made for this checkpoint."""
    from moesaic.checkpoint.source import open_checkpoint
    from moesaic.families.identity import describe, refuse_other_model
    from moesaic.families.moe import detect_running
    from moesaic.routing.restrict import restrict
    from moesaic.routing.subset import load_selection

    selection = load_selection(file)
    opened = open_checkpoint(checkpoint)
    refuse_other_model(selection.source, describe(opened, detect_running(opened)), str(file))
    restrict(model, selection)


def _first_id(*candidates: int | Sequence[int] | None) -> int:
    """Return the first token id that is given; a list of ids stands for its first one."""
    given = next(candidate for candidate in candidates if candidate is not None)
    return given if isinstance(given, int) else given[0]


def _refuse_empty(encoded: list[list[int]]) -> None:
    if not all(encoded):
        raise MoesaicError("PROMPT: is empty, and this tokenizer has no start token; give at least one word")


def _check_tokens(token_ids: list[int], vocabulary: int, name: str) -> None:
    if max(token_ids) >= vocabulary:
        raise MoesaicError(
            f"{name}: its tokenizer gives token {max(token_ids)}, but the model has only {vocabulary}; they differ"
        )
