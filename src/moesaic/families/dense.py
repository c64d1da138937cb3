"""Recognise a dense checkpoint and account for every one of its tensors, from headers and config alone (no torch)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moesaic.checkpoint.lazy import Lazy, stored
from moesaic.checkpoint.streaming import byte_blocks
from moesaic.common.errors import MoesaicError
from moesaic.families.config_values import check_depth, text_config
from moesaic.families.dense_table import EMBEDDINGS, HEAD, ffn_shapes, has_ffn_bias, is_tied, other_shapes
from moesaic.families.experts import ExpertWeights

if TYPE_CHECKING:
    from moesaic.checkpoint.headers import TensorInfo
    from moesaic.checkpoint.source import Checkpoint
    from moesaic.families.dense_table import DenseFamily

# Where the language model's tensors sit in the file, most specific first; the last one is a model without a head.
_PREFIXES = ("model.language_model.", "language_model.model.", "model.", "")
_HEADS = ("lm_head.weight", "language_model.lm_head.weight")
_RECOMPUTED = re.compile(r"(rotary_emb\.(inv_freq|cos_cached|sin_cached)|\.masked_bias)$")
_FLOATS = ("F64", "F32", "BF16", "F16")


@dataclass(frozen=True, kw_only=True)
class DenseModel:
    """A dense checkpoint, understood.

    Attributes:
        checkpoint: where it came from.
        family: the row of the table.
        config: the text model's config (the inner one of a multimodal wrapper), with the effective tie flag.
        prefix: what stands before `embed_tokens`, `layers`, `norm` in the file (canonically `model.`).
        others: canonical name -> stored tensor, for every tensor that is not part of an FFN.
        ffns: one per layer, as it is stored: gate and up (F, D), down (D, F), biases where the base has them.
        hidden, intermediate, num_layers, vocab: D, F, L and the rows of the embedding.
        tied: whether the output head is the embedding (then there is no `lm_head.weight` in `others`).
        activation: name of the FFN's activation.
        ffn_bias: whether the FFN has biases.
        dtype: safetensors code of the FFN weights, for example `BF16`.
        left_out: stored names that do not belong to the text model (vision towers and the like).
        dropped: stored names that are recomputed or repeated and therefore not carried along.
        notices: one sentence for each thing the user should know.
    """

    checkpoint: Checkpoint
    family: DenseFamily
    config: dict[str, Any]
    prefix: str
    others: dict[str, TensorInfo]
    ffns: tuple[ExpertWeights[Lazy], ...]
    hidden: int
    intermediate: int
    num_layers: int
    vocab: int
    tied: bool
    activation: str
    ffn_bias: bool
    dtype: str
    left_out: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()


def detect(checkpoint: Checkpoint) -> DenseModel:
    """Recognise the dense model in a checkpoint and account for all of its tensors.

    Args:
        checkpoint: an opened checkpoint (config and tensor headers).

    Returns:
        The dense model: where each FFN and every other tensor is.

    Raises:
        MoesaicError: not a dense decoder with a gated FFN of a known family; a tensor is missing, unknown or has
            another shape than the config says.
    """
    config_name = f"{checkpoint.name}: config.json"
    family, config = text_config(checkpoint.config, config_name)
    check_depth(config, checkpoint.tensors, config_name)
    wrapped = isinstance(checkpoint.config.get("text_config"), Mapping)
    prefix, head = _locate(checkpoint, wrapped)
    found, left_out, dropped = _canonical(checkpoint.tensors, prefix, head, wrapped)
    said_tied = is_tied(family, config)
    if "vocab_size" not in (checkpoint.config["text_config"] if wrapped else checkpoint.config):
        config = {**config, "vocab_size": found[EMBEDDINGS].shape[0]}
    config = _settle_tie(checkpoint, family, config, found, dropped)
    others, ffn_names = other_shapes(family, config), ffn_shapes(family, config)
    num_layers = int(config["num_hidden_layers"])
    expected = others | {f"model.layers.{i}.{n}": s for i in range(num_layers) for n, s in ffn_names.items()}
    _check(checkpoint, found, expected)
    ffns = tuple(_ffn(family, config, found, index) for index in range(num_layers))
    return DenseModel(
        checkpoint=checkpoint,
        family=family,
        config=config,
        prefix=prefix,
        others={name: found[name] for name in others},
        ffns=ffns,
        hidden=int(config["hidden_size"]),
        intermediate=int(config["intermediate_size"]),
        num_layers=num_layers,
        vocab=int(config["vocab_size"]),
        tied=is_tied(family, config),
        activation=str(config.get(family.activation_key) or family.activation),
        ffn_bias=has_ffn_bias(family, config),
        dtype=ffns[0].down_DI.dtype,
        left_out=tuple(left_out),
        dropped=tuple(dropped),
        notices=_notices(checkpoint, left_out, dropped, untied=said_tied and not config["tie_word_embeddings"]),
    )


def _locate(checkpoint: Checkpoint, wrapped: bool) -> tuple[str, str | None]:
    """Return the prefix of the language model's tensors and the stored name of its output head, if there is one."""
    prefixes = _PREFIXES if wrapped else _PREFIXES[2:]
    prefix = next((p for p in prefixes if f"{p}embed_tokens.weight" in checkpoint.tensors), None)
    if prefix is None:
        raise MoesaicError(
            f"{checkpoint.name}: no token embedding found (looked for "
            f"{', '.join(p + 'embed_tokens.weight' for p in prefixes)}): the checkpoint is incomplete"
        )
    return prefix, next((name for name in _HEADS if name in checkpoint.tensors), None)


def _canonical(
    tensors: Mapping[str, TensorInfo], prefix: str, head: str | None, wrapped: bool
) -> tuple[dict[str, TensorInfo], list[str], list[str]]:
    """Split the stored tensors into canonical name -> tensor, names left out, names dropped."""
    found: dict[str, TensorInfo] = {}
    left_out: list[str] = []
    dropped: list[str] = []
    for name, info in tensors.items():
        if _RECOMPUTED.search(name):
            dropped.append(name)
        elif name == head:
            found[HEAD] = info
        elif name.startswith(prefix):
            found["model." + name.removeprefix(prefix)] = info
        elif wrapped:
            left_out.append(name)
        else:
            found[name] = info
    return found, left_out, dropped


def _settle_tie(
    checkpoint: Checkpoint,
    family: DenseFamily,
    config: dict[str, Any],
    found: dict[str, TensorInfo],
    dropped: list[str],
) -> dict[str, Any]:
    """Return the config with the tie flag that is in effect.

    A stored head next to a tied config counts only where it differs from the embedding: transformers then leaves the
    two untied as well.
    """
    tied = is_tied(family, config)
    if tied and HEAD in found:
        if _same_bytes(found[HEAD], found[EMBEDDINGS]):
            dropped.append(found.pop(HEAD).name)
        else:
            tied = False
    elif not tied and HEAD not in found:
        raise MoesaicError(
            f"{checkpoint.name}: lm_head.weight is missing although config.json does not tie it to the embedding: "
            "add the tensor, or set tie_word_embeddings to true if the model is tied"
        )
    return {**config, "tie_word_embeddings": tied}


def _same_bytes(one: TensorInfo, other: TensorInfo) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    if not (one.file.exists() and other.file.exists()):
        return True  # only headers are here (a plan before the download): believe the config
    if (one.codes is None) != (other.codes is None):
        return False
    blocks = (byte_blocks(info, 0, info.nbytes) for info in (one, other))
    return all(first == second for (_, first), (_, second) in zip(*blocks, strict=True))


def _check(checkpoint: Checkpoint, found: Mapping[str, TensorInfo], expected: Mapping[str, tuple[int, ...]]) -> None:
    missing = [name for name in expected if name not in found]
    if missing:
        raise MoesaicError(f"{checkpoint.name}: {_names('missing', missing)}: the checkpoint is incomplete")
    unknown = [info.name for name, info in found.items() if name not in expected]
    if unknown:
        raise MoesaicError(
            f"{checkpoint.name}: {_names('unexpected', unknown)}: not part of a dense "
            f"{checkpoint.config.get('model_type')} model as its config.json describes it"
        )
    for name, shape in expected.items():
        if found[name].shape != shape:
            raise MoesaicError(
                f"{checkpoint.name}: {found[name].name} has shape {list(found[name].shape)}, but config.json asks for "
                f"{list(shape)}: the two do not belong together"
            )
        if found[name].dtype not in _FLOATS:
            raise MoesaicError(
                f"{checkpoint.name}: {found[name].name} is {found[name].dtype}, and weights must be one of "
                f"{', '.join(_FLOATS)}: save the model with transformers in bf16"
            )


def _names(what: str, names: list[str], shown: int = 3) -> str:
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return f"{what} tensor{'s' if len(names) > 1 else ''} {', '.join(names[:shown])}{more}"


def _ffn(
    family: DenseFamily, config: Mapping[str, Any], found: Mapping[str, TensorInfo], index: int
) -> ExpertWeights[Lazy]:
    width = int(config["intermediate_size"])
    layer = f"model.layers.{index}."

    def part(name: str, start: int, kind: str) -> Lazy:
        return stored(found[f"{layer}{name}.{kind}"]).rows(start, start + width)

    up_start = width if family.fused_gate_up else 0
    gate, up = family.fused_gate_up or family.gate, family.fused_gate_up or family.up
    biases: dict[str, Lazy] = {}
    if has_ffn_bias(family, config):
        biases = {"gate_bias_I": part(gate, 0, "bias"), "up_bias_I": part(up, up_start, "bias")}
        biases["down_bias_D"] = stored(found[f"{layer}{family.down}.bias"])
    return ExpertWeights(
        gate_ID=part(gate, 0, "weight"),
        up_ID=part(up, up_start, "weight"),
        down_DI=stored(found[f"{layer}{family.down}.weight"]),
        **biases,
    )


def _notices(checkpoint: Checkpoint, left_out: list[str], dropped: list[str], *, untied: bool) -> tuple[str, ...]:
    notices = []
    if untied:
        notices.append(
            f"{checkpoint.name}: config.json ties the output head to the embedding, but the file has a head that "
            "differs from it: the two are taken as untied, as transformers does"
        )
    if left_out:
        parts = sorted({".".join(name.split(".")[:2]) for name in left_out})
        notices.append(
            f"{checkpoint.name}: only the text model is used; {len(left_out)} tensors are left out "
            f"({', '.join(parts[:4])}{', ...' if len(parts) > 4 else ''})"
        )
    if dropped:
        notices.append(
            f"{checkpoint.name}: {len(dropped)} stored tensors are recomputed or repeat the tied embedding and are not "
            f"carried along ({', '.join(dropped[:2])}{', ...' if len(dropped) > 2 else ''})"
        )
    return tuple(notices)
