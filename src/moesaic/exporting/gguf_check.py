"""Logits of llama.cpp against those of transformers; needs `llama_cpp` (llama-cpp-python)."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moesaic.checkpoint.source import open_checkpoint
from moesaic.common.progress import progress
from moesaic.exporting.check import compare_logits, tokens_of
from moesaic.exporting.result import LogitCheck
from moesaic.loading import load
from moesaic.probe import run_logits

RELATIVE = 5e-5
"""Largest difference that counts as rounding, per unit of the largest logit; llama.cpp sums in other orders."""


def compare_with_llama_cpp(
    native: Path, gguf: Path, *, text: Path | str | None, device: str | None, quiet: bool
) -> list[LogitCheck]:
    """Run a native checkpoint in transformers and its GGUF file in llama.cpp on the same tokens."""
    checkpoint = open_checkpoint(native)
    batches = list(tokens_of(checkpoint, checkpoint, text))
    total = 2 * sum(tokens.numel() for _, tokens in batches)
    with progress(total, unit="tokens", label="checking", quiet=quiet) as tick:
        model = load(native, device=device, dtype="float32")
        ours = [torch.cat(list(run_logits(model, tokens, 1, tick))) for _, tokens in batches]
        del model
        engine = open_llama(gguf, context=max(tokens.shape[1] for _, tokens in batches))
        theirs = []
        for _, tokens in batches:
            theirs.append(llama_logits(engine, tokens))
            tick(tokens.numel())
    return [
        compare_logits(f"{what} in llama.cpp", one, other, RELATIVE)
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
