"""A written checkpoint's tokenizer gives the ids that its source's gave: checked on a text with the usual traps.

transformers picks a tokenizer's class by `tokenizer_class` in tokenizer_config.json and by the `model_type` in
config.json, where some model types overrule the class that is written and others don't. So the same files may be read
by another class beside another config.json: OLMo-2's say GPT2Tokenizer, which for `olmo2` means "what tokenizer.json
says" and for any type that transformers doesn't know means GPT-2's own way to split a text.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesaic.checkpoint.headers import VOCABULARY_FILES
from moesaic.common.files import explained, load_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CONFIG = "tokenizer_config.json"

TRAPS = (
    "It's 3.14159, 1234567890 or 1,000,000; don't they'll I'D\n\n\n  two  spaces\tand\ttabs \r\n",
    " leading space, trailing space ",
    "def f(x_1, *args):\n    return {'a': [x_1 ** 2, ...]}  # CamelCaseWords, snake_case\n",
    "na\u00efve caf\u00e9 cafe\u0301 \u00df \ufb01 \u00bd \u2460 \uff21\uff22 \u200b\u00a0\u2009 \u4f60\u597d\uff0c"
    "\u4e16\u754c \u3053\u3093 \ud55c\uad6d\uc5b4 \u0627\u0644\u0639 \u0939\u093f\u0928\u094d\u0926\u0940",
    "\U0001f469\u200d\U0001f52c\U0001f1e9\U0001f1ea \u2581 \u0120 <s> </s> <|endoftext|> <|im_start|> [MASK] "
    "https://a.b/c?d=e&f#g",
)
"""Contractions, digits, runs of space, line ends, code, composed and wide characters, emoji, special tokens."""


def keep_ids(tokenizer: "PreTrainedTokenizerBase", folder: Path) -> str | None:
    """See to it that transformers reads from `folder` a tokenizer with the ids of this one.

    Where it would not, the class is named in tokenizer_config.json; where a model type overrules that, tokenizer.json
    says what the class does. Neither needs code of ours.

    Returns:
        A line where the ids differ even so; None where all is well.
    """
    expected = ids_of(tokenizer)
    for change in (None, _name_class, _write_out):
        if change is not None:
            change(folder, tokenizer)
        if _read(folder) == expected:
            return None
    return (
        "transformers reads other token ids from the result's tokenizer files than from the source's; load the "
        "source's tokenizer with it"
    )


def keep_source_ids(source: Path, folder: Path) -> str | None:
    """`keep_ids` for the files of a source that were copied to `folder`; nothing to say where it has no tokenizer."""
    if not any(path.exists() for pattern in VOCABULARY_FILES for path in folder.glob(pattern)):
        return None
    tokenizer = _load(source)
    if tokenizer is None:
        return f"{source}: its tokenizer cannot be loaded here, so the copy was not compared with it"
    return keep_ids(tokenizer, folder)


def ids_of(tokenizer: Any) -> list[list[int]]:
    """The ids of `TRAPS`."""
    return [tokenizer(text, verbose=False)["input_ids"] for text in TRAPS]


def _load(folder: Path) -> "PreTrainedTokenizerBase | None":
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception:  # tokenizers raises Exception itself for a tokenizer.json that is none
        return None


def _read(folder: Path) -> list[list[int]] | None:
    tokenizer = _load(folder)
    return None if tokenizer is None else ids_of(tokenizer)


def _name_class(folder: Path, tokenizer: Any) -> None:
    path = folder / _CONFIG
    config = load_json(path) if path.exists() else {}
    with explained(path):
        text = json.dumps(config | {"tokenizer_class": type(tokenizer).__name__}, indent=2, ensure_ascii=False) + "\n"
        path.write_text(text, encoding="utf-8")


def _write_out(folder: Path, tokenizer: Any) -> None:
    path = folder / "tokenizer.json"
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is not None:
        with explained(path):
            path.write_text(backend.to_str(pretty=True), encoding="utf-8")
