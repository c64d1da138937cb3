"""Where every tensor of an output checkpoint goes: file names, headers and offsets, before any tensor exists.

Everything here is a pure function of the tensor list and the shard size, so the bytes written cannot depend on the
number of workers or on the order in which tensors are finished. Torch-free.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from moesaic.checkpoint.headers import DTYPE_BITS, MAX_HEADER_BYTES, SINGLE_FILE, tensor_bytes
from moesaic.common.errors import MoesaicError

DEFAULT_SHARD_SIZE = 5_000_000_000
"""5 GB, as `save_pretrained` of transformers."""

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputTensor:
    """A tensor to be written: its name, safetensors dtype code ("BF16") and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return tensor_bytes(self.dtype, self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputFile:
    """One file to be written: `header` (length prefix included), then the tensors at absolute `offsets`."""

    name: str
    header: bytes
    tensors: tuple[OutputTensor, ...]
    offsets: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the whole file in bytes."""
        return len(self.header) + sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """All weight files of an output checkpoint; `index` are the bytes of the index file, None for a single file."""

    files: tuple[OutputFile, ...]
    index: bytes | None

    @property
    def nbytes(self) -> int:
        """Size of all weight files and the index in bytes."""
        return sum(file.nbytes for file in self.files) + len(self.index or b"")

    @property
    def tensors(self) -> tuple[OutputTensor, ...]:
        """All tensors in the order they have in the files."""
        return tuple(tensor for file in self.files for tensor in file.tensors)


def parse_size(text: str | int, *, flag: str = "--shard-size") -> int:
    """Bytes in "5GB", "500MB", "2GiB", "1.5GB" or plain "5000000000"; 1 GB = 10^9 bytes, 1 GiB = 2^30.

    A size that cannot be read, or is not positive, is a MoesaicError that names `flag`.
    """
    match = re.fullmatch(r"\s*(\d+(?:_\d+)*(?:\.\d+)?|\.\d+)\s*([A-Za-z]*)\s*", str(text), flags=re.ASCII)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise MoesaicError(f'{flag} {text}: not a size; write "5GB", "500MB", "2GiB" or a number of bytes')
    whole, _, fraction = match[1].replace("_", "").partition(".")
    size = (int(whole or "0") * 10 ** len(fraction) + int(fraction or "0")) * unit // 10 ** len(fraction)
    if size <= 0:
        raise MoesaicError(f'{flag} {text}: must be at least one byte; the default is "5GB"')
    return size


def plan_files(tensors: Iterable[OutputTensor], shard_size: int = DEFAULT_SHARD_SIZE) -> Layout:
    """Distribute tensors over files of at most `shard_size` bytes of tensors, in the order given.

    Within a file, tensors of wider dtypes come first (else in the order given), so that each starts at a multiple of
    its element size: loaders that view a mapped file as a tensor need that.
    One file is `model.safetensors`; several are `model-00001-of-0000N.safetensors` and an index. A tensor larger than
    `shard_size` gets a file of its own. Names must be unique.
    """
    ordered = tuple(tensors)
    _check(ordered)
    shards = _split(ordered, shard_size)
    names = [SINGLE_FILE]
    if len(shards) > 1:
        names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    files = tuple(_plan_file(name, shard) for name, shard in zip(names, shards, strict=True))
    return Layout(files=files, index=_index(files) if len(files) > 1 else None)


def _check(tensors: Sequence[OutputTensor]) -> None:
    names: set[str] = set()
    for tensor in tensors:
        assert tensor.dtype in DTYPE_BITS, f"{tensor.name}: unknown dtype {tensor.dtype}"
        assert tensor.name not in names, f"{tensor.name}: planned twice"
        assert tensor.name != "__metadata__", "a reserved name"
        names.add(tensor.name)


def _split(tensors: Sequence[OutputTensor], shard_size: int) -> list[list[OutputTensor]]:
    shards: list[list[OutputTensor]] = [[]]
    used = 0
    for tensor in tensors:
        if shards[-1] and used + tensor.nbytes > shard_size:
            shards.append([])
            used = 0
        shards[-1].append(tensor)
        used += tensor.nbytes
    return shards


def _plan_file(name: str, unordered: Sequence[OutputTensor]) -> OutputFile:
    tensors = sorted(unordered, key=lambda tensor: -DTYPE_BITS[tensor.dtype])
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    ends = [0]
    for tensor in tensors:
        ends.append(ends[-1] + tensor.nbytes)
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [ends[-2], ends[-1]],
        }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    # Spaces after the JSON are allowed by the format. Tensors start at a multiple of 64 bytes, a cache line.
    text += b" " * (-(8 + len(text)) % 64)
    assert len(text) <= MAX_HEADER_BYTES, "more tensors than one safetensors header can hold"
    header = len(text).to_bytes(8, "little") + text
    offsets = tuple(len(header) + end for end in ends[:-1])
    return OutputFile(name=name, header=header, tensors=tuple(tensors), offsets=offsets)


def _index(files: Sequence[OutputFile]) -> bytes:
    weight_map = {tensor.name: file.name for file in files for tensor in file.tensors}
    total = sum(tensor.nbytes for file in files for tensor in file.tensors)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode("utf-8")
