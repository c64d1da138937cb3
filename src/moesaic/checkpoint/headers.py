"""What files a checkpoint has, and what their headers say is in them, without reading (or mapping) any tensor.

A safetensors file is: 8 bytes little-endian length N, N bytes of JSON (name -> dtype, shape, data_offsets), then the
tensors without gaps. Torch-free.
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesaic.common.errors import MoesaicError
from moesaic.common.files import load_json
from moesaic.common.recipe import load_document

if TYPE_CHECKING:
    from moesaic.checkpoint.codes import Codes

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.model",
    "*.tiktoken",
)

VOCABULARY_FILES = ("tokenizer.json", "vocab.json", "vocab.txt", "*.model", "*.tiktoken")
"""Those of them that a tokenizer cannot do without: at least one of these."""

SIDE_FILES = (*TOKENIZER_FILES, "generation_config.json", "chat_template*", "additional_chat_templates/*")
"""Patterns of the files (relative to the checkpoint folder) that an output takes over byte for byte."""

DTYPE_BITS: Mapping[str, int] = {
    "F64": 64,
    "F32": 32,
    "F16": 16,
    "BF16": 16,
    "I64": 64,
    "I32": 32,
    "I16": 16,
    "I8": 8,
    "U64": 64,
    "U32": 32,
    "U16": 16,
    "U8": 8,
    "BOOL": 8,
    "C64": 64,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "F8_E8M0": 8,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F4": 4,
}
"""Bits per element of every dtype that a safetensors file can name."""

MAX_HEADER_BYTES = 100_000_000
"""The safetensors library's own limit."""

_LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorInfo:
    """One tensor of a safetensors file: `nbytes` bytes at absolute position `offset` of `file`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int
    codes: "Codes | None" = None
    """How the numbers are made of quantised ones (`checkpoint.quantised`): then no such bytes are in the file."""


def tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Size in bytes of a tensor of this safetensors dtype code and shape."""
    return -(-math.prod(shape) * DTYPE_BITS[dtype] // 8)


def read_header(file: Path) -> dict[str, TensorInfo]:
    """Tensors of one safetensors file, by name, in the order of their position in the file.

    Refuses (MoesaicError) whatever the safetensors library refuses: no such file, truncated or longer than its header
    says, bad JSON, names given twice, unknown dtypes, offsets that overlap, leave gaps, or leave the file.
    """
    if not file.is_file():
        raise MoesaicError(f"{file}: no such file")
    try:
        with file.open("rb", buffering=0) as stream:
            size = os.fstat(stream.fileno()).st_size
            prefix = _read_exactly(stream.fileno(), min(8, size), 0)
            length = _header_length(prefix, size, file)
            text = _read_exactly(stream.fileno(), length, 8)
    except OSError as error:
        raise MoesaicError(f"{file}: cannot be read ({error.strerror})") from error
    return check_entries(_parse_json(text, file), file=file, start=8 + length, file_size=size)


def check_entries(
    entries: Mapping[str, Any], *, file: Path, start: int, file_size: int | None
) -> dict[str, TensorInfo]:
    """The same from the parsed header.

    `start` is where the tensors begin in the file, `file_size` its size in bytes (None where it isn't known).
    """
    infos = [_tensor_info(name, entry, file, start) for name, entry in entries.items() if name != "__metadata__"]
    infos.sort(key=lambda info: (info.offset, info.nbytes))
    end = start
    for info in infos:
        if info.offset != end:
            what = "overlaps the one before it" if info.offset < end else "leaves a gap before it"
            raise MoesaicError(f"{file}: damaged header, tensor {info.name!r} {what}; fetch the file again")
        end += info.nbytes
    if file_size is not None and file_size < end:
        raise MoesaicError(
            f"{file}: truncated, it has {file_size} bytes and its header needs {end}; fetch the file again"
        )
    if file_size is not None and file_size > end:
        raise MoesaicError(
            f"{file}: damaged, it has {file_size} bytes and its header describes {end}; fetch the file again"
        )
    return {info.name: info for info in infos}


def _header_length(prefix: bytes, size: int, file: Path) -> int:
    if len(prefix) < 8:
        raise MoesaicError(f"{file}: truncated, {size} bytes are too few for a safetensors file; fetch the file again")
    if _LFS_POINTER.startswith(prefix):
        raise MoesaicError(f"{file}: is a Git LFS pointer, not the weights; run `git lfs pull` in its folder")
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES:
        raise MoesaicError(f"{file}: not a safetensors file (its header would be {length} bytes long)")
    if 8 + length > size:
        raise MoesaicError(
            f"{file}: truncated, it has {size} bytes and its header alone needs {8 + length}; fetch the file again"
        )
    return length


def _read_exactly(fd: int, length: int, offset: int) -> bytes:
    parts: list[bytes] = []
    while length:
        part = os.pread(fd, length, offset)
        if not part:
            raise OSError(5, "the file ends early")
        parts.append(part)
        length -= len(part)
        offset += len(part)
    return b"".join(parts)


def _parse_json(text: bytes, file: Path) -> dict[str, Any]:
    twice: list[str] = []

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            twice.extend(key for key, _ in pairs if key in seen or seen.add(key))
        return result

    try:
        entries = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise MoesaicError(f"{file}: damaged header, not JSON; fetch the file again") from error
    if twice:
        raise MoesaicError(f"{file}: damaged header, {twice[0]!r} is given twice")
    if not isinstance(entries, dict):
        raise MoesaicError(f"{file}: damaged header, not a JSON object; fetch the file again")
    return entries


def _is_size(value: object) -> bool:
    return type(value) is int and value >= 0


def _tensor_info(name: str, entry: object, file: Path, start: int) -> TensorInfo:
    def refuse(what: str) -> MoesaicError:
        return MoesaicError(f"{file}: damaged header, tensor {name!r} has {what}")

    if not isinstance(entry, dict):
        raise refuse("no description")
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise refuse(f"an unknown dtype {dtype!r}")
    if not isinstance(shape, list) or not all(map(_is_size, shape)):
        raise refuse(f"a bad shape {shape!r}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        raise refuse(f"bad data_offsets {offsets!r}")
    begin, end = offsets
    nbytes = tensor_bytes(dtype, tuple(shape))
    if end - begin != nbytes:
        raise refuse(f"{end - begin} bytes for {nbytes} bytes of {dtype} {shape}")
    return TensorInfo(name=name, dtype=dtype, shape=tuple(shape), file=file, offset=start + begin, nbytes=nbytes)


# --- the index, and JSON in general -----------------------------------------------------------------------------------


def shard_names(index_file: Path) -> dict[str, str]:
    """The weight map (tensor -> file name) of an index file, checked for its types only."""
    weight_map = load_document(_Index, load_json(index_file), str(index_file), others=True).weight_map
    if not weight_map:
        raise MoesaicError(f"{index_file}: its weight_map is empty")
    for name, file in weight_map.items():
        if not file.endswith(".safetensors"):
            raise MoesaicError(f"{index_file}: puts tensor {name!r} into {file!r}, which is not a .safetensors file")
    return weight_map


@dataclass(frozen=True, kw_only=True)
class _Index:
    """model.safetensors.index.json; its `metadata` is of no use here."""

    weight_map: dict[str, str]
    """Tensor -> name of the file that has it."""


def collect(
    index_file: Path, weight_map: dict[str, str], headers: dict[str, dict[str, TensorInfo]]
) -> dict[str, TensorInfo]:
    """Merge the headers of all shards (by file name); refuses tensors given twice and tensors the index invents.

    Tensors that a shard has and the index doesn't name are taken too, as transformers does.
    """
    tensors: dict[str, TensorInfo] = {}
    for infos in headers.values():
        for name, info in infos.items():
            if name in tensors:
                raise MoesaicError(f"{info.file}: tensor {name!r} is also in {tensors[name].file.name}; remove one")
            tensors[name] = info
    for name, file in weight_map.items():
        if name not in headers[file]:
            where = f"; it is in {tensors[name].file.name}" if name in tensors else ""
            raise MoesaicError(f"{index_file}: says that tensor {name!r} is in {file}, which does not have it{where}")
    return tensors


def no_weights(where: Path | str, files: list[str]) -> MoesaicError:
    """The error for a checkpoint without `model.safetensors` and without an index, from the names of its files."""
    missing = f"{where}: has neither {SINGLE_FILE} nor {INDEX_FILE}"
    if any(file.endswith(".safetensors") for file in files):
        return MoesaicError(f"{missing}, only other .safetensors files; fetch the index, or save it with transformers")
    if any(file.endswith((".bin", ".pt", ".pth")) for file in files):
        return MoesaicError(
            f"{missing}, only pickled weights, which are never opened; convert it: "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
        )
    if any(file.endswith(".gguf") for file in files):
        return MoesaicError(f"{missing}, only GGUF files; use the original safetensors release")
    return MoesaicError(f"{missing}; give the folder of a transformers checkpoint")


def load_format(path: Path, expected: str, what: str) -> dict[str, Any]:
    """A document of Moesaic without its `format`, which must be the expected one; `what` names it, with its article."""
    value = load_json(path)
    if (found := value.pop("format", None)) != expected:
        raise MoesaicError(f"{path}: not {what} (format is {found!r}, expected {expected!r})")
    return value
