"""Samples to token ids, with all cores, and the identity of the tokenizer that did it."""

import json
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from moesaic.common.errors import MoesaicError
from moesaic.data.cache import Document
from moesaic.data.chat import ChatRenderer
from moesaic.data.samples import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Settings of the last call that a tokenizer carries in its serialised form.
_CALL_STATE = ("truncation", "padding")


class Encoder:
    """A private copy of a tokenizer's fast backend, free of the truncation and padding that it may be set to."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        """Raises `MoesaicError` where the tokenizer has no end-of-sequence token or no fast backend."""
        import tokenizers

        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, tokenizers.Tokenizer):
            raise MoesaicError(f"{tokenizer.name_or_path}: not a fast tokenizer; a tokenizer.json is needed")
        if not isinstance(tokenizer.eos_token_id, int):
            raise MoesaicError(f"{tokenizer.name_or_path}: the tokenizer has no end-of-sequence token; set eos_token")
        settings = json.loads(backend.to_str()) | dict.fromkeys(_CALL_STATE)
        self._tokenizer = tokenizer
        self._backend = tokenizers.Tokenizer.from_str(json.dumps(_without_trimming(settings)))
        self._backend.encode_special_tokens = backend.encode_special_tokens
        self.eos_id: int = tokenizer.eos_token_id
        self.padding_id = tokenizer.pad_token_id if isinstance(tokenizer.pad_token_id, int) else self.eos_id
        self.vocab_size = max(self._backend.get_vocab(with_added_tokens=True).values()) + 1
        identity = [settings, self.eos_id, backend.encode_special_tokens, tokenizers.__version__]
        self.fingerprint = xxhash.xxh3_128_hexdigest(json.dumps(identity, sort_keys=True).encode())

    @cached_property
    def render_chat(self) -> ChatRenderer:
        """The chat template of the tokenizer; `MoesaicError` where it has none."""
        return ChatRenderer(self._tokenizer)

    def encode(self, samples: Sequence[Sample]) -> list[Document]:
        """Tokenise samples of one source.

        A token is trained on if it has any character of a trained span. The end-of-sequence token is put at the end
        of every document and trained on, unless the last token trained on is one already.
        """
        return [self._finish(ids_N, masked_N) for ids_N, masked_N in self._encode(samples)]

    def _encode(self, samples: Sequence[Sample]) -> list[tuple[NDArray[np.uint32], NDArray[np.bool_] | None]]:
        first = samples[0]
        if first.ids is not None:
            return [(np.array(sample.ids, dtype=np.uint32), None) for sample in samples]
        texts = [sample.text for sample in samples]
        if first.trained is None:  # without offsets: faster
            encodings = self._backend.encode_batch_fast(texts, add_special_tokens=first.add_special_tokens)
            return [(np.array(encoding.ids, dtype=np.uint32), None) for encoding in encodings]
        encodings = self._backend.encode_batch(texts, add_special_tokens=first.add_special_tokens)
        return [
            (np.array(encoding.ids, dtype=np.uint32), _masked(encoding.offsets, sample.trained or ()))
            for encoding, sample in zip(encodings, samples, strict=True)
        ]

    def _finish(self, ids_N: NDArray[np.uint32], masked_N: NDArray[np.bool_] | None) -> Document:
        if masked_N is None:
            masked_N = np.zeros(len(ids_N), dtype=np.bool_)
        trained_N = ids_N[~masked_N]
        if not len(trained_N) or trained_N[-1] != self.eos_id:
            ids_N = np.append(ids_N, np.uint32(self.eos_id))
            masked_N = np.append(masked_N, np.bool_(False))
        if not masked_N.any():
            return Document(ids=ids_N)
        edge_N = np.flatnonzero(np.diff(masked_N.astype(np.int8), prepend=0, append=0)).tolist()
        return Document(ids=ids_N, masked=tuple(zip(edge_N[::2], edge_N[1::2], strict=True)))


def _masked(offsets: list[tuple[int, int]], trained: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
    """Which tokens have no character in any of the spans."""
    start_N, stop_N = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
    masked_N = np.ones(len(offsets), dtype=np.bool_)
    for start, stop in trained:
        masked_N &= ~((stop_N > start) & (start_N < stop))
    return masked_N


def _without_trimming(value: Any) -> Any:
    """Settings under which a token's offsets cover all of its characters, leading spaces too. Ids stay the same."""
    if isinstance(value, dict):
        return {key: False if key == "trim_offsets" else _without_trimming(item) for key, item in value.items()}
    return [_without_trimming(item) for item in value] if isinstance(value, list) else value
