"""One forward pass over the documents that keeps what every router did with every token, and that read in blocks.

The folder (T tokens in the order of `Sample`, L MoE layers, E experts, K active):

```
logits.npy    (T, L, E) float16   what all probabilities are computed from
ids.npy       (T, L, K) uint8, or uint16 from 257 experts
weights.npy   (T, L, K) float16
tokens.npy    (T,) uint32         token ids
starts.npy    (D + 1,) int64      where each document starts
```

The chosen experts are kept beside the logits because half precision ties experts that fp32 tells apart, and because
then nothing here has to know a family's rule. The files are .npy, which `numpy.load(mmap_mode="r")` opens; here they
are read and written by position, because pages of a mapped file count as this process's memory.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from numpy.lib import format as npy
from torch import Tensor, nn

from moesaic.analysis.documents import Sample
from moesaic.checkpoint.output import require_disk
from moesaic.checkpoint.pio import allocate, read_into, write_all
from moesaic.common.errors import MoesaicError
from moesaic.common.files import explained
from moesaic.common.numbers import NotFiniteError
from moesaic.common.progress import progress
from moesaic.modeling.finite import first_not_finite, is_finite
from moesaic.routing.capture import Scoring, decision_of, find_blocks

BLOCK_TOKENS = 4096
"""Tokens at once: with 2,000 probabilities each (16 layers of 125 experts), 33 MB in fp32."""

USUAL_TOKENS = 256
"""Tokens of a usual document; `batch_size` counts such ones."""

_HALF_MAX = 65504.0
"""The largest finite number of half precision; larger logits are cut to it."""


@dataclass(frozen=True, kw_only=True)
class RouterShape:
    """What decides the size of a capture."""

    layers: tuple[int, ...]
    """The MoE layers' indices, for messages."""
    experts: int
    active: int
    returns: str = "logits"
    """What the family's router gives first (`MoEFamily.returns`)."""

    @property
    def id_dtype(self) -> np.dtype:
        """The smallest that holds every expert's id."""
        return np.dtype(np.uint8 if self.experts <= 256 else np.uint16)

    @property
    def token_bytes(self) -> int:
        """Bytes on disk per token."""
        return len(self.layers) * (2 * self.experts + self.active * (2 + self.id_dtype.itemsize)) + 4


class TokenFile:
    """An array whose first axis is tokens. Use as `with open_tokens(path) as file: file.read(0, 100)`."""

    def __init__(self, path: Path, fd: int, offset: int, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self.path = path
        self.shape = shape
        self.dtype = dtype
        self._fd = fd
        self._offset = offset
        self._row = int(np.prod(shape[1:])) * dtype.itemsize

    def read(self, start: int, stop: int) -> np.ndarray:
        """Rows start to stop, as a new array."""
        rows = np.empty((stop - start, *self.shape[1:]), self.dtype)
        read_into(self._fd, _bytes(rows), self._offset + start * self._row, self.path)
        return rows

    def write(self, start: int, rows: np.ndarray) -> None:
        """Put rows at their place."""
        assert rows.dtype == self.dtype, f"{rows.dtype} into a file of {self.dtype}"
        assert rows.shape[1:] == self.shape[1:], "rows of another shape"
        write_all(self._fd, _bytes(np.ascontiguousarray(rows)), self._offset + start * self._row, self.path)


def _bytes(rows: np.ndarray) -> memoryview:
    return rows.reshape(-1).view(np.uint8).data


@contextmanager
def create_tokens(path: Path, shape: tuple[int, ...], dtype: np.dtype) -> Iterator[TokenFile]:
    """A new file of a known size; its space is reserved at once."""
    with explained(path), path.open("xb+", buffering=0) as raw:
        npy.write_array_header_1_0(raw, {"descr": npy.dtype_to_descr(dtype), "fortran_order": False, "shape": shape})
        offset = raw.tell()
        allocate(raw.fileno(), offset + int(np.prod(shape)) * dtype.itemsize, path)
        yield TokenFile(path, raw.fileno(), offset, shape, dtype)


@contextmanager
def open_tokens(path: Path) -> Iterator[TokenFile]:
    """A file that `create_tokens` or numpy made."""
    with explained(path), path.open("rb", buffering=0) as raw:
        try:
            if npy.read_magic(raw) != (1, 0):
                raise ValueError("another version of the npy format")
            shape, _, dtype = npy.read_array_header_1_0(raw)
        except ValueError as error:
            raise MoesaicError(f"{path}: damaged ({error}); run `moesaic inspect` again") from error
        offset = raw.tell()
        if os.fstat(raw.fileno()).st_size != offset + int(np.prod(shape)) * dtype.itemsize:
            raise MoesaicError(f"{path}: is cut off; run `moesaic inspect` again")
        yield TokenFile(path, raw.fileno(), offset, shape, dtype)


class Capture(NamedTuple):
    """The open files of a capture."""

    logits: TokenFile
    ids: TokenFile
    weights: TokenFile


def capture(
    model: nn.Module,
    sample: Sample,
    shape: RouterShape,
    folder: Path,
    *,
    scoring: Scoring,
    batch_size: int,
    quiet: bool,
) -> Float[ndarray, "domains layers experts"]:
    """Run the documents, each a sequence of its own, through the model and write the folder, which must not exist.

    `model` is a causal language model in evaluation mode, whose output head is not run; `batch_size` documents at once
    change nothing beyond rounding.

    Returns:
        Per domain the mean over its documents of their mean probabilities, over the tokens that the similarity of
        domains is of (`Text.similar_ids`), which may be more than those that are written.

    Raises:
        MoesaicError: not enough disk.
        NotFiniteError: logits of a router that are not finite.
    """
    require_disk(folder, sample.tokens * shape.token_bytes)
    with explained(folder):
        folder.mkdir()
        np.save(folder / "tokens.npy", sample.ids_T)
        np.save(folder / "starts.npy", sample.start_D1)
    rows = (sample.tokens, len(shape.layers))
    sum_NLE = np.zeros((len(sample.domains), len(shape.layers), shape.experts))
    with ExitStack() as stack:
        files = [
            stack.enter_context(create_tokens(folder / name, (*rows, width), np.dtype(dtype)))
            for name, width, dtype in (
                ("logits.npy", shape.experts, np.float16),
                ("ids.npy", shape.active, shape.id_dtype),
                ("weights.npy", shape.active, np.float16),
            )
        ]
        with progress(sample.tokens, unit="tokens", label="running the model", quiet=quiet) as tick:
            for documents, sequences in batches(sample, batch_size):
                taken = run_batch(model, sequences, shape)
                for row, document in enumerate(documents):
                    start, stop = map(int, sample.start_D1[document : document + 2])
                    for file, values in zip(files, taken, strict=True):
                        file.write(start, values[row, : stop - start])
                    similar = len(sample.documents[document].similar_ids)
                    probability_TLE = router_probabilities(taken[0][row, :similar], scoring)
                    sum_NLE[sample.domain_D[document]] += probability_TLE.mean(dim=0, dtype=torch.float64).numpy()
                    tick(stop - start)
    return sum_NLE / np.bincount(sample.domain_D, minlength=len(sum_NLE))[:, None, None]


@contextmanager
def open_capture(folder: Path) -> Iterator[Capture]:
    """Open what `capture` wrote."""
    with ExitStack() as stack:
        yield Capture(*(stack.enter_context(open_tokens(folder / f"{name}.npy")) for name in Capture._fields))


def batches(sample: Sample, size: int) -> Iterator[tuple[list[int], Tensor]]:
    """Documents of like length together, padded on the right, where a causal model cannot see it.

    At most `size` of them, and fewer of those longer than `USUAL_TOKENS`, so that memory stays that of usual ones.
    """
    length_D = np.array([len(text.run_ids) for text in sample.documents])
    order = np.argsort(length_D, kind="stable").tolist()
    while order:
        # Ascending, so the longest of the first n is the last of them.
        fits = [n * length_D[longest] <= size * USUAL_TOKENS for n, longest in enumerate(order[:size], start=1)]
        count = max(1, sum(map(int, fits)))
        documents, order = order[:count], order[count:]
        ids_BS = torch.zeros(count, int(length_D[documents[-1]]), dtype=torch.int64)
        for row, document in enumerate(documents):
            ids = sample.documents[document].run_ids
            ids_BS[row, : len(ids)] = torch.from_numpy(ids.astype(np.int64))
        yield documents, ids_BS


@torch.inference_mode()
def run_batch(model: nn.Module, ids_BS: Tensor, shape: RouterShape) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One forward pass: logits (B, S, L, E), ids and weights (B, S, L, K) in the dtypes of the files."""
    base: Any = getattr(model, "base_model", model)
    device = next(model.parameters()).device
    with _watched(model, shape.returns) as outputs:
        # No attention mask: every sequence is one document, and padding is on its right.
        base(input_ids=ids_BS.to(device), use_cache=False)
    assert len(outputs) == len(shape.layers), "a router per MoE layer"
    for layer, (logits_TE, _, _) in zip(shape.layers, outputs, strict=True):
        if not is_finite(logits_TE):
            found = first_not_finite(base, lambda: base(input_ids=ids_BS.to(device), use_cache=False))
            name = getattr(model, "name_or_path", "the model")
            raise NotFiniteError(f"{name}: {found or f'the router of layer {layer} gives NaN or infinity'}")
    logits = [logits.clamp(-_HALF_MAX, _HALF_MAX).to(torch.float16) for logits, _, _ in outputs]
    return (
        _stack(logits, ids_BS.shape),
        _stack([ids for _, _, ids in outputs], ids_BS.shape).astype(shape.id_dtype),
        _stack([weights.to(torch.float16) for _, weights, _ in outputs], ids_BS.shape),
    )


def _stack(values: Sequence[Tensor], shape: torch.Size) -> np.ndarray:
    return torch.stack(list(values), dim=1).cpu().numpy().reshape(*shape, len(values), -1)


@contextmanager
def _watched(model: nn.Module, returns: str) -> Iterator[list[tuple[Tensor, Tensor, Tensor]]]:
    """Collect what each router returns (logits, weights, ids), in the order of the layers."""
    outputs: list[tuple[Tensor, Tensor, Tensor]] = []

    def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
        outputs.append(decision_of(output, returns))

    with ExitStack() as stack:
        for block in find_blocks(model):
            stack.callback(block.router.register_forward_hook(keep).remove)
        yield outputs


@dataclass(frozen=True, kw_only=True)
class Block:
    """Consecutive documents of one domain."""

    domain: int
    first_document: int
    last_document: int
    """One past the last."""
    start: int
    stop: int
    """Tokens."""


def blocks(sample: Sample, size: int = BLOCK_TOKENS) -> Iterator[Block]:
    """All documents in order; a block has about `size` tokens, and at least one document."""
    start_D1, domain_D = sample.start_D1.tolist(), sample.domain_D.tolist()
    first = 0
    for document in range(len(domain_D)):
        last = document + 1
        full = start_D1[last] - start_D1[first] >= size
        if last == len(domain_D) or full or domain_D[last] != domain_D[first]:
            yield Block(
                domain=domain_D[first],
                first_document=first,
                last_document=last,
                start=start_D1[first],
                stop=start_D1[last],
            )
            first = last


def router_probabilities(
    logits_TLE: Float[ndarray, "tokens layers experts"], scoring: Scoring
) -> Float[Tensor, "tokens layers experts"]:
    """The routers' probabilities in fp32: softmax over all experts, or sigmoid scores over their sum."""
    wide_TLE = torch.from_numpy(logits_TLE).float()
    if scoring == "softmax":
        return wide_TLE.softmax(dim=-1)
    scores_TLE = wide_TLE.sigmoid_()
    # Half precision has no smaller number; a token whose scores are all zero has no preference.
    scores_TLE.clamp_min_(torch.finfo(torch.float32).tiny)
    return scores_TLE / scores_TLE.sum(dim=-1, keepdim=True)
