"""`--check`: run source and result on the same tokens, random and real, and compare all logits in fp32.

A GGUF file runs in llama.cpp, by `llama_cpp` (llama-cpp-python).
"""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moesaic.checkpoint.source import Checkpoint, open_checkpoint
from moesaic.common.progress import progress
from moesaic.exporting.recipe import LogitCheck
from moesaic.loading import load, pick_device
from moesaic.modeling.finite import watched
from moesaic.probe import random_tokens, read_text, run_logits, tokens_for

RELATIVE = 2e-5
"""Largest difference that counts as rounding, per unit of the largest logit (at least 1)."""

RELATIVE_IN_LLAMA_CPP = 5e-5
"""The same in llama.cpp, which sums in other orders."""


def refuse_settings(text: Path | str | None, device: str | None) -> None:
    """Refuse a text that cannot be read and a device that is not there: before anything is written."""
    pick_device(device)
    if text is not None:
        read_text(text)


def tokens_of(source: Checkpoint, target: Checkpoint, text: Path | str | None) -> Iterator[tuple[str, Tensor]]:
    """(what they are, tokens): random ids, and a text where there is a tokenizer."""
    vocab = int(target.config["vocab_size"])
    yield "random tokens", random_tokens(vocab)
    real, described = tokens_for(source, target, text, vocab=vocab)
    if "random" not in described:
        yield f"tokens of {described}", real


def compare_models(
    source: Path, target: Path, *, text: Path | str | None, device: str | None, quiet: bool
) -> list[LogitCheck]:
    """Compare two checkpoints that load; one after the other in memory."""
    batches = list(tokens_of(open_checkpoint(source), open_checkpoint(target), text))
    total = 2 * sum(tokens.numel() for _, tokens in batches)
    with progress(total, unit="tokens", label="checking", quiet=quiet) as tick:
        runs = []
        for path in (source, target):
            model = load(path, device=device, dtype="float32")
            with watched(model, refuse=str(path)):
                runs.append([torch.cat(list(run_logits(model, tokens, 1, tick))) for _, tokens in batches])
            del model
            gc.collect()
    return [compare_logits(what, one, other) for (what, _), one, other in zip(batches, runs[0], runs[1], strict=True)]


def compare_logits(what: str, source_BLV: Tensor, target_BLV: Tensor, relative: float = RELATIVE) -> LogitCheck:
    """Two sets of logits of the same tokens."""
    difference = (source_BLV - target_BLV).abs().max()
    largest = source_BLV.abs().max().item()
    return LogitCheck(
        tokens=what,
        count=source_BLV.shape[0] * source_BLV.shape[1],
        largest_difference=difference.item() if difference.isfinite() else float("inf"),
        largest_logit=largest,
        same_choice=(source_BLV.argmax(-1) == target_BLV.argmax(-1)).float().mean().item(),
        tolerance=relative * max(1.0, largest),
    )


# --- llama.cpp --------------------------------------------------------------------------------------------------------


def compare_with_llama_cpp(
    native: Path, gguf: Path, *, text: Path | str | None, device: str | None, quiet: bool
) -> list[LogitCheck]:
    """Run a native checkpoint in transformers and its GGUF file in llama.cpp on the same tokens."""
    checkpoint = open_checkpoint(native)
    batches = list(tokens_of(checkpoint, checkpoint, text))
    total = 2 * sum(tokens.numel() for _, tokens in batches)
    with progress(total, unit="tokens", label="checking", quiet=quiet) as tick:
        model = load(native, device=device, dtype="float32")
        with watched(model, refuse=str(native)):
            ours = [torch.cat(list(run_logits(model, tokens, 1, tick))) for _, tokens in batches]
        del model
        engine = open_llama(gguf, context=max(tokens.shape[1] for _, tokens in batches))
        theirs = []
        for _, tokens in batches:
            theirs.append(llama_logits(engine, tokens))
            tick(tokens.numel())
    return [
        compare_logits(f"{what} in llama.cpp", one, other, RELATIVE_IN_LLAMA_CPP)
        for (what, _), one, other in zip(batches, ours, theirs, strict=True)
    ]


def open_llama(gguf: Path, *, context: int) -> Any:
    """The model in llama.cpp, its cache in fp32."""
    import llama_cpp  # pyright: ignore[reportMissingImports]

    return llama_cpp.Llama(
        str(gguf),
        n_ctx=context,
        n_batch=context,
        n_ubatch=context,
        logits_all=True,
        type_k=llama_cpp.GGML_TYPE_F32,
        type_v=llama_cpp.GGML_TYPE_F32,
        flash_attn=False,
        n_threads=torch.get_num_threads(),
        verbose=False,
    )


def llama_logits(engine: Any, tokens_BL: Tensor) -> Tensor:
    """Logits of every position, sequence by sequence."""
    logits = []
    for tokens in tokens_BL.tolist():
        engine.reset()
        engine.eval(tokens)
        logits.append(torch.from_numpy(np.array(engine.scores[: len(tokens)], dtype=np.float32)))
    return torch.stack(logits)
