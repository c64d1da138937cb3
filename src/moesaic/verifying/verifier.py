"""`verify`: read the claim, run the dense model, then the MoE on the same hidden states, and compare."""

import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from moesaic.checkpoint.source import Checkpoint, open_checkpoint
from moesaic.common.errors import MoesaicError
from moesaic.common.progress import progress
from moesaic.families.dense import DenseModel, detect
from moesaic.loading import load
from moesaic.probe import tokens_for
from moesaic.verifying.checks import checks_for
from moesaic.verifying.claim import Claim, other_weights, read_claim
from moesaic.verifying.expanded import ExpandedReport, is_expanded, verify_expanded
from moesaic.verifying.identities import from_specialists, rho, scaled_dense
from moesaic.verifying.measure import (
    DenseRun,
    Identity,
    compare_logits,
    decoder_layers,
    measure_layer,
    run_dense,
    view_layer,
)
from moesaic.verifying.report import LayerMeasure, VerifyReport
from moesaic.verifying.specialists import open_specialists


def verify(
    source: str | Path,
    target: str | Path,
    *,
    text: str | Path | None = None,
    device: str | None = None,
    batch_size: int = 1,
    dtype: str | None = None,
    quiet: bool = False,
) -> VerifyReport | ExpandedReport:
    """Say which statement about an upcycled or expanded checkpoint applies, and measure it on up to 1,000 tokens.

    Args:
        source: the checkpoint that the target was made from: folder, or hub id `org/name[@revision]`.
        target: the checkpoint that `upcycle` or `expand` wrote.
        text: UTF-8 file to measure on. Default: docstrings of Python's own library. Without a tokenizer: random tokens.
        device: `cpu`, `cuda`, ... Default: cuda if there is one, else cpu.
        batch_size: sequences of 250 tokens that run at once.
        dtype: float32 (default), bfloat16, float16 or auto (the checkpoint's own), for both models.
        quiet: no progress and no notices.

    Returns:
        The statement, the figures for the whole model and (after `upcycle`) per layer, and whether the statement holds.

    Raises:
        MoesaicError: the target was made by neither, or not from this source; a text that cannot be read.
    """
    if batch_size < 1:
        raise MoesaicError(f"--batch-size {batch_size}: must be at least 1")
    before, after = open_checkpoint(source), open_checkpoint(target)
    check = verify_expanded if is_expanded(after) else verify_upcycled
    return check(before, after, text=text, device=device, batch_size=batch_size, dtype=dtype, quiet=quiet)


def verify_upcycled(
    before: Checkpoint,
    moe: Checkpoint,
    *,
    text: str | Path | None = None,
    device: str | None = None,
    batch_size: int = 1,
    dtype: str | None = None,
    quiet: bool = False,
) -> VerifyReport:
    """`verify` for what `upcycle` made; `before` is the dense base."""
    base = detect(before)
    claim = read_claim(base, moe)
    tokens_BL, described = tokens_for(before, moe, text, vocab=base.vocab)
    notes = other_weights(before, claim.base_hash, quiet=quiet)
    with progress(2 * tokens_BL.numel(), unit="tokens", label="verifying", quiet=quiet) as tick:
        model = load(before.path, device=device, dtype=dtype or "float32")
        run_dtype = model.dtype
        dense = run_dense(model, tokens_BL, claim.moe_layers, batch_size, tick)
        del model
        gc.collect()
        model = load(moe.path, device=device, dtype=run_dtype)
        difference, dense_perplexity, moe_perplexity = compare_logits(model, tokens_BL, dense, batch_size, tick)
    specialists, more = open_specialists(claim, base)
    measures = _measure_layers(model, claim, dense, specialists)
    largest_logit = dense.logits_BLV.abs().max().item()
    stored = {base.dtype, *(info.dtype for name, info in moe.tensors.items() if ".experts." in name)}
    return VerifyReport(
        source=before.name,
        target=moe.name,
        made=claim.made,
        code=claim.code,
        statement=claim.text,
        tokens=tokens_BL.numel(),
        text=described,
        dtype=str(run_dtype).removeprefix("torch."),
        layers=measures,
        checks=checks_for(
            claim,
            measures,
            run_dtype=str(run_dtype).removeprefix("torch."),
            stored=stored,
            logit_difference=difference / max(1.0, largest_logit / 50),
            perplexities=(dense_perplexity, moe_perplexity),
        ),
        max_logit_difference=difference,
        perplexity_source=dense_perplexity,
        perplexity_target=moe_perplexity,
        notes=(*notes, *more, *_zero_states(dense)),
    )


def _zero_states(dense: DenseRun) -> list[str]:
    """Say where tokens have a hidden state of zeros, as a padding token's may be."""
    zeros = {layer: int((~states_TD.any(-1)).sum()) for layer, states_TD in dense.hidden_TD.items()}
    return [
        f"{count} token{'s' if count > 1 else ''} with a hidden state of zeros (all router logits tie) left out of the "
        f"figures of layer {layer}"
        for layer, count in zeros.items()
        if count
    ]


def _measure_layers(
    model: Any, claim: Claim, dense: Any, specialists: Sequence[DenseModel] | None
) -> list[LayerMeasure]:
    groups = None if claim.spec is None or claim.spec.groups is None else torch.tensor(claim.spec.groups)
    identity, factor = _identity(claim, specialists)
    blocks = decoder_layers(model)
    measures = []
    for layer in claim.moe_layers:
        view = view_layer(blocks[layer].mlp, layer, dense)
        measures.append(measure_layer(view, shards=claim.shards, groups_E=groups, identity=identity, rho=factor))
    return measures


def _identity(claim: Claim, specialists: Sequence[DenseModel] | None) -> tuple[Identity | None, Identity | None]:
    """Return the identity that the statement asserts beyond y = FFN(x), and N2's factor."""
    spec, share = claim.spec, claim.routed_share
    if spec is None:
        return None, None
    makers: dict[str, Callable[[], Identity | None]] = {
        "N2": lambda: scaled_dense(shards=spec.shards, share=share),
        "D1": lambda: from_specialists(specialists, shards=spec.shards, share=share, factors=spec.factors),
        "D3": lambda: from_specialists(
            specialists,
            shards=spec.shards,
            share=share,
            factors=None if spec.top_k == spec.shards else spec.factors,
        ),
    }
    make = makers.get(claim.code)
    return make() if make else None, rho(shards=spec.shards) if claim.code == "N2" else None
