"""Is a specialist the base trained further? Compared from configs, headers and tokenizers. No torch."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moesaic.checkpoint.source import file_inside, load_json
from moesaic.common.errors import MoesaicError
from moesaic.families.dense import DenseModel

_MEANINGLESS = frozenset(
    {
        "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "_name_or_path", "use_cache",
        "_attn_implementation", "output_attentions", "output_hidden_states", "return_dict", "initializer_range",
        "attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "id2label", "label2id", "problem_type",
        "chunk_size_feed_forward", "is_encoder_decoder", "pretraining_tp", "task_specific_params", "unsloth_version",
        "unsloth_fixed", "cache_implementation",
    }
)  # fmt: skip
"""Config keys that change neither what the weights mean nor what the model computes at inference."""

_BASE_WINS = ("max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
"""Keys that may differ: the result takes the base's, and that is said."""

_ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_local_base_freq", "rope_parameters")


def compare(base: DenseModel, specialist: DenseModel, name: str) -> list[str]:
    """Return one sentence for each difference that is allowed.

    Args:
        base: the base.
        specialist: the specialist.
        name: how messages call the specialist.

    Raises:
        MoesaicError: fields of the config or the tokenizers differ; every one that does is named.
    """
    ours, theirs = _comparable(base.config), _comparable(specialist.config)
    who = f"--specialist {name} ({specialist.checkpoint.name})"
    if ours["model_type"] != theirs["model_type"]:
        raise MoesaicError(
            f"{who}: is a {theirs['model_type']} model and the base is {ours['model_type']}; every specialist must be "
            "the base trained further"
        )
    both = ours.keys() & theirs.keys()
    differing = [f"{key} is {_show(theirs[key])} and in the base {_show(ours[key])}" for key in sorted(both)
                 if ours[key] != theirs[key] and key not in _BASE_WINS]  # fmt: skip
    if differing:
        raise MoesaicError(f"{who}: its config.json differs from the base's: {'; '.join(differing)}")
    notices = [
        f"{who}: {key} is {_show(theirs[key])}, the result keeps the base's {_show(ours[key])}"
        for key in _BASE_WINS
        if key in both and ours[key] != theirs[key]
    ]
    one_sided = sorted(key for key in ours.keys() ^ theirs.keys() if not _trivial((ours | theirs)[key]))
    if one_sided:
        notices.append(f"{who}: only one of its config.json and the base's names {', '.join(one_sided)}")
    if specialist.dtype != base.dtype:
        notices.append(f"{who}: its weights are {specialist.dtype} and the base's {base.dtype}")
    return notices + compare_tokenizers(base.checkpoint.path, specialist.checkpoint.path, who)


def _comparable(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that matter, the many spellings of the same rope made one, derived sizes written out."""
    kept = {key: value for key, value in config.items() if key not in _MEANINGLESS and key not in _ROPE_KEYS}
    heads = int(config["num_attention_heads"])
    kept["num_key_value_heads"] = config.get("num_key_value_heads") or heads
    kept["head_dim"] = config.get("head_dim") or int(config["hidden_size"]) // heads
    return kept | {f"rope {key}": value for key, value in _rope(config).items()}


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rope as one flat dict, from transformers 5 (`rope_parameters`) or 4 (`rope_theta`, `rope_scaling`)."""
    parameters = config.get("rope_parameters")
    if parameters is None:
        scaling = dict(config.get("rope_scaling") or {})
        scaling.setdefault("rope_type", scaling.pop("type", "default"))
        parameters = scaling | ({"rope_theta": config["rope_theta"]} if config.get("rope_theta") is not None else {})
        if config.get("rope_local_base_freq") is not None:
            local = {"rope_type": "default", "rope_theta": config["rope_local_base_freq"]}
            parameters = {"full_attention": parameters, "sliding_attention": local}
    flat: dict[str, Any] = {}
    for key, value in parameters.items():
        flat |= {f"{key} {inner}": item for inner, item in value.items()} if isinstance(value, dict) else {key: value}
    return flat


def _trivial(value: Any) -> bool:
    """Whether a key that only one config has says what leaving it out says."""
    return value is None or value is False or value in ([], {})


def _show(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


# --- tokenizers -------------------------------------------------------------------------------------------------------

_TOKENIZER_SECTIONS = ("model", "added_tokens", "normalizer", "pre_tokenizer")
_PLAIN_FILES = ("tokenizer.model", "vocab.json", "merges.txt", "vocab.txt")


def compare_tokenizers(base: Path, specialist: Path, who: str) -> list[str]:
    """Compare tokenizer.json by content where both have one, else the vocabulary files byte by byte.

    Raises:
        MoesaicError: the two give different token ids; the first difference is named.
    """
    ours, theirs = _tokenizer_files(base), _tokenizer_files(specialist)
    if not theirs:
        return [f"{who}: has no tokenizer, so it could not be compared with the base's"] if ours else []
    if not ours:
        return [f"{who}: has a tokenizer and the base has none; the result gets none"]
    shared = [name for name in ours if name in theirs]
    if not shared:
        return [f"{who}: its tokenizer ({theirs[0]}) and the base's ({ours[0]}) are different files and not compared"]
    for name in shared[:1] if shared[0] == "tokenizer.json" else shared:
        first, second = (file_inside(folder, name, told_by=str(folder)) for folder in (base, specialist))
        if first.read_bytes() == second.read_bytes():
            continue
        difference = _json_difference(first, second) if name == "tokenizer.json" else "its content"
        if difference:
            raise MoesaicError(
                f"{who}: its {name} differs from the base's in {difference}; the experts would see other token ids"
            )
    return []


def _tokenizer_files(folder: Path) -> list[str]:
    return [name for name in ("tokenizer.json", *_PLAIN_FILES) if (folder / name).exists()]


def _json_difference(first: Path, second: Path) -> str | None:
    """Name the first difference that changes token ids; None where the two tokenizers are the same."""
    ours, theirs = load_json(first), load_json(second)
    vocabularies = [_vocabulary(tokenizer) for tokenizer in (ours, theirs)]
    if vocabularies[0] != vocabularies[1]:
        tokens = sorted(dict(vocabularies[0].items() ^ vocabularies[1].items()))
        token = tokens[0]
        ids = [vocabulary.get(token, "missing") for vocabulary in vocabularies]
        return f"{len(tokens)} tokens of the vocabulary ({token!r} is {ids[1]}, in the base {ids[0]})"
    return next((key for key in _TOKENIZER_SECTIONS if _normal(ours.get(key)) != _normal(theirs.get(key))), None)


def _vocabulary(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    """Token -> id, added tokens included."""
    vocabulary = (tokenizer.get("model") or {}).get("vocab") or {}
    if isinstance(vocabulary, list):  # unigram: (token, score) pairs
        vocabulary = {str(pair[0]): index for index, pair in enumerate(vocabulary)}
    return {**vocabulary, **{str(token["content"]): token["id"] for token in tokenizer.get("added_tokens") or []}}


def _normal(section: Any) -> Any:
    """Merges are written as "a b" or as ["a", "b"]; absent and null options mean the same."""
    if isinstance(section, dict):
        kept = {key: _normal(value) for key, value in section.items() if value is not None}
        if "merges" in kept:
            kept["merges"] = [pair if isinstance(pair, str) else " ".join(pair) for pair in section["merges"]]
        return kept
    return [_normal(item) for item in section] if isinstance(section, list) else section
