"""The token ids of every base survive its becoming an MoE, and nobody needs our code, or moesaic, to get them.

Tokenizers are built here, as the released ones are: split by OLMo-2's pattern under a class name that misleads, by
Qwen's with composed characters made one, and by Llama-2's pieces with byte fallback.
"""

import json
import subprocess
import sys
from collections.abc import Callable

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer

from moesaic.checkpoint.config_file import write_config
from moesaic.checkpoint.same_tokens import TRAPS, ids_of, keep_source_ids
from moesaic.families.dense_table import FAMILIES
from moesaic.families.moe_table import TARGETS
from moesaic.modeling import register
from moesaic.modeling.names import MOE_BASES
from tests.integration.test_kept import save_olmo2_tokenizer

QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _save(folder, backend, tokenizer_class):
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": tokenizer_class, "eos_token": "<|end|>", "bos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def _of_bytes(*split):
    pairs = [("1", "2"), ("12", "3"), ("\u0120", "s"), ("e", "s"), ("\u0120", "\u0120"), ("c", "a")]
    names = ["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, pairs)]
    backend = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, pairs))
    backend.pre_tokenizer = pre_tokenizers.Sequence([*split, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    backend.decoder = decoders.ByteLevel()
    return backend


def save_qwen(folder):
    backend = _of_bytes(pre_tokenizers.Split(Regex(QWEN), "isolated"))
    backend.normalizer = normalizers.NFC()
    _save(folder, backend, "Qwen2Tokenizer")


def save_llama2(folder):
    pairs = [("\u2581", "s"), ("1", "2"), ("\u2581", "\u2581"), ("c", "a")]
    letters = sorted({character for text in TRAPS for character in text if character.isascii() and character != " "})
    names = ["<unk>", "<s>", "</s>", "<|end|>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *letters]
    names += map("".join, pairs)
    vocabulary = {name: i for i, name in enumerate(dict.fromkeys(names))}
    backend = Tokenizer(models.BPE(vocabulary, pairs, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    _save(folder, backend, "LlamaTokenizerFast")


TOKENIZERS: dict[str, Callable] = {
    "olmo2": save_olmo2_tokenizer,
    "qwen": save_qwen,
    "llama2": save_llama2,
}


MISLEADS = "olmo2"
"""The kind of tokenizer that is tried beside families of experts as well."""
EXPORTED = "llama"
"""The base whose results are also written as every native family, as `export` does."""

ALONE = """
import json, sys, warnings
warnings.simplefilter("ignore")
from transformers import AutoTokenizer
folders, texts = json.load(sys.stdin)
read = {folder: [AutoTokenizer.from_pretrained(folder)(text)["input_ids"] for text in texts] for folder in folders}
assert not {"moesaic"} & set(sys.modules)
json.dump(read, sys.stdout)
"""


def _copy(source, folder, model_type):
    """What a verb does: the source's files beside another config.json, then `keep_source_ids`."""
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((source / name).read_bytes())
    write_config(folder, {"model_type": model_type})
    return keep_source_ids(source, folder)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_the_ids_of_every_base(kind, tmp_path):
    register()
    expected = {}
    for base in (*FAMILIES, *(MOE_BASES if kind == MISLEADS else ())):
        source = tmp_path / base
        source.mkdir()
        write_config(source, {"model_type": base})
        TOKENIZERS[kind](source)
        ids = ids_of(AutoTokenizer.from_pretrained(source))
        for made in (f"moesaic_{base}", *(TARGETS if base == EXPORTED else ())):
            folder = tmp_path / f"{base}-{made}"
            assert _copy(source, folder, made) is None, (base, made)
            expected[str(folder)] = ids
    given = json.dumps([list(expected), TRAPS])
    done = subprocess.run([sys.executable, "-c", ALONE], input=given, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == expected
